"""What the scheduler expects a lane to cost and to give, before it has seen a request there."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from serving.calibration.profile import KIND_OF_WORKLOAD, LaneProfile, Profile, load
from serving.config import CONTEXT_TOKENS, METHODS_WITH_DRAFT, LabConfig, LaneConfig, SpeculationConfig
from serving.core.errors import ConfigError
from serving.core.speculation.acceptance import Rates, extended
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.text_kind import TextKind


@dataclass(frozen=True, slots=True)
class LaneCost:
    """One lane.

    Attributes:
        drafts_by_batch: k by the sequences that decode, index 0 for none; the last holds for all above. Of a lane
            that chooses for each row, what is best for all of them together.
        is_by_row: it chooses for each row: nobody here knows how many tokens it drafted for whom.
        priors: acceptance by position, of the kinds of text that were measured.
        draft_share: of these kinds, the mean length of drafts over k.
    """

    cost: CostModel
    drafts_by_batch: tuple[int, ...] = (0,)
    priors: Mapping[TextKind, Rates] = field(default_factory=dict)
    draft_share: Mapping[TextKind, float] = field(default_factory=dict)
    is_by_row: bool = False

    @property
    def max_drafts(self) -> int:
        return max(self.drafts_by_batch)

    def num_drafts(self, batch: int) -> int:
        """k when so many sequences decode."""
        return self.drafts_by_batch[min(batch, len(self.drafts_by_batch) - 1)]

    def share(self, kind: TextKind) -> float:
        """Mean length of its drafts over k; of a kind that was not measured, the mean of those that were."""
        return self.draft_share.get(kind, self.mean_share)

    @property
    def mean_share(self) -> float:
        """Of the kinds that were measured; 1 where none was."""
        return fmean(self.draft_share.values()) if self.draft_share else 1.0


# Of each lane that placement `adaptive` sends requests to; None of one that is the only lane of its model.
LaneCosts = Mapping[str, LaneCost | None]


def lane_costs_of(config: LabConfig) -> LaneCosts | None:
    """By `scheduler.profile`; None under another placement.

    A lane that is the only one of its model is no choice, and need not be in the profile.

    Raises:
        ConfigError: the profile cannot be read, is of another model, lacks one of them, or has one with drafts of
            another length; the text names the file and the lane.
    """
    settings = config.scheduler
    if settings.placement != "adaptive" or settings.profile is None:
        return None
    unpinned = [lane for lane in config.lanes if lane.unpinned_model is not None]
    of_model = Counter(lane.unpinned_model for lane in unpinned)
    try:
        profile = load(Path(settings.profile))
        costs: dict[str, LaneCost | None] = {}
        for lane in unpinned:
            if of_model[lane.unpinned_model] == 1:
                costs[lane.name] = None
            else:
                profile.check_model(lane.unpinned_model or config.model.name)
                costs[lane.name] = _of_lane(lane, profile)
        return costs
    except ConfigError as error:
        raise ConfigError(f"scheduler.profile = {settings.profile!r}: {error}") from None


def _of_lane(lane: LaneConfig, profile: Profile) -> LaneCost:
    """A lane whose k changes is expected to do what the lane does that its drafts were measured on, with its own k.

    Raises:
        ConfigError: the profile lacks it, or has it with drafts of another length.
    """
    speculation = lane.speculation
    if speculation is None or not _is_by_batch(speculation):
        measured = profile.lane(lane.name)
        _check_drafts(lane, measured)
        return _of_profile(measured, measured.num_drafts)
    names = [lane.name]
    if speculation.profile is not None and speculation.profile.lane is not None:
        names.insert(0, speculation.profile.lane)
    known = {each.lane for each in profile.lanes}
    measured = profile.lane(next((name for name in names if name in known), names[0]))
    if not measured.num_drafts:
        raise ConfigError(
            f"lane {lane.name!r} drafts, and is reckoned by lane {measured.lane!r}, which does not: name one that "
            "does (speculation.profile.lane)"
        )
    if speculation.drafts_by in METHODS_WITH_DRAFT:
        measured = measured.with_passes_of_learned_drafts()
    fixed = _of_profile(measured, speculation.num_speculative_tokens)
    return replace(
        fixed,
        drafts_by_batch=_drafts_by_batch(lane, speculation, fixed),
        is_by_row=speculation.method == "adaptive",
    )


def _check_drafts(lane: LaneConfig, profiled: LaneProfile) -> None:
    """Acceptance of drafts of another length would be learnt and predicted wrong.

    Raises:
        ConfigError: the lane drafts another number of tokens than when it was measured.
    """
    drafts = lane.speculation or lane.refinement
    if drafts is None and lane.engine != "vllm":
        return  # nobody says whether such an engine drafts
    num_drafts = drafts.num_speculative_tokens if drafts else 0
    if num_drafts != profiled.num_drafts:
        raise ConfigError(
            f"lane {lane.name!r} drafts {num_drafts} tokens a step and was measured with {profiled.num_drafts}: "
            "calibrate again"
        )


def _is_by_batch(speculation: SpeculationConfig) -> bool:
    return speculation.method == "adaptive" or speculation.num_speculative_tokens_per_batch_size is not None


def _drafts_by_batch(lane: LaneConfig, speculation: SpeculationConfig, fixed: LaneCost) -> tuple[int, ...]:
    table = speculation.num_speculative_tokens_per_batch_size
    if not isinstance(table, tuple):
        # It chooses for each row: what is best for rows of the kinds that were measured.
        rates = mean_rates(list(fixed.priors.values())) if fixed.priors else (0.0,) * fixed.max_drafts
        context = speculation.profile.context_tokens if speculation.profile else CONTEXT_TOKENS
        ranges = fixed.cost.batch_table(context, rates, fixed.max_drafts, lane.max_num_seqs, fixed.mean_share)
        table = tuple((each.first, each.last, each.num_drafts) for each in ranges)
    firsts = [row[0] for row in table]
    by_batch = [table[bisect(firsts, batch) - 1][2] for batch in range(1, lane.max_num_seqs + 1)]
    return (by_batch[0], *by_batch)


def _of_profile(lane: LaneProfile, num_drafts: int) -> LaneCost:
    rates: dict[TextKind, list[Rates]] = defaultdict(list)
    shares: dict[TextKind, list[float]] = defaultdict(list)
    for workload, measured in lane.acceptance.items():
        if (kind := KIND_OF_WORKLOAD.get(workload)) is not None:
            rates[kind].append(extended(measured, num_drafts))
            shares[kind].append(lane.draft_share.get(workload, 1.0))
    return LaneCost(
        lane.cost_model,
        (num_drafts,),
        {kind: mean_rates(several) for kind, several in rates.items()},
        {kind: sum(several) / len(several) for kind, several in shares.items()},
    )


def mean_rates(several: list[Rates]) -> Rates:
    """By position, of rates of one length."""
    return tuple(sum(position) / len(several) for position in zip(*several, strict=True))
