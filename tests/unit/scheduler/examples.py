"""Requests and replicas for the scheduler's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving.config import SchedulerConfig
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import SchedulingRequest
from serving.scheduler.breaker import Breaker
from serving.scheduler.core import SchedulerCore
from serving.scheduler.lane_costs import LaneCost
from serving.scheduler.ledger import Load
from serving.scheduler.order import WaitingRequest
from serving.scheduler.placement import ReplicaState


def request(
    request_id: str,
    lane: str | None = None,
    *,
    tokens: int = 10,
    needs_plain_decoding: bool = False,
    **fields: Any,
) -> SchedulingRequest:
    """A request that reserves `tokens`, all but one of them for its prompt."""
    sizes = {"prompt_tokens": tokens - 1, "max_output_tokens": 1}
    return SchedulingRequest(
        request_id=request_id, lane=lane, needs_plain_decoding=needs_plain_decoding, **sizes | fields
    )


def waiting(request_id: str, at_s: float = 0.0, ticket: int = 0, **fields: Any) -> WaitingRequest:
    """A request that joined the queue then."""
    return WaitingRequest(request(request_id, **fields), at_s, at_s + 600, ticket)


def replica(
    replica_id: str,
    lane: str = "batched",
    strategy: Strategy = Strategy.BATCHED,
    *,
    max_running: int = 1,
    takes_unpinned: bool = True,
    model: str = "",
) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id,
        lane,
        strategy,
        f"http://127.0.0.1:1/{replica_id}",
        max_running,
        takes_unpinned,
        model=model,
    )


def loaded(replica_id: str, running: int = 0, outstanding_tokens: int = 0) -> ReplicaState:
    """A trusted replica with that much booked on it."""
    return ReplicaState(replica(replica_id), Load(running, outstanding_tokens), Breaker(3, 5))


def core(
    *replicas: ReplicaInfo,
    max_waiting: int = 100,
    settled_at_s: float = -1.0,
    lane_costs: Mapping[str, LaneCost] | None = None,
    **settings: Any,
) -> SchedulerCore:
    """A core whose requests expire after 10 s, with these replicas ready."""
    config = SchedulerConfig(
        **{"max_waiting_requests": max_waiting, "max_queue_wait_s": 10, "seed": 0} | settings
    )
    made = SchedulerCore(config, settled_at_s=settled_at_s, lane_costs=lane_costs)
    for info in replicas:
        made.replica_ready(info)
    return made


def placed(made: SchedulerCore, now_s: float = 0.0) -> list[tuple[str, str]]:
    """Dispatch; who was placed where."""
    return [(grant.lease.request_id, grant.replica.replica_id) for grant in made.dispatch(now_s)]
