"""Requests and replicas for the scheduler's tests."""

from __future__ import annotations

from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import SchedulingRequest
from serving.scheduler.core import SchedulerCore


def request(
    request_id: str, lane: str | None = None, *, tokens: int = 10, needs_plain_decoding: bool = False
) -> SchedulingRequest:
    """A request that reserves `tokens`."""
    return SchedulingRequest(request_id, lane, tokens - 1, 1, needs_plain_decoding)


def replica(
    replica_id: str,
    lane: str = "batched",
    strategy: Strategy = Strategy.BATCHED,
    *,
    max_running: int = 1,
    takes_unpinned: bool = True,
) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id, lane, strategy, f"http://127.0.0.1:1/{replica_id}", max_running, takes_unpinned
    )


def core(*replicas: ReplicaInfo, max_waiting: int = 100, settled_at_s: float = -1.0) -> SchedulerCore:
    """A core whose requests expire after 10 s, with these replicas ready."""
    made = SchedulerCore(
        max_waiting_requests=max_waiting, max_queue_wait_s=10, seed=0, settled_at_s=settled_at_s
    )
    for info in replicas:
        made.replica_ready(info)
    return made


def placed(made: SchedulerCore, now_s: float = 0.0) -> list[tuple[str, str]]:
    """Dispatch; who was placed where."""
    return [(grant.lease.request_id, grant.replica.replica_id) for grant in made.dispatch(now_s)]
