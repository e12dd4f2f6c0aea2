"""The five pictures as Vega-Lite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import altair as alt

from loadtest.drawing.style import (
    BAD,
    GREY,
    PANEL_HEIGHT_PX,
    PANEL_WIDTH_PX,
    Chart,
    Look,
    Row,
    Series,
    concurrency_axis,
    from_zero,
    lane_colour,
    lane_looks,
    log_tick_axis,
    panels,
    table,
    tip,
)
from loadtest.judge.wording import count, number, time
from loadtest.lesson.envelope import PLACEMENT, Curve, Reckoned, best_fixed
from loadtest.lesson.measure import OperatingPoint, Queue, Scoring, StepSize, Timeline
from serving.roofline import Roofline
from serving.tracing.events import Phase

WIDTH_PX = 560
GANTT_ROW_PX = 17
TIMELINE_HEIGHT_PX = 110
ROOF_POINTS = 41
DARK_GREY = "#5a6b7b"
KEPT_COLOUR = "#0d9970"  # as the page marks accepted drafts in the text

ONE_PASS, BY_TOKEN = "in one pass", "token by token"
DECODE, PREFILL, ROOF = "decode step", "prompt step", "roof"
STEP_PANEL, RATE_PANEL = "step time, ms", "tokens/s"
WAITING, PREFILLING, DECODING = "waiting", "prefill", "decode"
POINT, ENVELOPE = "point", "envelope"
RECKONED = "best k, reckoned"
RECKONED_LOOK = Look(GREY, "diamond", (2, 3))
ENVELOPE_STEPS = 16  # between two loads: its corners lie where two lines cross
ENVELOPE_WIDTH_PX = 12
TOP_SHARE = 1.2  # of the highest value: room for k above it
K_HEIGHT_PX = 12  # from the panel's top
PROMPT, OWN, KEPT, DROPPED = "prompt", "model's token", "accepted draft", "rejected draft"


def parallel_and_serial(scoring: Scoring, look: Look) -> Chart:
    """Tokens done against time: a staircase, and a leap; both of the lane with this look."""
    generated = list(enumerate(scoring.generated_at_s, start=1))
    rows: list[Row] = [
        {"way": way, "s": at_s, "tokens": tokens}
        for way, points in (
            (ONE_PASS, [(0, 0.0), (scoring.scored_tokens, scoring.pass_s)]),
            (BY_TOKEN, [(0, 0.0), *generated]),
        )
        for tokens, at_s in points
    ]
    ends = [
        {"way": way, "s": at_s, "tokens": tokens, "label": f"{number(rate, None)} tokens/s"}
        for way, at_s, tokens, rate in (
            (ONE_PASS, scoring.pass_s, scoring.scored_tokens, scoring.pass_tokens_per_s),
            (BY_TOKEN, scoring.generated_at_s[-1], len(generated), scoring.serial_tokens_per_s),
        )
    ]
    x = _time_axis("s")
    # Room above for the label of the pass.
    y = alt.Y(
        "tokens:Q", title="tokens done", scale=alt.Scale(domain=[0, 1.12 * scoring.scored_tokens], nice=False)
    )
    dash = alt.StrokeDash(
        "way:N",
        title=None,
        scale=alt.Scale(domain=[ONE_PASS, BY_TOKEN], range=[[6, 3], [1, 0]]),
        legend=alt.Legend(symbolType="stroke", symbolSize=300, symbolStrokeWidth=2),
    )
    tips = [tip("way:N", "way"), tip("s:Q", "after, s", ".3r"), tip("tokens:Q", "tokens")]
    lines = table(rows).mark_line(interpolate="step-after", strokeWidth=2, color=look.colour)
    points = table(ends).mark_point(filled=True, size=75, opacity=1, color=look.colour)
    labels = table(ends).encode(x=x, y=y, text="label:N")
    return alt.layer(
        lines.encode(x=x, y=y, strokeDash=dash, tooltip=tips),
        points.encode(x=x, y=y, tooltip=tips),
        labels.transform_filter(alt.datum.way == ONE_PASS).mark_text(align="left", dx=9),
        labels.transform_filter(alt.datum.way == BY_TOKEN).mark_text(align="right", dx=-14, dy=-14),
    ).properties(width=WIDTH_PX, height=PANEL_HEIGHT_PX)


def memory_wall(
    sizes: Sequence[StepSize],
    lanes: Sequence[OperatingPoint],
    roofline: Roofline | None,
    looks: Mapping[str, Look],
) -> Chart:
    """Step time and tokens/s against positions in a step, all on log scales, beside the roof's line."""
    rows = list(_wall_rows(sizes, lanes, roofline))
    shapes = {DECODE: "circle", PREFILL: "triangle-down"} | {_kind(lane): looks[lane].shape for lane in looks}
    colours = {_kind(lane): look.colour for lane, look in looks.items()}
    names = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != ROOF))
    log = alt.Scale(type="log", nice=False, padding=14)
    ticks = [2**power for power in range(math.ceil(math.log2(max(row["tokens"] for row in rows))) + 1)]
    x_axis = alt.Axis(format="~g", values=ticks, labelOverlap="greedy", labelSeparation=4)
    x = alt.X("tokens:Q", title="positions in a step", scale=log, axis=x_axis)
    by_panel = [[row["value"] for row in rows if row["panel"] == panel] for panel in (STEP_PANEL, RATE_PANEL)]
    y = alt.Y("value:Q", title=None, scale=log, axis=log_tick_axis(by_panel))
    tips = [
        tip("kind:N", "what"),
        tip("tokens:Q", "positions", ",.3~r"),
        tip("step_ms:Q", "step, ms", ",.3r"),
        tip("tokens_per_s:Q", "tokens/s", ",.3r"),
    ]
    colour = alt.Scale(domain=names, range=[colours.get(name, GREY) for name in names])
    shape = alt.Scale(domain=names, range=[shapes[name] for name in names])
    points = alt.Chart().transform_filter(alt.datum.kind != ROOF).mark_point(filled=True, opacity=1)
    layers = [
        points.encode(
            x=x,
            y=y,
            color=alt.Color("kind:N", title=None, scale=colour),
            shape=alt.Shape("kind:N", title=None, scale=shape),
            size=alt.condition("datum.is_lane", alt.value(200), alt.value(55)),
            tooltip=tips,
        )
    ]
    if roofline is not None:
        roof = alt.Chart().transform_filter(alt.datum.kind == ROOF).mark_line(strokeWidth=2, color=GREY)
        layers.insert(0, roof.encode(x=x, y=y))
    layered = alt.layer(*layers, data=alt.Data(values=rows))
    layered = layered.properties(width=PANEL_WIDTH_PX, height=PANEL_HEIGHT_PX)
    order = [STEP_PANEL, RATE_PANEL]
    chart = layered.facet(facet=alt.Facet("panel:N", title=None, sort=order), columns=2)
    return chart.resolve_scale(y="independent").properties(bounds="flush", spacing={"row": 70, "column": 64})


