"""Acceptance figures from counters whose answer is known by hand."""

from __future__ import annotations

import pytest

from serving.core.speculation import (
    SpeculationCounts,
    acceptance_rate,
    mean_acceptance_length,
    passes_per_token,
)


def test_rate_and_length() -> None:
    counts = SpeculationCounts(num_drafts=10, draft_tokens=40, accepted_tokens=30)
    assert acceptance_rate(counts) == 0.75
    assert mean_acceptance_length(counts) == 4.0  # 1 + 30 / 10
    assert passes_per_token(counts) == 0.25


def test_drafts_that_never_hit_still_yield_one_token_a_step() -> None:
    counts = SpeculationCounts(num_drafts=10, draft_tokens=40, accepted_tokens=0)
    assert acceptance_rate(counts) == 0.0
    assert mean_acceptance_length(counts) == 1.0
    assert passes_per_token(counts) == 1.0


def test_nothing_drafted_is_none_not_zero() -> None:
    nothing = SpeculationCounts(0, 0, 0)
    assert acceptance_rate(nothing) is None
    assert mean_acceptance_length(nothing) is None
    assert passes_per_token(nothing) is None


def test_a_window_is_the_difference_of_two_readings() -> None:
    window = SpeculationCounts(15, 60, 45) - SpeculationCounts(10, 40, 30)
    assert window == SpeculationCounts(5, 20, 15)


def test_counters_that_went_backwards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"accepted_tokens=-25 .*draft_tokens=-36"):
        SpeculationCounts(1, 4, 4) - SpeculationCounts(10, 40, 29)


def test_more_accepted_than_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="accepted_tokens=5"):
        SpeculationCounts(1, 4, 5)
