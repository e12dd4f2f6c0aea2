"""Requests in Locust's own statistics: the rows TTFT, TPOT, E2E and ICL of a page, a CSV or an HTML report."""

from __future__ import annotations

from typing import Any

from loadtest.client.record import RequestRecord
from serving.core.latency import e2e_latency_s, inter_chunk_latencies_s, tpot_s, ttft_s

CUT_OFF = "cut off"  # name of a row


class RequestNotCompletedError(Exception):
    """How Locust is told that a request failed; the text is its reason."""


def report_to_locust(environment: Any, key: str, record: RequestRecord) -> None:
    """Give Locust's statistics one finished request, in ms, in rows of the type `key`.

    E2E is Locust's request: it counts in its totals and rates. TTFT, TPOT and the largest inter-chunk latency
    (ICL max) are rows of their own and in no total, or each request would count four times.
    Latencies are of completed requests only; one that failed counts as a request and as a failure.
    """
    timeline = record.timeline
    if record.is_completed:
        if timeline.chunk_at_s:
            _log(environment, key, "TTFT", ttft_s(timeline))
        if (tpot := tpot_s(timeline)) is not None:
            _log(environment, key, "TPOT", tpot)
        if gaps_s := inter_chunk_latencies_s(timeline):
            _log(environment, key, "ICL max", max(gaps_s))
    environment.events.request.fire(
        request_type=key,
        name="E2E",
        response_time=e2e_latency_s(timeline) * 1000 if record.is_completed else None,
        response_length=len(record.text),
        exception=None if record.is_completed else RequestNotCompletedError(record.reason),
        context={},
    )


def report_cut_off(environment: Any, key: str) -> None:
    """Give Locust's statistics a request that the end of the test cut off: its own row, no fault of the server."""
    environment.stats.get(CUT_OFF, key).log(None, 0)


def _log(environment: Any, key: str, name: str, seconds: float) -> None:
    environment.stats.get(name, key).log(seconds * 1000, 0)
