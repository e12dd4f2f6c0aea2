"""What is expected of a lane before it runs, by its profile: objectives, slots, capacity, best k. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean

from loadtest.simulate.lanes import TextMix
from loadtest.study.analysis import Objective, objectives
from loadtest.study.schedule import KINDS
from serving.calibration.profile import LaneProfile
from serving.core.speculation.acceptance import Rates, extended, tokens_per_step
from serving.core.speculation.cost_model import Lengths, Outlook

Drafts = tuple[int, ...]  # k of each kind of text

MIX = TextMix(KINDS, (1 / len(KINDS),) * len(KINDS))
TPOT_RESERVE = 0.2  # between what slots are set for and the objective: answers differ in how they are guessed
FAST_SHARE = 0.25  # of the plain lane's slots: TPOT with so many taken is what the fast objective wants
ROUNDING = 1e-3  # of a limit, whose text has four digits


def objectives_of(plain: LaneProfile, lengths: Lengths, ttft_limit_s: float) -> tuple[Objective, ...]:
    """Relaxed is the TPOT that plain decoding needs with all of its slots taken, and `TPOT_RESERVE` more; fast that
    with `FAST_SHARE` of them taken, and as much more."""
    relaxed_s, fast_s = (
        (1 + TPOT_RESERVE) * max(tpots_s(plain, batch, lengths, (0,) * len(KINDS)))
        for batch in (plain.max_num_seqs, max(1, round(FAST_SHARE * plain.max_num_seqs)))
    )
    return objectives(ttft_limit_s, relaxed_s, fast_s)


def capacity_rps(lanes: Sequence[tuple[LaneProfile, int]], lengths: Lengths) -> float:
    """Of the better of some fixed lanes, each with so many slots: requests/s that one replica serves."""
    return (
        max(
            outlook(lane, slots, lengths, (lane.num_drafts,) * len(KINDS)).tokens_per_s
            for lane, slots in lanes
        )
        / lengths.output_tokens
    )


def tpot_limits_s(objective: Objective) -> list[float]:
    """What slots are set for, of each kind."""
    return [
        min(limit.limit_s for limit in slo.limits if limit.metric == "tpot") / (1 + TPOT_RESERVE)
        for slo in objective.of_kinds
    ]


def slots_within(
    lane: LaneProfile, lengths: Lengths, drafts_of_kinds: Sequence[Drafts], limits_s: Sequence[float]
) -> int:
    """As many slots as keep each kind's TPOT within its limit; 1 where not even one does."""

    def holds(batch: int) -> bool:
        found_s = tpots_s(lane, batch, lengths, tuple(own[batch] for own in drafts_of_kinds))
        return all(
            tpot_s <= limit_s * (1 + ROUNDING) for tpot_s, limit_s in zip(found_s, limits_s, strict=True)
        )

    return max(filter(holds, range(1, lane.max_num_seqs + 1)), default=1)


def outlook(lane: LaneProfile, batch: int, lengths: Lengths, drafts: Drafts) -> Outlook:
    """What the lane gives when so many requests, as many of each kind, always run.

    Args:
        drafts: k of each kind.
    """
    return lane.cost_model.serve(batch, lengths, *_of_mean_row(lane, drafts))


def tpots_s(lane: LaneProfile, batch: int, lengths: Lengths, drafts: Drafts) -> list[float]:
    """TPOT of each kind then."""
    step_s = outlook(lane, batch, lengths, drafts).step_s
    return [
        step_s / tokens_per_step(extended(rates, k))
        for rates, k in zip(rates_of_kinds(lane), drafts, strict=True)
    ]


def drafts_of_kinds(lane: LaneProfile, context_tokens: float) -> tuple[Drafts, ...]:
    """k of each kind by batch, shape (kinds, max_num_seqs + 1): those that give most tokens a second together.

    As if the plug-in knew each row's acceptance from its first step on, of a batch with as many rows of each kind.
    """

    def tokens_per_s(batch: int, drafts: Drafts) -> float:
        longest, rates, draft_share = _of_mean_row(lane, drafts)
        step_s = lane.cost_model.step_time.step_s(batch * (1 + longest * draft_share), batch * context_tokens)
        # A pass holds those rows only whose drafts are that long; where none is, a learned draft has all of them.
        rows = batch * draft_share if longest else batch
        step_s += lane.cost_model.draft_cost.draft_s(longest, rows)
        return batch * tokens_per_step(rates) / step_s

    def best(batch: int) -> Drafts:
        # Of equals the fewest drafts: `max` keeps the first.
        choices = product(range(lane.num_drafts + 1), repeat=len(KINDS))
        return max(choices, key=lambda drafts: tokens_per_s(batch, drafts))

    choices = [best(max(1, batch)) for batch in range(lane.max_num_seqs + 1)]
    return tuple(zip(*choices, strict=True))


def _of_mean_row(lane: LaneProfile, drafts: Drafts) -> tuple[int, Rates, float]:
    """The longest draft, acceptance by position and mean length over the longest, on the mean of all kinds."""
    longest = max(drafts)
    # A kind with fewer drafts accepts none beyond them.
    rows = [
        (*extended(rates, k), *(0.0,) * (longest - k))
        for rates, k in zip(rates_of_kinds(lane), drafts, strict=True)
    ]
    drafted = fmean(k * share for k, share in zip(drafts, draft_shares(lane), strict=True))
    return longest, tuple(map(fmean, zip(*rows, strict=True))), drafted / longest if longest else 1.0


def rates_of_kinds(lane: LaneProfile) -> list[Rates]:
    """Acceptance by position; of a lane that never drafts none."""
    return [lane.acceptance.get(kind, ()) for kind in KINDS]


def draft_shares(lane: LaneProfile) -> list[float]:
    """Mean length of drafts over k."""
    return [lane.draft_share.get(kind, 1.0) for kind in KINDS]
