"""A gateway's memory of its requests is bounded, and says when it has forgotten."""

from __future__ import annotations

from dataclasses import replace

from serving.tracing.events import RequestSpan
from serving.tracing.span_log import SpanLog

SPAN = RequestSpan("g", "a-1", "a", arrived_ns=10)


def end(log: SpanLog, arrived_ns: int, ended_ns: int) -> None:
    with log.running(lambda: replace(SPAN, arrived_ns=arrived_ns, ended_ns=ended_ns)):
        pass


def test_those_that_ended_since_and_those_that_run_by_arrival() -> None:
    log = SpanLog("g")
    end(log, arrived_ns=30, ended_ns=50)
    end(log, arrived_ns=5, ended_ns=19)
    end(log, arrived_ns=15, ended_ns=20)
    with log.running(lambda: replace(SPAN, arrived_ns=25)):
        spans, is_complete = log.since(20)
    assert [(span.arrived_ns, span.ended_ns) for span in spans] == [(15, 20), (25, None), (30, 50)]
    assert is_complete


def test_the_oldest_is_forgotten_and_the_log_says_so() -> None:
    log = SpanLog("g", capacity=2)
    for number in range(3):
        end(log, arrived_ns=number, ended_ns=100 + number)
    spans, is_complete = log.since(0)
    assert [span.ended_ns for span in spans] == [101, 102]
    assert not is_complete
    assert log.since(101) == (spans, True), "what was forgotten had ended before"


def test_a_request_that_raises_has_ended_too() -> None:
    log = SpanLog("g")
    try:
        with log.running(lambda: replace(SPAN, ended_ns=7)):
            raise ValueError
    except ValueError:
        pass
    assert [span.ended_ns for span in log.since(0)[0]] == [7]
