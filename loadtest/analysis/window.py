"""The part of a stage in which its load was steady, and what flowed in it.

Closed loop: from the instant at which the last user had begun until the last request that counts ended. All users
are busy all that time; how they came and how they left is outside of it.

Open loop: from the first answer that was whole, for until then nothing can have come to an end, to the last instant
of the schedule. The answers that are still under way then, the drain, are outside: an unhurried server would
seem the faster the longer it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadtest.client.record import RequestRecord
from loadtest.offer.load import ClosedLoop, OpenLoop
from loadtest.run.plan import StagePlan


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a stage, in seconds on the clock of the run."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, instant_s: float) -> bool:
        return self.start_s < instant_s <= self.end_s

    def overlap_s(self, from_s: float, until_s: float) -> float:
        """How long something lasted within it."""
        return max(0.0, min(until_s, self.end_s) - max(from_s, self.start_s))


def steady_window(plan: StagePlan, started_at_s: float, records: Sequence[RequestRecord]) -> Window | None:
    """The steady part of a stage; None when there is none, as when no answer was whole before its load ended.

    Args:
        started_at_s: when its load began, on the clock of the run.
        records: all of the stage, those that do not count among them.
    """
    counted = [record for record in records if record.label.counts]
    if not counted:
        return None
    if isinstance(plan.load, ClosedLoop):
        lead_in = [record.scheduled_at_s for record in records if record.label.is_warmup]
        start_s = max(lead_in) if lead_in else min(record.scheduled_at_s for record in counted)
        end_s = max(record.finished_at_s for record in counted)
    else:
        whole = [record.finished_at_s for record in records if record.is_completed]
        if not whole:
            return None
        start_s = max(min(whole), min(record.scheduled_at_s for record in counted))
        end_s = offer_end_s(plan, started_at_s, counted)
    return Window(start_s, end_s) if end_s > start_s else None


def offered_s(plan: StagePlan, started_at_s: float, records: Sequence[RequestRecord]) -> float:
    """How long an open loop offered its counted requests: from the end of its warm-up; 0 without any."""
    counted = [record for record in records if record.label.counts]
    if not counted:
        return 0.0
    warm_up = [record.scheduled_at_s for record in records if record.label.is_warmup]
    start_s = min(record.scheduled_at_s for record in counted) if warm_up else started_at_s
    return max(0.0, offer_end_s(plan, started_at_s, counted) - start_s)


def offer_end_s(plan: StagePlan, started_at_s: float, counted: Iterable[RequestRecord]) -> float:
    """When an open loop stopped offering: at the end of its schedule, or later with its last request."""
    last_due_s = max(record.scheduled_at_s for record in counted)
    if isinstance(plan.load, OpenLoop):
        return max(last_due_s, started_at_s + plan.load.duration_s)
    return last_due_s


def tokens_in(window: Window, records: Iterable[RequestRecord]) -> float:
    """Output tokens of completed requests that arrived within a window.

    Where the server does not count as it goes, a request's tokens are taken to be spread evenly over its chunks.
    """
    return sum(_tokens_in(window, record) for record in records if record.is_completed)


def _tokens_in(window: Window, record: RequestRecord) -> float:
    if not record.chunk_at_s:
        return 0.0
    if record.chunk_tokens is not None:
        pairs = zip(record.chunk_at_s, record.chunk_tokens, strict=True)
        return sum(tokens for at_s, tokens in pairs if window.holds(at_s))
    num_inside = sum(window.holds(at_s) for at_s in record.chunk_at_s)
    return (record.output_tokens or 0) * num_inside / len(record.chunk_at_s)


def ended_in(window: Window, records: Iterable[RequestRecord]) -> int:
    """Requests that completed within a window."""
    return sum(record.is_completed and window.holds(record.finished_at_s) for record in records)


def mean_in_flight(window: Window, records: Iterable[RequestRecord]) -> float:
    """Requests in flight on average over a window, each from when it was due to its end."""
    busy_s = sum(window.overlap_s(record.scheduled_at_s, record.finished_at_s) for record in records)
    return busy_s / window.length_s
