"""Each figure from instants whose answer is known by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.latency import (
    IncompleteTimelineError,
    RequestTimeline,
    choices_of,
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


# Choice 0 is written for 3 s and choice 1 for 1 s, side by side; 7 tokens in all, the end 0.5 s after the last.
TWO_CHOICES = RequestTimeline(10, 11, (12, 12.5, 13, 13.5, 15), 15.5, 7, chunk_choice=(0, 1, 0, 1, 0))


def test_gaps_lie_between_chunks_of_one_choice() -> None:
    assert inter_chunk_latencies_s(TWO_CHOICES) == (1, 1, 2)


def test_tpot_of_several_choices_adds_up_the_time_of_each_and_leaves_out_each_ones_first_token() -> None:
    assert tpot_s(TWO_CHOICES) == (3 + 0.5 + 1 + 0.5) / (7 - 2)
    assert (ttft_s(TWO_CHOICES), e2e_latency_s(TWO_CHOICES)) == (2, 5.5)


def test_an_event_with_text_of_several_choices_is_a_chunk_of_each() -> None:
    together = RequestTimeline(0, 0, (1, 1, 2, 2), 2, 4, chunk_choice=(0, 1, 0, 1))
    assert inter_chunk_latencies_s(together) == (1, 1)
    assert tpot_s(together) == 1


def test_choices_of_one_token_each_have_no_tpot() -> None:
    firsts = RequestTimeline(0, 0, (1.0, 1.5), 2, 2, chunk_choice=(0, 1))
    assert tpot_s(firsts) is None
    assert inter_chunk_latencies_s(firsts) == ()


@pytest.mark.parametrize(
    ("choice_of_chunk", "noted"), [((), ()), ((0, 0), ()), ((1, 1), ()), ((0, 1, 0), (0, 1, 0))]
)
def test_choices_are_noted_where_there_are_several(
    choice_of_chunk: tuple[int, ...], noted: tuple[int, ...]
) -> None:
    assert choices_of(choice_of_chunk) == noted


def test_a_choice_is_named_for_every_chunk_or_for_none() -> None:
    with pytest.raises(ValueError, match="zip"):
        inter_chunk_latencies_s(replace(TWO_CHOICES, chunk_choice=(0, 1)))


INSTANTS_MS = st.lists(st.integers(0, 100_000), min_size=2, max_size=40, unique=True).map(sorted)


@given(INSTANTS_MS, st.integers(0, 9), st.integers(0, 500), st.integers(2, 400))
def test_one_choice_named_or_not_gives_the_same_to_the_bit(
    at_ms: list[int], choice: int, tail_ms: int, tokens: int
) -> None:
    at_s = tuple(ms / 1000 for ms in at_ms)
    plain = RequestTimeline(0.1, 0.1, at_s, (at_ms[-1] + tail_ms) / 1000, tokens)
    named = replace(plain, chunk_choice=(choice,) * len(at_s))
    assert tpot_s(named) == tpot_s(plain) == (e2e_latency_s(plain) - ttft_s(plain)) / (tokens - 1)
    assert inter_chunk_latencies_s(named) == inter_chunk_latencies_s(plain)


@given(INSTANTS_MS, st.integers(2, 8), st.integers(0, 20), st.integers(0, 500))
def test_copies_of_a_choice_side_by_side_have_its_tpot_and_its_gaps(
    at_ms: list[int], copies: int, shift_ms: int, tail_ms: int
) -> None:
    one = RequestTimeline(0, 0, tuple(ms / 1000 for ms in at_ms), (at_ms[-1] + tail_ms) / 1000, len(at_ms))
    chunks = sorted((ms + copy * shift_ms, copy) for ms in at_ms for copy in range(copies))
    several = RequestTimeline(
        0,
        0,
        tuple(ms / 1000 for ms, _ in chunks),
        (chunks[-1][0] + tail_ms) / 1000,
        copies * len(at_ms),
        tuple(copy for _, copy in chunks),
    )
    assert tpot_s(several) == pytest.approx(tpot_s(one))
    gaps_s = sorted(inter_chunk_latencies_s(one) * copies)
    assert sorted(inter_chunk_latencies_s(several)) == pytest.approx(gaps_s)


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