def _kind(lane: str) -> str:
    return f"lane {lane}"


def _wall_rows(
    sizes: Sequence[StepSize], lanes: Sequence[OperatingPoint], roofline: Roofline | None
) -> Iterator[Row]:
    """A row in both panels for each point, and for each of the roof."""
    points: list[tuple[str, float, float, float]] = [
        (DECODE if size.phase is Phase.DECODE else PREFILL, size.tokens, size.step_s, size.tokens_per_s)
        for size in sizes
    ]
    points += [(_kind(lane.lane), lane.tokens, lane.step_s, lane.tokens_per_s) for lane in lanes]
    if roofline is not None:
        widest = max(tokens for _, tokens, _, _ in points)
        for index in range(ROOF_POINTS):
            tokens = widest ** (index / (ROOF_POINTS - 1))
            points.append((ROOF, tokens, roofline.step_s(tokens), tokens / roofline.step_s(tokens)))
    for kind, tokens, step_s, tokens_per_s in points:
        both = {"kind": kind, "is_lane": kind.startswith("lane "), "tokens": tokens}
        both |= {"step_ms": 1000 * step_s, "tokens_per_s": tokens_per_s}
        yield both | {"panel": STEP_PANEL, "value": both["step_ms"]}
        yield both | {"panel": RATE_PANEL, "value": tokens_per_s}


