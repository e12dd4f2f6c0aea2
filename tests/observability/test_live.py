"""Every target, rule and panel query, against a real Prometheus that scraped a lab under load."""

from __future__ import annotations

import math
import subprocess
from typing import Any

import httpx
import pytest
import yaml

from dashboards.catalogue import DASHBOARDS, RUN_ANNOTATION
from dashboards.spec import SINGLE_VARIABLES, VARIABLES, Dashboard, Panel, Query, filled
from serving.metrics import names
from serving.metrics.names import METRICS
from tests.observability.conftest import LANES, NUM_TARGETS, REPLICAS, Watched
from tests.observability.prometheus_process import SHIPPED, Prometheus, installed

PANELS = [(dashboard, panel) for dashboard in DASHBOARDS for panel in dashboard.panels]
QUERIES = [(dashboard, panel, query) for dashboard, panel in PANELS for query in panel.queries]
ADAPTIVE = (
    names.PLACEMENT_CHOICES,
    names.PLACEMENT_CORRECTION,
    names.PREDICTED_ACCEPTED_TOKENS,
    names.OBSERVED_ACCEPTED_TOKENS,
    names.RELIABILITY_REQUESTS,
    names.RELIABILITY_DRAFT_TOKENS,
    names.RELIABILITY_ACCEPTED_TOKENS,
)

# Empty at one value, though not at All.
EMPTY_AT_ONE = {
    "Waiting by tenant": "the tenant picked may not have waited",
}


def name_of(value: object) -> str:
    if isinstance(value, Dashboard):
        return value.name
    if isinstance(value, Panel):
        return value.title
    return value.legend if isinstance(value, Query) else str(value)


def values_of(result: list[dict[str, Any]]) -> list[float]:
    return [float(value) for series in result for _, value in series["values"]]


def parsed(prometheus: Prometheus, expr: str, where: str) -> None:
    """Fail with the place of a query that is not PromQL."""
    answer = httpx.get(f"{prometheus.url}/api/v1/format_query", params={"query": expr}, timeout=10).json()
    assert answer["status"] == "success", f"{where}: {answer.get('error')}\n{expr}"


def test_every_process_is_scraped_under_load(watched: Watched) -> None:
    assert [target["lastError"] for target in watched.targets if target["health"] != "up"] == []
    roles = [target["labels"]["role"] for target in watched.targets]
    assert len(roles) == NUM_TARGETS
    assert {role: roles.count(role) for role in roles} == {
        "scheduler": 1,
        "gateway": 2,
        "replica": len(LANES) * REPLICAS,
        "ray": 1,
    }


@pytest.mark.parametrize(
    "name", ["vllm:generation_tokens_total", "ray_serve_deployment_replica_healthy"], ids=["vllm", "ray"]
)
def test_foreign_metrics_carry_lane_and_replica(watched: Watched, name: str) -> None:
    replicas = {
        target["labels"]["replica"] for target in watched.targets if target["labels"]["role"] == "replica"
    }
    found = watched.prometheus.ask("query", query=f'{name}{{lane=~"{"|".join(LANES)}"}}', time=watched.end_s)
    assert {one["metric"]["replica"] for one in found["result"]} == replicas
    for one in found["result"]:
        assert one["metric"]["replica"].startswith(one["metric"]["lane"] + "-")


def test_every_metric_of_the_list_is_exported(watched: Watched) -> None:
    known = set(watched.prometheus.ask("label/__name__/values"))
    expected = {f"{m.name}_bucket" if m.kind == "histogram" else m.name for m in METRICS}
    # Nobody has measured this machine in the test's cache, nothing broke here, and placement is not adaptive.
    optional = {"tandem_machine_flops_per_second", "tandem_machine_copy_bytes_per_second"}
    optional |= {metric.name for metric in ADAPTIVE}
    assert expected - known <= optional


