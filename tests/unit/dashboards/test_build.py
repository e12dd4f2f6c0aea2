"""The committed dashboards against their specs, and the specs against the list of metrics and rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import build
from dashboards.catalogue import DASHBOARDS
from dashboards.load_test import LOAD_TEST
from dashboards.spec import ALL, REFERENCE_COLOUR, VARIABLES, Dashboard, Panel, Query, filled
from dashboards.speculation import SPECULATION
from dashboards.tension import TENSION
from serving.core.lane_colours import KNOWN_LANES, lane_colours
from serving.metrics import names as metric_names
from serving.metrics.names import METRICS

FOLDER = Path(build.__file__).parent
RULES = [
    rule
    for path in sorted((FOLDER / "prometheus" / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OURS = {
    metric.name + suffix
    for metric in METRICS
    for suffix in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}
VLLM = {value for name, value in vars(metric_names).items() if name.startswith("VLLM_")}
NAME = re.compile(r"(?:\w+:)?(?:tandem|vllm:)[\w:]*")

by_name = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.name)


def committed(dashboard: Dashboard) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(build.path_of(dashboard).read_text())
    return found


@by_name
def test_the_committed_json_is_what_the_spec_gives(dashboard: Dashboard) -> None:
    assert build.path_of(dashboard).read_text() == build.to_json(dashboard), "python -m dashboards.build"


def test_no_dashboard_is_left_over() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {f"{one.name}.json" for one in DASHBOARDS}


def names_in(expr: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}", "", expr)
    return set(NAME.findall(bare))


@by_name
def test_panels_use_metrics_that_exist(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        for query in panel.queries:
            for name in names_in(query.expr):
                known = (
                    OURS | VLLM | RECORDED | {f"{one}_{part}" for one in VLLM for part in ("sum", "count")}
                )
                assert name in known, f"{panel.title}: {name}"


def test_rules_use_metrics_that_exist() -> None:
    for rule in RULES:
        for name in names_in(rule["expr"]):
            assert name in OURS | VLLM | RECORDED, f"{rule}: {name}"


def test_what_the_rules_are_tested_with_exists() -> None:
    for path in sorted((FOLDER / "prometheus" / "tests").glob("*.yml")):
        for test in yaml.safe_load(path.read_text())["tests"]:
            texts = [one["series"] for one in test["input_series"]]
            texts += [one["expr"] for one in test.get("promql_expr_test", ())]
            for name in {name for text in texts for name in names_in(text)}:
                assert name in OURS | VLLM | RECORDED, f"{path.name}: {test['name']}: {name}"


def test_panels_name_our_metrics_by_their_constants() -> None:
    """So that whoever looks for the users of a metric finds its panels."""
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        assert [metric.name for metric in METRICS if metric.name in text] == [], path.name


def test_every_recording_rule_is_used() -> None:
    texts = [query.expr for one in DASHBOARDS for panel in one.panels for query in panel.queries]
    texts += [rule["expr"] for rule in RULES]
    used = {name for text in texts for name in names_in(text)}
    assert used >= RECORDED


@by_name
def test_every_panel_says_what_it_shows(dashboard: Dashboard) -> None:
    for panel in dashboard.panels:
        assert panel.description.endswith("."), panel.title
        assert panel.description.count(". ") == 0, f"{panel.title}: one sentence"
        assert "`" not in panel.description, f"{panel.title}: Grafana shows a description as plain text"
        assert panel.unit, panel.title
        assert all(query.legend for query in panel.queries), panel.title


@by_name
def test_rows_fill_the_width(dashboard: Dashboard) -> None:
    for row in dashboard.rows:
        assert sum(panel.width for panel in row.panels) % 24 == 0, row.title
    panels = [panel for panel in committed(dashboard)["panels"] if panel["type"] != "row"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(dashboard.panels) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_all_four_choices_are_offered() -> None:
    assert {name for one in DASHBOARDS for name in one.variables} >= {"lane", "replica", "tenant", "workload"}


@by_name
def test_choices_begin_at_all_and_can_go_back_there(dashboard: Dashboard) -> None:
    for variable in committed(dashboard)["templating"]["list"]:
        if variable["name"] == "plain":
            assert (variable["includeAll"], variable["current"]["value"]) == (False, "batched")
        else:
            assert (variable["includeAll"], variable["allValue"]) == (True, ALL)
            assert variable["current"]["value"] == ["$__all"]


@by_name
def test_dashboards_link_to_each_other_and_cannot_be_edited(dashboard: Dashboard) -> None:
    made = committed(dashboard)
    (link,) = made["links"]
    assert (link["tags"], link["includeVars"], link["keepTime"]) == (["tandem"], True, True)
    assert made["tags"] == ["tandem"]
    assert made["editable"] is False
    assert made["annotations"]["list"][0]["expr"]


def test_the_data_source_is_the_one_that_is_provisioned() -> None:
    text = (FOLDER / "grafana/provisioning/datasources/tandem.yml").read_text()
    (source,) = yaml.safe_load(text)["datasources"]
    uids = {
        target["datasource"]["uid"]
        for one in DASHBOARDS
        for panel in committed(one)["panels"]
        for target in panel.get("targets", [])
    }
    assert uids == {source["uid"]}


def test_variables_stand_in_regular_expressions_or_in_labels() -> None:
    for one in DASHBOARDS:
        for panel in one.panels:
            for query in panel.queries:
                for name in VARIABLES:
                    for match in re.finditer(rf'(\S\S)"\${name}\b', query.expr):
                        assert match[1] == "=~" or name == "plain", f"{panel.title}: {query.expr}"


def test_variables_are_filled_at_all_at_a_value_and_empty() -> None:
    expr = 'x{lane=~"$lane",replica=~"$replica"} / y{lane="$plain"}'
    assert filled(expr, {}) == 'x{lane=~".*",replica=~".*"} / y{lane="batched"}'
    assert filled(expr, {"lane": "a", "plain": "p"}) == 'x{lane=~"a",replica=~".*"} / y{lane="p"}'
    assert filled(expr, {"lane": "", "replica": ""}).startswith('x{lane=~"",replica=~""}')


def overrides(dashboard: Dashboard, title: str) -> dict[str, Any]:
    """A committed panel's overrides by what they match."""
    (panel,) = [panel for panel in committed(dashboard)["panels"] if panel["title"] == title]
    return {
        one["matcher"]["options"]: {each["id"]: each["value"] for each in one["properties"]}
        for one in panel["fieldConfig"]["overrides"]
    }


