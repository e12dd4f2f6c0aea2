"""Lanes and replicas, as the scheduler sees them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ANY_LANE = "any"  # label of requests that leave the lane to the scheduler, until it has chosen one


class Strategy(StrEnum):
    """How a lane decodes."""

    SEQUENTIAL = "sequential"
    BATCHED = "batched"
    SPECULATIVE = "speculative"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a ready engine replica tells the scheduler about itself.

    Attributes:
        replica_id: unique over the cluster's life; a restarted replica has a new one.
        lane: name of its lane.
        strategy: how it decodes.
        url: base URL of its HTTP server, `http://host:port`.
        max_running: requests the scheduler may have running on it at once, >= 1.
        takes_unpinned: whether requests that pin no lane may come here.
    """

    replica_id: str
    lane: str
    strategy: Strategy
    url: str
    max_running: int
    takes_unpinned: bool


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is; `name` is `vllm` or `simulated`."""

    name: str
    version: str
    device: str
    dtype: str
