"""How charts look: themes, and series told apart by shape and dash before colour. Colour is the lane's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from loadtest.drawing.label_places import CHARACTER_PX
from serving.core.lane_colours import LANE_COLOURS, lane_colours

VEGA_LITE_VERSION = ".".join(alt.SCHEMA_VERSION.split(".")[:2])
PANEL_WIDTH_PX = 330
PANEL_HEIGHT_PX = 240
BAR_WIDTH_PX = 560
BAR_STEP_PX = 34
LABEL_GAP_PX = 16  # between a bar, its label and the edge

GREY = "#8a98a6"  # of what is no lane; seen on white and on near-black
BAD = "#bf0033"  # of what failed or was thrown away
# Beside each colour of a lane.
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-right", "triangle-left")
DASHES = ((1, 0), (7, 3), (2, 2), (9, 3, 2, 3), (4, 4), (12, 4), (3, 6))

LOG_PADDING_PX = 24  # at both ends of a log axis
MIN_TICKS = 3  # of a log scale
TICKS_BEYOND = 0.04  # of a log scale's length: within its padding

Row = dict[str, Any]
Chart = Any  # mypy skips altair: charts are untyped here


def theme(text: str, muted: str, grid: str, background: str | None) -> dict[str, Any]:
    """A Vega-Lite config; None as background lets the page show through."""
    plain = {"titleFontWeight": "normal", "labelFontSize": 12, "titleFontSize": 12}
    # One legend for shape, dash and colour: a dashed edge around a shape would only fray it.
    symbols = {"symbolSize": 90, "symbolStrokeWidth": 0}
    lines = {"gridColor": grid, "domainColor": muted, "tickColor": muted}
    return {
        "background": background,
        "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
        "view": {"stroke": grid},
        "axis": {"labelColor": muted, "titleColor": text, "titlePadding": 8, **lines, **plain},
        "legend": {"labelColor": text, "titleColor": muted, "orient": "top", **symbols, **plain},
        "header": {"labelColor": text, "labelFontSize": 13, "labelFontWeight": "bold", "title": None},
        "title": {"color": text},
        "text": {"color": text, "fontSize": 12},
        "rule": {"color": muted},
    }


# In a page its own colours, so that a picture is light, dark or in print without being drawn again.
PAGE_THEME = theme("var(--text)", "var(--muted)", "var(--line)", None)
PAPER_THEME = theme("#1c2127", "#56606b", "#e3e7eb", "white")


@dataclass(frozen=True, slots=True)
class Look:
    """How one line and its points are drawn."""

    colour: str
    shape: str
    dash: tuple[int, ...]


def lane_looks(config: Mapping[str, Any], lanes: Iterable[str]) -> dict[str, Look]:
    """The look of each lane: one in all pictures of a lab.

    Args:
        config: the lab's, for the order of lanes that have no look of their own; empty where it is not known.
        lanes: what else there is.
    """
    configured = [lane["name"] for lane in config.get("lanes", ())]
    places = {
        lane: LANE_COLOURS.index(colour) for lane, colour in lane_colours([*configured, *lanes]).items()
    }
    return {lane: Look(LANE_COLOURS[place], SHAPES[place], DASHES[place]) for lane, place in places.items()}


@dataclass(frozen=True, slots=True)
class Series:
    """The lines of a chart: the field that tells them apart, each name's look in order, the legend's title."""

    field: str
    looks: Mapping[str, Look]
    title: str | None

    def lines(self, base: Chart, **encodings: Any) -> Chart:
        """A line for each name."""
        dashes = [look.dash for look in self.looks.values()]
        dash = alt.StrokeDash(f"{self.field}:N", title=self.title, scale=self._scale(dashes))
        return base.mark_line(strokeWidth=2).encode(color=self._colour(), strokeDash=dash, **encodings)

    def points(self, base: Chart, hollow: str | None = None) -> Chart:
        """A mark for each value; its outline only where the expression `hollow` is true."""
        shapes = [look.shape for look in self.looks.values()]
        shape = alt.Shape(f"{self.field}:N", title=self.title, scale=self._scale(shapes))
        marks = base.mark_point(filled=True, size=75, opacity=1).encode(color=self._colour(), shape=shape)
        if hollow is None:
            return marks
        return marks.encode(
            stroke=self._colour(alt.Stroke),
            strokeWidth=alt.value(2),
            fillOpacity=alt.condition(hollow, alt.value(0), alt.value(1)),
        )

    def rules(self, base: Chart, **encodings: Any) -> Chart:
        """An interval for each value, cut at the edge of its panel."""
        return base.mark_rule(strokeWidth=1.2, clip=True).encode(color=self._colour(), **encodings)

    def _colour(self, channel: Any = alt.Color) -> Any:
        colours = [look.colour for look in self.looks.values()]
        return channel(f"{self.field}:N", title=self.title, scale=self._scale(colours))

    def _scale(self, values: Sequence[Any]) -> Any:
        return alt.Scale(domain=list(self.looks), range=list(values))


def lines_of_lanes(field: str, title: str, lane_of: Mapping[str, str], looks: Mapping[str, Look]) -> Series:
    """A series with several lines for a lane: of its colour, told apart by shape and dash.

    Args:
        lane_of: the lane of each line, in the order of the legend.
    """
    return Series(
        field,
        {
            name: Look(looks[lane].colour, SHAPES[place % len(SHAPES)], DASHES[place % len(DASHES)])
            for place, (name, lane) in enumerate(lane_of.items())
        },
        title,
    )


def lane_colour(field: str, looks: Mapping[str, Look]) -> Any:
    """Colour by lane where the lane's name stands beside it, so that no legend is needed."""
    colours = [look.colour for look in looks.values()]
    return alt.Color(f"{field}:N", legend=None, scale=alt.Scale(domain=list(looks), range=colours))