@pytest.mark.parametrize(("dashboard", "panel", "query"), QUERIES, ids=name_of)
@pytest.mark.parametrize("chosen", ["all", "one", "none"])
def test_every_panel_query_gives_data(
    watched: Watched, dashboard: Dashboard, panel: Panel, query: Query, chosen: str
) -> None:
    where = f"dashboard {dashboard.name}, panel {panel.title!r}, query {query.legend!r}"
    values: dict[str, str] = {}
    if chosen == "one":
        values = watched.one_of_each()
        assert values.keys() == VARIABLES.keys() - SINGLE_VARIABLES.keys()
    elif chosen == "none":
        values = dict.fromkeys(VARIABLES, "")
    expr = filled(query.expr, values)
    parsed(watched.prometheus, expr, where)
    result = watched.prometheus.series(expr, watched.start_s, watched.end_s)
    if chosen == "none":
        return  # it is enough that it is PromQL and can be run: what it then shows is Grafana's affair
    may_be_empty = query.may_be_empty or (chosen == "one" and EMPTY_AT_ONE.get(panel.title))
    if not may_be_empty:
        finite = [value for value in values_of(result) if math.isfinite(value)]
        assert finite, f"{where}: no data\n{expr}"
        assert all(value >= 0 for value in finite), where
        if panel.unit == "percentunit":
            assert all(value <= 1.2 for value in finite), f"{where}: {max(finite)} is no share"
    for label in _labels(query.legend):
        assert all(label in series["metric"] for series in result), f"{where}: no label {label}"


def _labels(legend: str) -> list[str]:
    return [part.split("}}")[0] for part in legend.split("{{")[1:]]


def test_the_run_is_marked_from_start_to_end(watched: Watched) -> None:
    parsed(watched.prometheus, RUN_ANNOTATION, "annotation")
    (region,) = watched.prometheus.series(RUN_ANNOTATION, watched.start_s - 5, watched.end_s + 5)
    marked_s = [float(at_s) for at_s, _ in region["values"]]
    assert watched.start_s - 1 <= marked_s[0]
    assert marked_s[-1] <= watched.end_s + 1
    assert marked_s[-1] - marked_s[0] > 20


@pytest.mark.parametrize("name", list(VARIABLES))
def test_variables_find_values(watched: Watched, name: str) -> None:
    query = filled(VARIABLES[name], {})
    inner = query.removeprefix("label_values(").removesuffix(")")
    expr, _, label = inner.rpartition(", ")
    found = watched.prometheus.ask(f"label/{label}/values", **{"match[]": expr})
    assert found, query


def test_every_rule_runs_and_gives_data(watched: Watched) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    shipped = [
        rule
        for path in (SHIPPED / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
    ]
    assert len(rules) == len(shipped)
    for rule in rules:
        assert rule["health"] == "ok", (rule["name"], rule.get("lastError"))
        if rule["type"] == "recording":
            result = watched.prometheus.series(rule["name"], watched.start_s, watched.end_s)
            assert values_of(result) or rule["name"] in RULES_THAT_MAY_BE_EMPTY, rule["name"]


RULES_THAT_MAY_BE_EMPTY = {
    "lane:tandem_client_server:disagreement_5m": "gives no value below 50 requests of a lane in 5 minutes",
}


def test_the_share_of_streams_that_met_the_slo_is_never_above_one(watched: Watched) -> None:
    shares = values_of(
        watched.prometheus.series("lane:tandem_slo:attainment_1m", watched.start_s, watched.end_s)
    )
    assert shares
    assert max(shares) <= 1 + 1e-9


def test_rules_pass_their_own_tests() -> None:
    tests = sorted(map(str, (SHIPPED / "tests").glob("*.yml")))
    assert len(tests) == 2
    done = subprocess.run(
        [installed("promtool"), "test", "rules", *tests], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_shipped_configuration_is_valid() -> None:
    done = subprocess.run(
        [installed("promtool"), "check", "config", str(SHIPPED / "prometheus.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
