"""Figures of a cross-check, from stamps and from records written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadtest.client.record import RequestLabel, RequestRecord
from loadtest.crosscheck.figures import (
    arrivals_per_s,
    from_records,
    from_sent,
    lasted_s,
    most_at_once,
    resolution_ms,
    tie,
    tolerance,
)
from serving.core.request import Outcome


def stream(
    received_ms: float, chunks_ms: list[float], tokens: int, done_ms: float, choices: int = 1
) -> dict[str, Any]:
    def write(at_ms: float, count: int, choice: int = 0) -> dict[str, int]:
        sent_ns = round(at_ms * 1e6)
        return {
            "tokens": count,
            "sent_monotonic_ns": sent_ns,
            "written_monotonic_ns": sent_ns + 500_000,
            "choice": choice,
        }

    return {
        "received_monotonic_ns": round(received_ms * 1e6),
        "chunks": [write(at_ms, tokens, number % choices) for number, at_ms in enumerate(chunks_ms)],
        "done": write(done_ms, 0),
    }


SENT = [stream(5000, [5300, 5340, 5420], 4, 5421), stream(6000, [6200, 6240, 6280], 4, 7000)]


def test_the_truth_of_two_streams() -> None:
    figures = from_sent(SENT)
    assert figures.requests == 2
    assert figures.ttft_p50_ms == pytest.approx(250)
    assert figures.ttft_p95_ms == pytest.approx(295)
    assert figures.tpot_mean_ms == pytest.approx((120 / 11 + 80 / 11) / 2)
    assert figures.gap_mean_ms == pytest.approx((40 + 80 + 40 + 40) / 4)
    assert figures.gap_p95_ms == pytest.approx(74)
    assert figures.output_tokens_per_s == pytest.approx(12)
    assert figures.requests_per_s == pytest.approx(1)
    assert arrivals_per_s(SENT) == pytest.approx(1)
    assert lasted_s(SENT) == pytest.approx(2)
    assert resolution_ms(SENT) == pytest.approx(0.5)


def test_streams_at_once_are_counted_from_request_to_end() -> None:
    def lasting(from_ms: float, until_ms: float) -> dict[str, Any]:
        return stream(from_ms, [from_ms + 1], 1, until_ms)

    assert most_at_once(SENT) == 1
    assert most_at_once([lasting(0, 10), lasting(2, 30), lasting(9, 12), lasting(10, 20)]) == 3


def test_the_truth_of_choices_side_by_side_is_that_of_each() -> None:
    figures = from_sent([stream(0, [300, 310, 340, 350, 420, 430], 4, 431, choices=2)])
    assert figures.ttft_p50_ms == pytest.approx(300)
    assert figures.tpot_mean_ms == pytest.approx(120 / 11)
    assert figures.gap_mean_ms == pytest.approx(60)


@pytest.mark.parametrize("streams", [[], [stream(0, [1, 2], 1, 3) | {"done": None}]])
def test_no_truth_without_whole_streams(streams: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="streams were sent"):
        from_sent(streams)


def record(scheduled_s: float, chunks_s: tuple[float, ...], finished_s: float) -> RequestRecord:
    return RequestRecord(
        label=RequestLabel("a", "lane", "w", "s", 0),
        outcome=Outcome.COMPLETED,
        scheduled_at_s=scheduled_s,
        finished_at_s=finished_s,
        chunk_at_s=chunks_s,
        output_tokens=12,
    )


def test_our_figures_are_those_of_the_truth_when_nothing_is_lost() -> None:
    records = [record(0, (0.3, 0.34, 0.42), 0.42), record(1, (1.2, 1.24, 1.28), 1.28)]
    ours = from_records(records)
    sent = from_sent([stream(0, [300, 340, 420], 4, 420), stream(1000, [1200, 1240, 1280], 4, 1280)])
    for name in sent.__dataclass_fields__:
        assert getattr(ours, name) == pytest.approx(getattr(sent, name)), name


def test_a_request_that_failed_is_no_figure() -> None:
    failed = replace(record(0, (1.0,), 2.0), outcome=Outcome.FAILED, error="cut off")
    with pytest.raises(ValueError, match=r"1 of 1 requests did not complete.*cut off"):
        from_records([failed])


def test_tolerance_and_tie() -> None:
    assert tolerance("ttft_p50_ms", 50) == 2.0
    assert tolerance("ttft_p50_ms", 300) == pytest.approx(6)
    assert tolerance("tpot_mean_ms", 50) == pytest.approx(1)
    assert tie("ttft_p95_ms", 1000) == 2.0
    assert tie("requests_per_s", 4) == pytest.approx(0.02)


def test_no_tie_is_finer_than_the_truth_of_an_instant() -> None:
    assert tie("gap_p95_ms", 40) == pytest.approx(0.2)
    assert tie("gap_p95_ms", 40, resolution_ms=3.0) == 3.0
    assert tie("ttft_p50_ms", 300, resolution_ms=3.0) == 3.0
    # Over many instants it is.
    assert tie("gap_mean_ms", 40, resolution_ms=3.0) == pytest.approx(0.2)
