"""What the scheduler expects a lane to cost and to give, before it has seen a request there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serving.calibration.profile import KIND_OF_WORKLOAD, LaneProfile, Profile, load
from serving.config import LabConfig, LaneConfig
from serving.core.errors import ConfigError
from serving.core.speculation.acceptance import Rates, extended
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.text_kind import TextKind


@dataclass(frozen=True, slots=True)
class LaneCost:
    """One lane.

    Attributes:
        drafts_by_batch: k by the sequences that decode, index 0 for none; the last holds for all above.
        priors: acceptance by position, of the kinds of text that were measured.
        draft_share: of these kinds, the mean length of drafts over k.
    """

    cost: CostModel
    drafts_by_batch: tuple[int, ...] = (0,)
    priors: Mapping[TextKind, Rates] = field(default_factory=dict)
    draft_share: Mapping[TextKind, float] = field(default_factory=dict)

    @property
    def max_drafts(self) -> int:
        return max(self.drafts_by_batch)

    def num_drafts(self, batch: int) -> int:
        """k when so many sequences decode."""
        return self.drafts_by_batch[min(batch, len(self.drafts_by_batch) - 1)]

    def share(self, kind: TextKind) -> float:
        """Mean length of its drafts over k; of a kind that was not measured, the mean of those that were."""
        known = self.draft_share
        return known.get(kind, sum(known.values()) / len(known) if known else 1.0)


def lane_costs_of(config: LabConfig) -> dict[str, LaneCost] | None:
    """Of the lanes that placement `adaptive` chooses from, by `scheduler.profile`; None under another placement.

    Raises:
        ConfigError: the profile cannot be read, lacks one of them, or has one with drafts of another length; the
            text names the file and the lane.
    """
    settings = config.scheduler
    if settings.placement != "adaptive" or settings.profile is None:
        return None
    lanes = [lane for lane in config.lanes if lane.unpinned_model is not None]
    try:
        profile = load(Path(settings.profile))
        for lane in lanes:
            _check_drafts(lane, profile.lane(lane.name))
        return lane_costs(profile, [lane.name for lane in lanes])
    except ConfigError as error:
        raise ConfigError(f"scheduler.profile = {settings.profile!r}: {error}") from None


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


def lane_costs(profile: Profile, lanes: Iterable[str]) -> dict[str, LaneCost]:
    """Of each lane, by the profile.

    Raises:
        ConfigError: a lane is not in the profile; the text names it.
    """
    return {name: _of_profile(profile.lane(name)) for name in lanes}


def _of_profile(lane: LaneProfile) -> LaneCost:
    rates: dict[TextKind, list[Rates]] = defaultdict(list)
    shares: dict[TextKind, list[float]] = defaultdict(list)
    for workload, measured in lane.acceptance.items():
        if (kind := KIND_OF_WORKLOAD.get(workload)) is not None:
            rates[kind].append(extended(measured, lane.num_drafts))
            shares[kind].append(lane.draft_share.get(workload, 1.0))
    return LaneCost(
        lane.cost_model,
        (lane.num_drafts,),
        {kind: mean_rates(several) for kind, several in rates.items()},
        {kind: sum(several) / len(several) for kind, several in shares.items()},
    )


def mean_rates(several: list[Rates]) -> Rates:
    """By position, of rates of one length."""
    return tuple(sum(position) / len(several) for position in zip(*several, strict=True))