def table(rows: Sequence[Row]) -> Chart:
    """A chart over rows that travel inside it."""
    return alt.Chart(alt.Data(values=list(rows)))


def panels(layers: Sequence[Chart], rows: Sequence[Row], field: str) -> Chart:
    """The layers once for each value of `field`, in the order of the rows, side by side."""
    order = list(dict.fromkeys(row[field] for row in rows))
    layered = alt.layer(*layers, data=alt.Data(values=list(rows)))
    layered = layered.properties(width=PANEL_WIDTH_PX, height=PANEL_HEIGHT_PX)
    # A heading that is longer than its panel would be cut at the page's edge.
    header = alt.Header(labelLimit=PANEL_WIDTH_PX)
    facet = alt.Facet(f"{field}:N", title=None, sort=order, header=header)
    chart = layered.facet(facet=facet, columns=min(2, len(order)))
    # By the plots themselves: by what sticks out of them, the headings of a row would not be level.
    return chart.properties(bounds="flush", spacing={"row": 90, "column": 64})


def bar_chart(layers: Sequence[Chart], count: int) -> Chart:
    """Layers over `count` bars that lie below each other."""
    return alt.layer(*layers).properties(width=BAR_WIDTH_PX, height=BAR_STEP_PX * count)


def scale_with_labels(highest: float, labels: Iterable[str]) -> Any:
    """From 0 to `highest`, and room for the longest label behind it, however wide the chart is drawn."""
    label_px = LABEL_GAP_PX + CHARACTER_PX * max(map(len, labels))
    end = f"{highest or 1} * width / max(width - {label_px}, width / 4)"
    return alt.Scale(domainMin=0, domainMax=alt.ExprRef(end), nice=False)


def concurrency_axis(levels: Iterable[int], title: str = "concurrency (users, log scale)") -> Any:
    """Concurrency on a log scale, with a tick at each level measured."""
    known = sorted(set(levels))
    axis = alt.Axis(values=known, format="d", grid=False)
    scale = alt.Scale(type="log", base=2, nice=False, padding=18)
    return alt.X("concurrency:Q", title=title, axis=axis, scale=scale)


def log_ticks(values: Iterable[float]) -> list[float]:
    """Round numbers for a log scale from the lowest value to the highest, a little beyond both; three at least.

    Vega labels powers of ten only, which leaves a scale of less than a decade with one label or none.
    """
    known = set(values)
    low, high = min(known), max(known)
    beyond = (high / low) ** TICKS_BEYOND
    decades = range(math.floor(math.log10(low)) - 1, math.floor(math.log10(high)) + 2)
    for mantissas in (
        (1, 2, 5),
        (1, 2, 3, 4, 5, 6, 8),
        (1, 1.2, 1.5, 1.8, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9),
    ):
        ticks = [float(f"{mantissa}e{decade}") for decade in decades for mantissa in mantissas]
        if len(ticks := [tick for tick in ticks if low / beyond <= tick <= high * beyond]) >= MIN_TICKS:
            return ticks
    return sorted({float(f"{value:.3g}") for value in (low, high)})


def log_tick_axis(groups: Iterable[Iterable[float]], **settings: Any) -> Any:
    """An axis for a log scale, with the ticks that each panel's values need."""
    ticks = sorted({tick for values in groups for tick in log_ticks(values)})
    # Not ".1s": a tick of 0.15 s would be printed as 0.1.
    return alt.Axis(format="~g", values=ticks, labelOverlap="greedy", labelSeparation=4, **settings)


def log_axis(field: str, title: str, values: Sequence[float]) -> Any:
    """A value over orders of magnitude, from the least of the values to the greatest."""
    domain = [min(values), max(values)]
    scale = alt.Scale(type="log", domain=domain, nice=False, padding=LOG_PADDING_PX)
    return alt.X(f"{field}:Q", title=title, scale=scale, axis=log_tick_axis([values]))


def rate_axis(rates: Sequence[float]) -> Any:
    """Offered rate: from 0, or over orders of magnitude when they span more than one."""
    is_log = max(rates) > 10 * min(rates)
    scale = alt.Scale(type="log", nice=False, padding=18) if is_log else alt.Scale(zero=True)
    title = "offered requests/s" + (" (log scale)" if is_log else "")
    linear = alt.Axis(format="~g", grid=False, labelOverlap="greedy")
    axis = log_tick_axis([rates], grid=False) if is_log else linear
    return alt.X("rate:Q", title=title, scale=scale, axis=axis)


def from_zero(field: str, title: str | None, highest: float | None = None) -> Any:
    """A value from 0; to `highest` where labels need room above it."""
    scale = alt.Scale(zero=True) if highest is None else alt.Scale(domain=[0, highest], nice=False)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=alt.Axis(grid=True))


def tip(field: str, title: str, format_: str = "") -> Any:
    """One line of what is shown under the pointer."""
    return alt.Tooltip(field, title=title, format=format_) if format_ else alt.Tooltip(field, title=title)
