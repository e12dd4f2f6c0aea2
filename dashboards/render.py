"""Draws dashboards without Grafana, from a running Prometheus: one PNG and one HTML page for each.

python -m dashboards.render --dashboard tension --prometheus http://127.0.0.1:9090 --minutes 15
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import altair as alt
import click
import vl_convert

from dashboards.catalogue import DASHBOARDS
from dashboards.spec import REFERENCE_COLOUR, Dashboard, Panel, Query, filled
from serving.core.http_get import GetError, get
from serving.core.lane_colours import LANE_COLOURS, lane_colours
from serving.progress import progress

READ_TIMEOUT_S = 30
POINTS = 240  # in a panel, at most
GRID_WIDTH_PX = 1240
PANEL_HEIGHT_PX = 190
PNG_SCALE = 1.5
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3))
OPACITIES = (0.7, 0.45, 0.25, 0.1)
LEGEND_COLUMN_PX = 200
UNITS = {
    "s": "seconds",
    "reqps": "requests/s",
    "ops": "per second",
    "percentunit": "share",
    "percent": "percent",
    "bytes": "bytes",
    "Bps": "bytes/s",
    "flops": "FLOP/s",
    "short": "",
}

Point = dict[str, Any]  # at: milliseconds since the epoch; line; value; owner
Owner = tuple[str, str]  # whose a line is: a label and its value; no label for what has none
Chart = Any  # mypy skips altair
Look = TypeVar("Look")


class NoPrometheusError(click.ClickException):
    """Prometheus cannot be reached, or refuses a query."""


def read_points(
    prometheus_url: str, query: Query, values: dict[str, str], span_s: tuple[float, float]
) -> list[Point]:
    """One query over a span of time.

    Args:
        values: of the dashboard's variables; those left out are at All.

    Raises:
        NoPrometheusError: it cannot be reached, or the query is refused.
    """
    start_s, end_s = span_s
    parameters = {
        "query": filled(query.expr, values),
        "start": start_s,
        "end": end_s,
        "step": max(1.0, (end_s - start_s) / POINTS),
    }
    url = f"{prometheus_url}/api/v1/query_range?{urllib.parse.urlencode(parameters)}"
    try:
        data = json.loads(get(url, timeout_s=READ_TIMEOUT_S))["data"]
    except GetError as error:
        raise NoPrometheusError(f"{prometheus_url}: {error.why}: {parameters['query']}") from None
    except (ValueError, KeyError) as error:
        raise NoPrometheusError(f"{prometheus_url}: {error}: {parameters['query']}") from error
    return [
        {
            "at": float(at_s) * 1000,
            "line": line_name(query.legend, series["metric"]),
            "value": float(value),
            "owner": owner_of(query, series["metric"]),
        }
        for series in data["result"]
        for at_s, value in series["values"]
        if math.isfinite(float(value))
    ]


def line_name(legend: str, labels: dict[str, str]) -> str:
    """A legend with its labels filled in, as Grafana does it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def owner_of(query: Query, labels: Mapping[str, str]) -> Owner:
    """The lane, also of a replica's line; else what the legend names first."""
    if not query.labels:
        return "", query.legend
    label = "lane" if labels.get("lane") else query.labels[0]
    return label, labels.get(label, "")


def colours_of(owners: Iterable[Owner]) -> dict[Owner, str]:
    """One colour for each owner in all panels: a lane's as in a report, the others' by the alphabet."""
    by_label = defaultdict(list)
    for label, value in sorted(set(owners)):
        by_label[label].append(value)
    colours = {("lane", lane): colour for lane, colour in lane_colours(by_label.pop("lane", ())).items()}
    for label, values in by_label.items():
        # From the end: its colours are the last that a lane takes.
        colours |= {
            (label, value): colour for value, colour in zip(values, cycle(LANE_COLOURS[::-1]), strict=False)
        }
    return colours


def told_apart(colours: Sequence[str], looks: Sequence[Look]) -> list[Look]:
    """A look for each line; lines that share a colour differ in it."""
    seen: Counter[str] = Counter()
    chosen = []
    for colour in colours:
        chosen.append(looks[seen[colour] % len(looks)])
        seen[colour] += 1
    return chosen


def has_data(panel: Panel, points: Iterable[Point]) -> bool:
    """Whether there is more than what others are compared with."""
    return any(point["line"] not in panel.references for point in points)


