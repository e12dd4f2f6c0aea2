"""What an engine computes on, so that the scheduler knows which replicas take turns there."""

from __future__ import annotations

import os
from collections.abc import Collection

from serving.config import LaneConfig


def cores_of(lane: LaneConfig, device: str, host: str) -> str:
    """A name that is the same for replicas that compute on the same cores, or on the same card; "" where none does.

    Cores are those that this process may use: replicas of one machine share them unless each was pinned to its own.
    Sets that overlap in part count as apart. A card is shared where Ray reserves less than a whole one. An engine
    without a model only acts as if it computed. Pods of one node have addresses, and usually cores, of their own.
    """
    if not lane.has_model:
        return ""
    if device == "cpu":
        return f"{host} cores {_ranges(os.sched_getaffinity(0))}"
    if lane.reserved_gpus(device) >= 1:
        return ""
    return f"{host} cards {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}"


def _ranges(cores: Collection[int]) -> str:
    """As the kernel writes them.

    >>> _ranges({0, 1, 2, 5})
    '0-2,5'
    """
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
