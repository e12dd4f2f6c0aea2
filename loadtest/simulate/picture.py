"""The picture of a plan: replicas by lane, and what each number of drafts gains by requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import vl_convert

from loadtest.drawing.style import (
    BAR_WIDTH_PX,
    GREY,
    PANEL_HEIGHT_PX,
    PAPER_THEME,
    VEGA_LITE_VERSION,
    Chart,
    Row,
    bar_chart,
    lane_colour,
    lane_looks,
    log_axis,
    scale_with_labels,
    table,
)
from loadtest.judge.wording import count, number
from loadtest.simulate.lanes import Candidate, TextMix, mean_draft_share, mean_rates
from loadtest.simulate.plan import LanePlan
from serving.calibration.profile import LaneProfile, Profile
from serving.core.lane_colours import LANE_COLOURS
from serving.core.speculation.cost_model import CostModel, Lengths

PNG_SCALE = 2
MAX_POINTS = 64  # of a curve
BEST = "best k"


def replicas_by_lane(plans: Sequence[LanePlan], most: int) -> Chart:
    """A bar for each lane: the fewest replicas that hold; of a lane that does not hold it says so."""
    rows: list[Row] = [
        {
            "lane": plan.lane,
            "replicas": plan.enough.replicas if plan.enough else 0,
            "label": (
                f"{count(plan.enough.replicas, 'replica')}, {number(100 * plan.enough.slots_share)}% of slots used"
                if plan.enough
                else f"not with {count(most, 'replica')}"
            ),
        }
        for plan in plans
    ]
    scale = scale_with_labels(max(row["replicas"] for row in rows), (row["label"] for row in rows))
    base = table(rows).encode(y=alt.Y("lane:N", title=None, sort=None))
    bars = base.mark_bar().encode(
        x=alt.X(
            "replicas:Q",
            title="fewest replicas that hold the objective",
            scale=scale,
            axis=alt.Axis(tickMinStep=1, format="d"),
        ),
        color=lane_colour("lane", lane_looks({}, [plan.lane for plan in plans])),
    )
    labels = base.mark_text(align="left", dx=6).encode(x=alt.X("replicas:Q", scale=scale), text="label:N")
    return bar_chart((bars, labels), len(rows))


def envelope(lane: LaneProfile, plain: CostModel, mix: TextMix, lengths: Lengths) -> Chart:
    """Output tokens/s of a replica over those without drafts, by requests at once, for each k.

    Requests come and go, so their prompts are reckoned with. The best k may be 0, with the pass that a learned
    draft makes all the same.

    Args:
        plain: of the lane without drafts.
    """
    rates, share = mean_rates(lane, mix), mean_draft_share(lane, mix)
    batches = sorted({round(lane.max_num_seqs ** (place / MAX_POINTS)) for place in range(MAX_POINTS + 1)})
    rows: list[Row] = []
    for batch in batches:
        plain_per_s = plain.serve(batch, lengths, 0, ()).tokens_per_s
        gains = [
            lane.cost_model.serve(batch, lengths, k, rates, share).tokens_per_s / plain_per_s
            for k in range(lane.num_drafts + 1)
        ]
        by_k = {f"k = {k}": gain for k, gain in enumerate(gains) if k} | {BEST: max(gains)}
        rows += [{"sequences": batch, "gain": gain, "drafts": drafts} for drafts, gain in by_k.items()]
    names = [f"k = {k}" for k in range(1, lane.num_drafts + 1)]
    colours = [LANE_COLOURS[place % len(LANE_COLOURS)] for place in range(len(names))]
    is_best = alt.datum.drafts == BEST
    lines = (
        table(rows)
        .mark_line(interpolate="linear")
        .encode(
            x=log_axis("sequences", f"requests at once on a replica of {lane.lane} (log scale)", batches),
            y=alt.Y("gain:Q", title="tokens/s over those without drafts", scale=alt.Scale(zero=False)),
            color=alt.Color(
                "drafts:N",
                title=None,
                scale=alt.Scale(domain=[*names, BEST], range=[*colours, GREY]),
                legend=alt.Legend(symbolStrokeWidth=3),
            ),
            strokeWidth=alt.condition(is_best, alt.value(7), alt.value(2)),
            opacity=alt.condition(is_best, alt.value(0.35), alt.value(1)),
        )
    )
    even = table([{"gain": 1}]).mark_rule(strokeDash=[4, 4]).encode(y="gain:Q")
    title = alt.Title(
        f"What drafts give {lane.lane} by the cost model; below the dashed line they lose",
        subtitle=f"{lengths.prompt_tokens:,.0f} tokens of prompt, computed too, and "
        f"{lengths.output_tokens:,.0f} of answer on average; text: {mix.in_words}",
        anchor="start",
        fontSize=12,
        fontWeight="normal",
        subtitleFontSize=12,
    )
    return alt.layer(lines, even).properties(width=BAR_WIDTH_PX, height=PANEL_HEIGHT_PX, title=title)


def without_drafts(profile: Profile, lane: LaneProfile) -> CostModel:
    """What a lane is compared with: the profile's lane without drafts that has most slots, or its own step time."""
    plain = [each for each in profile.lanes if not each.num_drafts]
    if not plain:
        return CostModel(lane.step_time)
    return max(plain, key=lambda each: each.max_num_seqs).cost_model


def draw(
    path: Path,
    plans: Sequence[LanePlan],
    most: int,
    profile: Profile,
    candidates: Sequence[Candidate],
    mix: TextMix,
    lengths: Lengths,
) -> Path | None:
    """Write the picture as PNG: replicas, if a search was made, and an envelope of each lane that drafts.

    Returns:
        The path; None where there is nothing to draw.
    """
    names = {candidate.name for candidate in candidates}
    charts = [replicas_by_lane(plans, most)] if plans else []
    charts += [
        envelope(lane, without_drafts(profile, lane), mix, lengths)
        for lane in profile.lanes
        if lane.num_drafts and lane.lane in names
    ]
    if not charts:
        return None
    picture = alt.vconcat(*charts).resolve_scale(color="independent", size="independent")
    png = vl_convert.vegalite_to_png(
        picture.to_dict(), vl_version=VEGA_LITE_VERSION, scale=PNG_SCALE, config=PAPER_THEME
    )
    path.write_bytes(png)
    return path