def draw_panel(
    panel: Panel, points: Sequence[Point], span_s: tuple[float, float], colour_by_owner: Mapping[Owner, str]
) -> Chart:
    """One panel; a panel without data says so."""
    width_px = round(GRID_WIDTH_PX * panel.width / 24) - 90
    title = alt.TitleParams(panel.title, subtitle=_wrapped(panel.description, width_px))
    size = {"width": width_px, "height": PANEL_HEIGHT_PX, "title": title}
    if not has_data(panel, points):
        text = ["no data", *_wrapped(panel.why_empty, width_px)]
        empty = alt.Chart(alt.Data(values=[{}])).mark_text(text=text, color="#56606b", fontSize=13)
        return empty.properties(**size, view=alt.ViewBackground(stroke="#c5ccd3", strokeDash=[4, 4]))
    owner_by_line = {point["line"]: point["owner"] for point in points}
    lines = sorted(owner_by_line)
    colours = [
        REFERENCE_COLOUR if line in panel.references else colour_by_owner[owner_by_line[line]]
        for line in lines
    ]
    if panel.kind == "stat":
        return _bars(points, lines, colours).properties(**size)
    highest = max(point["value"] for point in points)
    domain_ms = [instant_s * 1000 for instant_s in span_s]
    base = alt.Chart(alt.Data(values=list(points))).encode(
        x=alt.X(
            "at:T",
            title=None,
            scale=alt.Scale(domain=domain_ms, type="utc"),
            axis=alt.Axis(format="%H:%M:%S", tickCount=max(2, width_px // 110)),
        ),
        y=alt.Y(
            "value:Q",
            title=UNITS.get(panel.unit, panel.unit.removeprefix("suffix: ")),
            scale=alt.Scale(domainMin=0) if highest > 0 else alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format=_number_format(panel.unit), tickCount=5),
            stack="zero" if panel.kind == "stack" else None,
        ),
        color=alt.Color(
            "line:N",
            title=None,
            scale=alt.Scale(domain=lines, range=colours),
            legend=alt.Legend(
                orient="bottom",
                columns=max(1, width_px // LEGEND_COLUMN_PX),
                labelLimit=LEGEND_COLUMN_PX - 30,
                symbolType="square" if panel.kind == "stack" else "stroke",
            ),
        ),
    )
    if panel.kind == "stack":
        shares = alt.Scale(domain=lines, range=told_apart(colours, OPACITIES))
        opacity = alt.FillOpacity("line:N", sort=None, scale=shares, title=None)
        marks = [base.mark_area(clip=True).encode(fillOpacity=opacity)]
    else:
        dashes = alt.Scale(domain=lines, range=told_apart(colours, DASHES))
        dash = alt.StrokeDash("line:N", scale=dashes, title=None)
        marks = [base.mark_line(strokeWidth=1.8, clip=True).encode(strokeDash=dash)]
    for value, colour in panel.thresholds:
        if value <= highest * 1.2:
            rule = alt.Chart(alt.Data(values=[{"y": value}])).mark_rule(strokeDash=[5, 4], color=colour)
            marks.append(rule.encode(y="y:Q"))
    return alt.layer(*marks).properties(**size)


def _bars(points: Sequence[Point], lines: Sequence[str], colours: Sequence[str]) -> Chart:
    """The last value of each line."""
    last = {point["line"]: point for point in sorted(points, key=lambda point: float(point["at"]))}
    base = alt.Chart(alt.Data(values=[last[line] for line in lines])).encode(
        y=alt.Y("line:N", title=None),
        x=alt.X("value:Q", title=None, axis=alt.Axis(tickMinStep=1), scale=alt.Scale(domainMin=0)),
    )
    colour = alt.Color("line:N", scale=alt.Scale(domain=lines, range=colours), legend=None)
    return base.mark_bar(opacity=0.8).encode(color=colour) + base.mark_text(align="left", dx=4).encode(
        text=alt.Text("value:Q", format=",.3~r")
    )


def _number_format(unit: str) -> str:
    if unit == "percentunit":
        return ".0%"
    return "~s" if unit in ("bytes", "Bps", "flops") else ",.4~f"


def _wrapped(text: str, width_px: int) -> list[str]:
    """Lines of about the panel's width."""
    limit = max(20, width_px // 6)
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


Data = dict[Panel, list[Point]]


def read(
    dashboard: Dashboard, prometheus_url: str, values: dict[str, str], span_s: tuple[float, float]
) -> Data:
    """All points of a dashboard, panel by panel.

    Raises:
        NoPrometheusError: as `read_points`.
    """
    return {
        panel: [
            point for query in panel.queries for point in read_points(prometheus_url, query, values, span_s)
        ]
        for panel in dashboard.panels
    }


def draw(dashboard: Dashboard, data: Data, span_s: tuple[float, float]) -> Chart:
    """The whole dashboard, row by row."""
    colours = colours_of(
        point["owner"]
        for panel, points in data.items()
        for point in points
        if point["line"] not in panel.references
    )
    rows = []
    for row in dashboard.rows:
        drawn = [draw_panel(panel, data[panel], span_s, colours) for panel in row.panels]
        # A row may hold more than one line of panels.
        line: list[Chart] = []
        width = 0
        for panel, chart in zip(row.panels, drawn, strict=True):
            line.append(chart)
            width += panel.width
            if width >= 24:
                rows.append(
                    alt.hconcat(*line, spacing=24).resolve_scale(
                        color="independent", strokeDash="independent"
                    )
                )
                line, width = [], 0
    title = alt.TitleParams(
        dashboard.title, subtitle=dashboard.question, fontSize=20, subtitleFontSize=14, offset=24
    )
    return (
        alt.vconcat(*rows, spacing=28, title=title)
        .resolve_scale(color="independent", strokeDash="independent")
        .configure(
            background="white",
            font="system-ui, 'DejaVu Sans', sans-serif",
            padding=16,
            view={"stroke": "#e3e7eb"},
            axis={
                "gridColor": "#eef0f2",
                "labelColor": "#56606b",
                "titleColor": "#56606b",
                "titleFontWeight": "normal",
            },
            title={"anchor": "start", "fontSize": 14, "subtitleFontSize": 11, "subtitleColor": "#56606b"},
            legend={"labelFontSize": 11, "symbolStrokeWidth": 3, "symbolSize": 180},
        )
    )


def _assigned(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if faults := [text for text, (_, sign, _) in zip(given, pairs, strict=True) if not sign]:
        raise click.BadParameter(f"{faults[0]!r} is not of the form lane=batched")
    return {name: value for name, _, value in pairs}


@click.command()
@click.option("--prometheus", "prometheus_url", default="http://127.0.0.1:9090", show_default=True)
@click.option(
    "--dashboard",
    "chosen",
    multiple=True,
    type=click.Choice([each.name for each in DASHBOARDS]),
    help="May be repeated.  [default: tension and speculation]",
)
@click.option("--minutes", type=click.FloatRange(min=0.1, max=1440), default=15, show_default=True)
@click.option("--variable", "values", multiple=True, callback=_assigned, help="Such as lane=batched.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/dashboards"), show_default=True)
def main(
    prometheus_url: str, chosen: tuple[str, ...], minutes: float, values: dict[str, str], out: Path
) -> None:
    """Draw dashboards from the last minutes of a running Prometheus."""
    end_s = time.time()
    span_s = (end_s - 60 * minutes, end_s)
    out.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        if dashboard.name not in (chosen or ("tension", "speculation")):
            continue
        with progress() as say:
            say(f"{dashboard.name}: reading {len(dashboard.panels)} panels")
            data = read(dashboard, prometheus_url.rstrip("/"), values, span_s)
            say(f"{dashboard.name}: drawing")
            spec = draw(dashboard, data, span_s).to_dict()
            (out / f"{dashboard.name}.png").write_bytes(vl_convert.vegalite_to_png(spec, scale=PNG_SCALE))
            say(f"{dashboard.name}: writing the page")
            page = vl_convert.vegalite_to_html(spec, bundle=True)
            (out / f"{dashboard.name}.html").write_text(page, encoding="utf-8")
        click.echo(f"{out / dashboard.name}.png and .html")
        empty = [panel for panel in data if not has_data(panel, data[panel])]
        if empty:
            click.echo(f"  no data in {len(empty)} of {len(data)} panels:")
        for panel in empty:
            reason = panel.why_empty
            click.echo(f"    {panel.title}" + (f": {reason}" if reason else ""))


if __name__ == "__main__":
    main()