def who_waits(queues: Sequence[Queue], looks: Mapping[str, Look]) -> Chart:
    """A Gantt chart for each lane, below each other on one time scale."""
    rows = [row for queue in queues for row in _gantt_rows(queue)]
    encodings: dict[str, Any] = {
        "x": _time_axis("from_s"),
        "x2": "to_s:Q",
        "y": alt.Y("request:O", title="request", axis=alt.Axis(grid=False, ticks=False)),
        "color": lane_colour("lane", looks),
        "opacity": alt.condition(alt.datum.phase == DECODING, alt.value(1), alt.value(0.5)),
        "tooltip": [
            tip("request:O", "request"),
            tip("phase:N", "phase"),
            tip("from_s:Q", "from, s", ".2f"),
            tip("to_s:Q", "to, s", ".2f"),
        ],
    }
    base = alt.Chart().encode(**encodings)
    layers = [
        # Thin where nothing is done for a request: told apart without colour, too.
        base.transform_filter(alt.datum.phase == WAITING).mark_bar(height=3),
        base.transform_filter(alt.datum.phase != WAITING).mark_bar(height=GANTT_ROW_PX - 5),
    ]
    chart = _stacked(layers, rows, GANTT_ROW_PX * max(len(queue.waits) for queue in queues))
    # In words: a legend of colours would give the lanes, which stand above their panels.
    key = f"thin: {WAITING}, pale: {PREFILLING}, full: {DECODING}"
    return chart.properties(title=alt.TitleParams(key, anchor="start", fontSize=12, fontWeight="normal"))


def _gantt_rows(queue: Queue) -> Iterator[Row]:
    for wait in queue.waits:
        instants = (wait.sent_s, wait.started_s, wait.first_token_s, wait.ended_s)
        for index, phase in enumerate((WAITING, PREFILLING, DECODING)):
            yield {
                "lane": queue.lane,
                "panel": f"{queue.lane}: all done after {time(queue.done_s)}",
                "request": wait.number,
                "phase": phase,
                "from_s": instants[index],
                "to_s": instants[index + 1],
            }


def draft_and_verify(timelines: Sequence[Timeline]) -> Chart:
    """A bar for each step, as wide as it lasted, made of a cell for each token that it gave or rejected."""
    rows = [row for timeline in timelines for row in _timeline_rows(timeline)]
    kinds = [PROMPT, OWN, KEPT, DROPPED]
    colours = alt.Scale(domain=kinds, range=[GREY, DARK_GREY, KEPT_COLOUR, BAD])
    # A rejected draft is an empty cell: told apart without colour, too.
    opacity = alt.condition(alt.datum.kind == DROPPED, alt.value(0.1), alt.value(1))
    highest = max(row["top"] for row in rows)
    y_axis = alt.Axis(values=list(range(highest + 1)), format="d", grid=False)
    cells = (
        alt.Chart()
        .mark_rect(x2Offset=-1, strokeWidth=1)
        .encode(
            x=_time_axis("from_s"),
            x2="to_s:Q",
            y=alt.Y(
                "bottom:Q", title="tokens", scale=alt.Scale(domain=[0, highest], nice=False), axis=y_axis
            ),
            y2="top:Q",
            fill=alt.Fill("kind:N", title=None, scale=colours),
            stroke=alt.Stroke("kind:N", title=None, scale=colours),
            fillOpacity=opacity,
            tooltip=[
                tip("step:Q", "step"),
                tip("kind:N", "token"),
                tip("step_ms:Q", "step lasted, ms", ".0f"),
                tip("text:N", "step gave"),
            ],
        )
    )
    return _stacked([cells], rows, TIMELINE_HEIGHT_PX)


def _timeline_rows(timeline: Timeline) -> Iterator[Row]:
    steps = count(len(timeline.decode_steps), "step")
    for index, step in enumerate(timeline.steps, start=1):
        own = step.emitted - step.kept
        kinds = [KEPT] * step.kept + [OWN] * own + [DROPPED] * (step.drafted - step.accepted)
        for bottom, kind in enumerate([PROMPT] if step.phase is Phase.PREFILL else kinds):
            yield {
                "panel": f"{timeline.lane}: {steps}, {time(timeline.lasted_s)}",
                "step": index,
                "kind": kind,
                "from_s": step.started_s,
                "to_s": step.ended_s,
                "bottom": bottom,
                "top": bottom + 1,
                "step_ms": 1000 * step.lasted_s,
                "text": (step.kept_text or "") + (step.own_text or ""),
            }


