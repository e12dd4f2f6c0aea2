"""Every placement by its name."""

from __future__ import annotations

import random

from serving.config import SchedulerConfig
from serving.scheduler.adaptive import Adaptive
from serving.scheduler.lane_costs import LaneCosts
from serving.scheduler.placement import LeastOutstanding, PlacementPolicy, PowerOfTwo, PrefixAffinity


def placement_policy(
    config: SchedulerConfig, rng: random.Random, lane_costs: LaneCosts | None = None
) -> PlacementPolicy:
    """The placement that the config names.

    Args:
        lane_costs: for `adaptive`.

    Raises:
        ValueError: it needs them, and there are none.
    """
    match config.placement:
        case "least_outstanding":
            return LeastOutstanding(rng)
        case "power_of_two":
            return PowerOfTwo(rng)
        case "prefix_affinity":
            return PrefixAffinity(rng, config.prefix_gap_tokens)
        case "adaptive":
            if lane_costs is None:
                raise ValueError("placement adaptive must be given what its lanes cost")
            return Adaptive(lane_costs, config.placement_margin, rng)
