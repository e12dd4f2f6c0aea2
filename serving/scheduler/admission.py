"""Admit or refuse: a pure function of the request, the queue and what is expected of the lab."""

from __future__ import annotations

import math
from dataclasses import dataclass

from serving.core.errors import Reason
from serving.core.request import SchedulingRequest
from serving.scheduler.queue import Backlog

MIN_RETRY_AFTER_S = 1
MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was turned away. `retry_after_s` is whole seconds, as the HTTP header wants."""

    reason: Reason
    message: str
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the waiting queue, for one request's band and tenant.

    Attributes:
        max_requests, max_tokens: of all that wait; what is reserved for higher bands is taken off already.
        tenant_share: part of both that one tenant may fill, in (0, 1].
    """

    max_requests: int
    max_tokens: int
    tenant_share: float = 1.0


@dataclass(frozen=True, slots=True)
class LabView:
    """What admission looks at.

    Attributes:
        is_missing_some: connections broke a moment ago, so a missing replica may be on its way back.
        num_eligible: ready replicas that may serve the request.
        has_room: one of them has room, and nobody who waits could take it.
        waiting, tenant_waiting: what all, and the request's tenant, have waiting.
        expected_wait_s: until a slot is free for it; None when unknown or without consequence.
        expected_first_token_s: from then to the first token; None when unknown.
        drain_rate_rps: requests that ended per second, lately; None when unknown.
    """

    is_draining: bool
    is_missing_some: bool
    num_eligible: int
    has_room: bool
    waiting: Backlog
    tenant_waiting: Backlog
    expected_wait_s: float | None
    expected_first_token_s: float | None
    drain_rate_rps: float | None


def admit(request: SchedulingRequest, lab: LabView, limits: QueueLimits) -> Refusal | None:
    """None to admit (run now or wait), else why not."""
    if lab.is_draining:
        return Refusal(Reason.DRAINING, "the lab is shutting down and takes no new requests")
    if lab.num_eligible == 0 and not lab.is_missing_some:
        return Refusal(Reason.NO_REPLICA_READY, "no ready replica can serve this request", MIN_RETRY_AFTER_S)
    if not lab.has_room and (refusal := _may_wait(request, lab, limits)):
        return refusal
    return _can_be_in_time(request, lab)


def _may_wait(request: SchedulingRequest, lab: LabView, limits: QueueLimits) -> Refusal | None:
    if request.reserved_tokens > limits.max_tokens:
        return Refusal(
            Reason.REQUEST_TOO_LONG,
            f"{request.reserved_tokens} tokens exceed what may wait, {limits.max_tokens} "
            "(scheduler.max_waiting_tokens)",
        )
    if request.max_queue_s == 0:
        return Refusal(
            Reason.DEADLINE_UNREACHABLE,
            "no replica has room now, and x-max-queue-ms: 0 forbids waiting",
            _retry_after_s(lab),
        )
    if fault := _over(lab.waiting, request, limits.max_requests, limits.max_tokens):
        return Refusal(Reason.QUEUE_FULL, f"the waiting queue is full: {fault}", _retry_after_s(lab))
    share = limits.tenant_share
    tenant_requests = max(1, int(share * limits.max_requests))
    tenant_tokens = max(request.reserved_tokens, int(share * limits.max_tokens))
    if fault := _over(lab.tenant_waiting, request, tenant_requests, tenant_tokens):
        message = f"tenant {request.tenant!r} fills its share of the waiting queue ({share:g}): {fault}"
        return Refusal(Reason.TENANT_OVER_SHARE, message, _retry_after_s(lab))
    return None


def _over(waiting: Backlog, request: SchedulingRequest, max_requests: int, max_tokens: int) -> str | None:
    if waiting.requests >= max_requests:
        return f"{waiting.requests} of {max_requests} requests (scheduler.max_waiting_requests)"
    if waiting.tokens + request.reserved_tokens > max_tokens:
        return (
            f"{waiting.tokens} of {max_tokens} tokens, and this request is {request.reserved_tokens} "
            "(scheduler.max_waiting_tokens)"
        )
    return None


def _can_be_in_time(request: SchedulingRequest, lab: LabView) -> Refusal | None:
    """Refuse at once what would only be refused later. An unknown expectation counts as 0.

    Who can run now is not refused by an expectation: a wrong one could never be put right if all were refused.
    """
    wait_s = lab.expected_wait_s or 0.0
    patience_s = math.inf if request.max_queue_s is None else request.max_queue_s - request.waited_s
    if not lab.has_room and wait_s > patience_s:
        return Refusal(
            Reason.DEADLINE_UNREACHABLE,
            f"expected to wait {wait_s:.1f} s, longer than {patience_s:.1f} s (x-max-queue-ms)",
            _retry_after_s(lab),
        )
    if request.ttft_deadline_s is not None:
        expected_s = request.age_s
        if not lab.has_room:
            expected_s += wait_s + (lab.expected_first_token_s or 0.0)
        if expected_s > request.ttft_deadline_s:
            return Refusal(
                Reason.DEADLINE_UNREACHABLE,
                f"first token expected after {expected_s:.1f} s, wanted within {request.ttft_deadline_s:.1f} s "
                "(x-tandem-ttft-deadline-ms)",
                _retry_after_s(lab),
            )
    return None


def _retry_after_s(lab: LabView) -> int:
    return retry_after_s(lab.waiting.requests, lab.drain_rate_rps)


def retry_after_s(num_waiting: int, drain_rate_rps: float | None) -> int:
    """Whole seconds until one place should be free: the queue's length over the measured drain rate, in 1..60."""
    if not drain_rate_rps:
        return MIN_RETRY_AFTER_S
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil((num_waiting + 1) / drain_rate_rps)))
