"""Admit or refuse: a pure function of the request's line and the state of the lab."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from serving.core.errors import Reason

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was turned away. `retry_after_s` is whole seconds, as the HTTP header wants."""

    reason: Reason
    message: str
    retry_after_s: int | None = None


def admit(
    *,
    is_draining: bool,
    is_settling: bool,
    num_eligible: int,
    has_room: bool,
    num_waiting: int,
    max_waiting_requests: int,
    drain_rate_rps: float | None,
) -> Refusal | None:
    """None to admit (run now or wait), else why not.

    Args:
        is_settling: the scheduler started a moment ago, so a missing replica may be on its way back.
        num_eligible: ready replicas that may serve the request.
        has_room: one of them has room, and nobody who waits could take it.
        drain_rate_rps: requests that ended per second, lately; None when unknown.
    """
    if is_draining:
        return Refusal(Reason.DRAINING, "the lab is shutting down and takes no new requests")
    if num_eligible == 0 and not is_settling:
        return Refusal(Reason.NO_REPLICA_READY, "no ready replica can serve this request", MIN_RETRY_AFTER_S)
    if not has_room and num_waiting >= max_waiting_requests:
        return Refusal(
            Reason.QUEUE_FULL,
            f"{num_waiting} of {max_waiting_requests} requests are waiting (scheduler.max_waiting_requests)",
            retry_after_s(num_waiting, drain_rate_rps),
        )
    return None


def retry_after_s(num_waiting: int, drain_rate_rps: float | None) -> int:
    """Whole seconds until one place should be free: the queue's length over the measured drain rate, in 1..60."""
    if not drain_rate_rps:
        return MIN_RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil((num_waiting + 1) / drain_rate_rps)))


class DrainRate:
    """Requests ended per second over the last few, so that advice follows what the lab really does."""

    def __init__(self, window: int = 64) -> None:
        self._ended_at_s: deque[float] = deque(maxlen=window)

    def record(self, now_s: float) -> None:
        """One request ended."""
        self._ended_at_s.append(now_s)

    def rps(self, now_s: float) -> float | None:
        """Mean rate from the oldest remembered end until now; None before two have ended."""
        if len(self._ended_at_s) < 2 or now_s <= self._ended_at_s[0]:
            return None
        return len(self._ended_at_s) / (now_s - self._ended_at_s[0])