def colours_in_grafana(found: dict[str, Any], line: str) -> set[str]:
    """The fixed colours that a line gets."""
    return {
        values["color"]["fixedColor"]
        for pattern, values in found.items()
        if "color" in values and (pattern == line or re.search(pattern.strip("/"), line))
    }


def test_a_lane_has_its_report_s_colour_in_grafana() -> None:
    found = overrides(TENSION, "Time to first token")
    for lane, colour in lane_colours(KNOWN_LANES).items():
        for line in (lane, f"{lane} p50", f"{lane} p95"):
            assert colours_in_grafana(found, line) == {colour}
    assert colours_in_grafana(found, "batched-2 p50") == set()
    assert colours_in_grafana(found, "limit of the SLO") == {REFERENCE_COLOUR}


def test_lines_of_one_colour_differ_in_grafana() -> None:
    assert "custom.lineStyle" in overrides(TENSION, "Time to first token")["B"]
    dashes = [
        str(values["custom.lineStyle"])
        for values in overrides(LOAD_TEST, "Time to first token").values()
        if "custom.lineStyle" in values
    ]
    assert len(set(dashes)) == 3


def test_many_lines_of_one_lane_keep_colours_of_their_own() -> None:
    assert overrides(SPECULATION, "Acceptance by position") == {}


@by_name
def test_a_panel_that_may_be_empty_says_when_in_grafana(dashboard: Dashboard) -> None:
    found = {panel["title"]: panel for panel in committed(dashboard)["panels"] if panel["type"] != "row"}
    for panel in dashboard.panels:
        text = found[panel.title]["fieldConfig"]["defaults"].get("noValue")
        assert text == (f"No data: {panel.why_empty}." if panel.why_empty else None)


def test_a_reason_that_two_queries_share_is_given_once() -> None:
    queries = (Query("a", "{{lane}} a", "none waits"), Query("b", "{{lane}} b", "none waits"))
    assert Panel("t", "d.", "s", queries).why_empty == "none waits"


def test_the_metrics_of_adaptive_placement_are_shown_and_may_all_be_empty() -> None:
    adaptive = {
        metric_names.PLACEMENT_CHOICES.name,
        metric_names.PLACEMENT_CORRECTION.name,
        metric_names.PREDICTED_ACCEPTED_TOKENS.name,
        metric_names.OBSERVED_ACCEPTED_TOKENS.name,
        metric_names.RELIABILITY_DRAFT_TOKENS.name,
        metric_names.RELIABILITY_ACCEPTED_TOKENS.name,
    }
    queries = [query for panel in SPECULATION.panels for query in panel.queries]
    shown = {query: names_in(query.expr) & adaptive for query in queries}
    assert set().union(*shown.values()) == adaptive
    assert all(query.may_be_empty for query, names in shown.items() if names)