def envelope(
    curves: Sequence[Curve],
    reckoned: Reckoned | None,
    looks: Mapping[str, Look],
    load_title: str,
    value_title: str,
) -> Chart:
    """A panel for each text: every choice against load, and a band behind whichever fixed one is best.

    Args:
        reckoned: drawn hollow and dotted, each point with its k.
        looks: by the names of the curves.
    """
    rows = [row for text in dict.fromkeys(curve.text for curve in curves) for row in _of_text(curves, text)]
    series = {curve.name: looks[curve.name] for curve in curves}
    if reckoned is not None:
        series[RECKONED] = RECKONED_LOOK
        rows += [
            {"kind": POINT, "panel": text, "name": RECKONED, "concurrency": point.requests}
            | {"value": point.each_tokens_per_s, "k": f"k = {point.num_drafts}"}
            for text, points in reckoned.points.items()
            for point in points
        ]
    lines = Series("name", series, None)
    x = concurrency_axis((point.requests for curve in curves for point in curve.points), load_title)
    y = from_zero("value", value_title, highest=TOP_SHARE * max(row["value"] for row in rows))
    tips = [tip("name:N", "what"), tip("concurrency:Q", "at once"), tip("value:Q", "tokens/s", ".3r")]
    everything = alt.Chart().encode(x=x, y=y)
    points = everything.transform_filter(alt.datum.kind == POINT).encode(tooltip=tips)
    band = everything.transform_filter(alt.datum.kind == ENVELOPE)
    layers = [
        band.mark_line(strokeWidth=ENVELOPE_WIDTH_PX, strokeCap="round", color=GREY, opacity=0.3),
        lines.lines(points),
        lines.points(points, hollow=f"datum.name === {RECKONED!r}"),
    ]
    if reckoned is not None:
        # At one height: beside its point it would lie on those of the lanes, which are near.
        k = alt.Chart().transform_filter(alt.datum.name == RECKONED).mark_text(fontSize=11)
        layers.append(k.encode(x=x, y=alt.value(K_HEIGHT_PX), text="k:N"))
    return panels(layers, rows, "panel")


def looks_of_curves(config: Mapping[str, Any], curves: Iterable[Curve]) -> dict[str, Look]:
    """By the names of the curves: a lane has the look that it has in all pictures."""
    lanes = {curve.name: curve.lane or PLACEMENT for curve in curves}
    looks = lane_looks(config, lanes.values())
    return {name: looks[lane] for name, lane in lanes.items()}


def _of_text(curves: Sequence[Curve], text: str) -> Iterator[Row]:
    """The points of one panel, and the upper edge of its fixed lines."""
    own = [curve for curve in curves if curve.text == text]
    for curve in own:
        for point in curve.points:
            yield {"kind": POINT, "panel": text, "name": curve.name, "concurrency": point.requests} | {
                "value": point.each_tokens_per_s
            }
    for low, high in pairwise(best.requests for best in best_fixed(curves, text)):
        for step in range(ENVELOPE_STEPS + 1):
            share = step / ENVELOPE_STEPS
            ends = [
                (begin.each_tokens_per_s, end.each_tokens_per_s)
                for curve in own
                if curve.is_fixed and (begin := curve.at(low)) and (end := curve.at(high))
            ]
            if ends:
                highest = max((1 - share) * begin + share * end for begin, end in ends)
                at = low * (high / low) ** share
                yield {"kind": ENVELOPE, "panel": text, "concurrency": at, "value": highest}


def _time_axis(field: str) -> Any:
    scale = alt.Scale(zero=True, nice=False)
    return alt.X(f"{field}:Q", title="time, s", scale=scale, axis=alt.Axis(format="~f", tickCount=8))


def _stacked(layers: Sequence[Chart], rows: Sequence[Row], height_px: int) -> Chart:
    """Panels below each other, in the order of the rows, on one time scale."""
    order = list(dict.fromkeys(row["panel"] for row in rows))
    layered = alt.layer(*layers, data=alt.Data(values=list(rows)))
    layered = layered.properties(width=WIDTH_PX, height=height_px)
    header = alt.Header(labelLimit=WIDTH_PX)
    chart = layered.facet(facet=alt.Facet("panel:N", title=None, sort=order, header=header), columns=1)
    return chart.properties(bounds="flush", spacing={"row": 40, "column": 0})
