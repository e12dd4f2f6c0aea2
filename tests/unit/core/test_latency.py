"""Each figure from instants whose answer is known by hand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.latency import (
    IncompleteTimelineError,
    RequestTimeline,
    e2e_latency_s,
    inter_chunk_latencies_s,
    percentile,
    tpot_s,
    ttft_s,
)

# Due at 10, sent late at 11, three chunks, last byte 0.5 s after the last text; 5 tokens in 3 chunks.
TIMELINE = RequestTimeline(
    scheduled_at_s=10, sent_at_s=11, chunk_at_s=(12, 12.5, 13.5), finished_at_s=14, output_tokens=5
)


def test_ttft_counts_from_the_scheduled_instant_not_from_sending() -> None:
    assert ttft_s(TIMELINE) == 2


def test_e2e_ends_at_the_last_byte_not_at_the_last_text() -> None:
    assert e2e_latency_s(TIMELINE) == 4


def test_tpot_divides_by_the_tokens_after_the_first_not_by_chunks() -> None:
    assert tpot_s(TIMELINE) == (4 - 2) / 4


def test_inter_chunk_latencies_are_the_gaps() -> None:
    assert inter_chunk_latencies_s(TIMELINE) == (0.5, 1.0)


def test_first_and_last_token() -> None:
    assert (TIMELINE.first_token_at_s, TIMELINE.last_token_at_s) == (12, 13.5)
    empty = RequestTimeline(scheduled_at_s=1)
    assert empty.first_token_at_s is None
    assert empty.last_token_at_s is None


@pytest.mark.parametrize("output_tokens", [0, 1])
def test_tpot_of_an_answer_without_a_second_token_is_none(output_tokens: int) -> None:
    timeline = RequestTimeline(0, 0, (1.0,) * output_tokens, 2, output_tokens)
    assert tpot_s(timeline) is None


def test_what_has_not_happened_is_an_error_not_a_zero() -> None:
    fresh = RequestTimeline(scheduled_at_s=0)
    with pytest.raises(IncompleteTimelineError, match="first token"):
        ttft_s(fresh)
    with pytest.raises(IncompleteTimelineError, match="finished_at_s"):
        e2e_latency_s(fresh)
    with pytest.raises(IncompleteTimelineError, match="output_tokens"):
        tpot_s(RequestTimeline(0, 0, (1.0, 2.0), 3))
    with pytest.raises(IncompleteTimelineError, match="finished_at_s"):
        tpot_s(RequestTimeline(0, 0, (1.0, 2.0), None, 2))
    assert inter_chunk_latencies_s(fresh) == ()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_percentile_edges() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    values = [9.0, 1.0, 4.0]
    assert (percentile(values, 0), percentile(values, 50), percentile(values, 100)) == (
        1.0,
        statistics.median(values),
        9.0,
    )
    assert values == [9.0, 1.0, 4.0], "the caller's list keeps its order"


@pytest.mark.parametrize("q", [-0.1, 100.1, float("nan")])
def test_percentile_out_of_range(q: float) -> None:
    with pytest.raises(ValueError, match=r"0\.\.100"):
        percentile([1.0], q)
