"""Writes the dashboards as Grafana's JSON: `python -m dashboards.build`. The files are committed."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase
from typing import Protocol, Self, TypeVar

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common, dashboard

from dashboards.catalogue import DASHBOARDS, RUN_ANNOTATION
from dashboards.spec import ALL, REFERENCE_COLOUR, SINGLE_VARIABLES, VARIABLES, Dashboard, Panel
from serving.core.lane_colours import KNOWN_LANES, lane_colours

FOLDER = Path(__file__).parent
DATASOURCE = dashboard.DataSourceRef(
    type_val="prometheus", uid="tandem-prometheus"
)  # as grafana/provisioning has it
TAG = "tandem"
REF_IDS = ascii_uppercase  # of a panel's queries
PANEL_HEIGHT = 8
# Of a panel's second query and those behind it: dash and gap in pixels.
DASHES = ([10, 6], [2, 5], [14, 5, 2, 5])
UNTIL_FIRST_THRESHOLD = None  # Grafana writes minus infinity so


def to_json(spec: Dashboard) -> str:
    """The dashboard as Grafana reads it; the same spec gives the same text."""
    return JSONEncoder(sort_keys=True, indent=2).encode(_dashboard(spec).build()) + "\n"


def path_of(spec: Dashboard) -> Path:
    """Where its JSON is committed."""
    return FOLDER / f"{spec.name}.json"


def _dashboard(spec: Dashboard) -> build.Dashboard:
    made = (
        build.Dashboard(f"Tandem: {spec.title}")
        .uid(f"tandem-{spec.name}")
        .description(spec.question)
        .tags([TAG])
        .timezone("browser")
        .time("now-15m", "now")
        .refresh("5s")
        .readonly()
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .annotation(
            build.AnnotationQuery()
            .name("load run")
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color("blue")
            .expr(RUN_ANNOTATION)
        )
        .link(
            build.DashboardLink("Tandem")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for name in spec.variables:
        made.with_variable(_variable(name))
    for row in spec.rows:
        made.with_row(build.Row(row.title))
        for panel in row.panels:
            made.with_panel(_panel(panel))
    return made


def _variable(name: str) -> build.QueryVariable:
    variable = (
        build.QueryVariable(name)
        .datasource(DATASOURCE)
        .query(VARIABLES[name])
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    )
    if default := SINGLE_VARIABLES.get(name):
        return (
            variable.label("compared with")
            .multi(False)
            .include_all(False)
            .current(dashboard.VariableOption(selected=True, text=default, value=default))
        )
    return (
        variable.multi(True)
        .include_all(True)
        .all_value(ALL)
        .current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


class _AnyPanel(Protocol):
    """What the panel builders of the SDK share; they have no common base that says so."""

    def build(self) -> dashboard.Panel: ...
    def title(self, title: str) -> Self: ...
    def description(self, description: str) -> Self: ...
    def datasource(self, datasource: dashboard.DataSourceRef) -> Self: ...
    def unit(self, unit: str) -> Self: ...
    def min(self, min_val: float) -> Self: ...
    def no_value(self, no_value: str) -> Self: ...
    def span(self, w: int) -> Self: ...
    def height(self, h: int) -> Self: ...
    def color_scheme(self, color: Builder[dashboard.FieldColor]) -> Self: ...
    def thresholds(self, thresholds: Builder[dashboard.ThresholdsConfig]) -> Self: ...
    def with_target(self, target: Builder[Dataquery]) -> Self: ...
    def override_by_name(self, name: str, properties: list[dashboard.DynamicConfigValue]) -> Self: ...
    def override_by_regexp(self, regexp: str, properties: list[dashboard.DynamicConfigValue]) -> Self: ...


_P = TypeVar("_P", bound=_AnyPanel)


def _panel(panel: Panel) -> Builder[dashboard.Panel]:
    if panel.kind == "stat":
        return _filled(stat.Panel(), panel)
    return _filled(_graph(panel), panel)


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .line_width(2)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builder.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if panel.kind == "stack":
        graph.stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(25)
    if panel.kind == "lines":
        # Lines of one lane share its colour, so they differ in this.
        labelled = [ref for ref, query in zip(REF_IDS, panel.queries, strict=False) if query.labels]
        for ref, dash in zip(labelled[1:], DASHES, strict=False):
            graph.override_by_query(ref, [_property("custom.lineStyle", {"fill": "dash", "dash": dash})])
    if panel.thresholds:
        graph.thresholds_style(
            common_builder.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED)
        )
    return graph


def _filled(made: _P, panel: Panel) -> _P:
    steps = [dashboard.Threshold(UNTIL_FIRST_THRESHOLD, "green")]
    steps += [dashboard.Threshold(value, colour) for value, colour in panel.thresholds]
    made = (
        made.title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit)
        .min(0)
        .span(panel.width)
        .height(PANEL_HEIGHT)
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
        .thresholds(build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps))
    )
    if panel.why_empty:
        made.no_value(f"No data: {panel.why_empty}.")
    # Where a lane has a line for each position or outcome, one colour for all would hide them.
    labels = {label for query in panel.queries for label in query.labels}
    if "lane" in labels and labels <= {"lane", "workload"}:
        for lane, colour in lane_colours(KNOWN_LANES).items():
            made.override_by_regexp(rf"/^{lane}( .*)?$/", [_fixed(colour)])
    for reference in sorted(panel.references):
        made.override_by_name(reference, [_fixed(REFERENCE_COLOUR)])
    for ref, query in zip(REF_IDS, panel.queries, strict=False):
        made.with_target(
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(ref)
            .range()
        )
    return made


def _property(name: str, value: object) -> dashboard.DynamicConfigValue:
    return dashboard.DynamicConfigValue(name, value)


def _fixed(colour: str) -> dashboard.DynamicConfigValue:
    return _property("color", {"mode": "fixed", "fixedColor": colour})


if __name__ == "__main__":
    for each in DASHBOARDS:
        path_of(each).write_text(to_json(each), encoding="utf-8")
