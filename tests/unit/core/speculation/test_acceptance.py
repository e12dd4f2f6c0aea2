from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.speculation.acceptance import (
    acceptance_of_length,
    checked_rates,
    extended,
    extra_operations,
    geometric_rates,
    geometric_tokens_per_step,
    memory_bound_speed_up,
    tokens_per_step,
    tokens_variance,
)

shares = st.floats(0, 1)
counts = st.integers(1, 16)
rates_by_position = st.lists(shares, max_size=8).map(lambda given: tuple(sorted(given, reverse=True)))


@pytest.mark.parametrize(
    ("acceptance", "num_drafts", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_leviathan(acceptance: float, num_drafts: int, operations: float, speed: float) -> None:
    assert memory_bound_speed_up(acceptance, num_drafts, draft_cost=0) == pytest.approx(speed, abs=0.005)
    assert extra_operations(acceptance, num_drafts, draft_operations=0) == pytest.approx(
        operations, abs=0.005
    )


# T5-XXL, English to German, greedy, by size of the draft: with the best number of drafts by the formula.
@pytest.mark.parametrize(
    ("acceptance", "num_drafts", "draft_cost", "speed", "best"),
    [(0.75, 7, 0.02, 3.16, 9), (0.8, 7, 0.04, 3.25, 9), (0.82, 7, 0.11, 2.50, 6)],
)
def test_expected_speed_of_leviathan_s_t5(
    acceptance: float, num_drafts: int, draft_cost: float, speed: float, best: int
) -> None:
    # Its draft costs are printed with two digits.
    assert memory_bound_speed_up(acceptance, num_drafts, draft_cost) == pytest.approx(speed, abs=0.005)
    assert max(range(20), key=lambda k: memory_bound_speed_up(acceptance, k, draft_cost)) == best


@given(shares, counts)
def test_geometric_acceptance_has_a_closed_form(acceptance: float, num_drafts: int) -> None:
    if acceptance < 0.999:
        closed = (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
        assert geometric_tokens_per_step(acceptance, num_drafts) == pytest.approx(closed)
    else:
        assert geometric_tokens_per_step(acceptance, num_drafts) == pytest.approx(num_drafts + 1, rel=0.01)


@given(shares, counts)
def test_a_mean_length_gives_its_acceptance_back(acceptance: float, num_drafts: int) -> None:
    length = geometric_tokens_per_step(acceptance, num_drafts)
    again = acceptance_of_length(length, num_drafts)
    assert geometric_tokens_per_step(again, num_drafts) == pytest.approx(length, abs=1e-9)


@pytest.mark.parametrize(("length", "num_drafts"), [(0.9, 3), (4.1, 3), (1.0, 0)])
def test_a_length_that_no_acceptance_gives_is_refused(length: float, num_drafts: int) -> None:
    with pytest.raises(ValueError, match=f"mean_length={length:g} is outside of 1..{num_drafts + 1}"):
        acceptance_of_length(length, num_drafts)


def test_speculation_s_rates_never_rise() -> None:
    assert checked_rates([0.7, 0.4, 0.4]) == (0.7, 0.4, 0.4)
    with pytest.raises(ValueError, match=r"position 2 is 0\.8, must be in 0\.\.0\.7"):
        checked_rates([0.7, 0.8])


@given(rates_by_position, st.integers(0, 16))
def test_extended_speculation_rates_are_rates(rates: tuple[float, ...], num_drafts: int) -> None:
    longer = extended(rates, num_drafts)
    assert len(longer) == num_drafts
    assert checked_rates(longer)[: len(rates)] == rates[:num_drafts]


def test_rates_are_carried_on_with_the_last_step_s_chance() -> None:
    assert extended(geometric_rates(0.8, 2), 5) == pytest.approx(geometric_rates(0.8, 5))
    assert extended((0.5, 0.0), 3) == (0.5, 0.0, 0.0)
    assert extended((), 2) == (0.0, 0.0)


@given(rates_by_position)
def test_moments_of_a_speculation_step(rates: tuple[float, ...]) -> None:
    # Exactly i accepted: by the difference of neighbours.
    chances = [a - b for a, b in itertools.pairwise((1.0, *rates, 0.0))]
    mean = sum(chance * (1 + accepted) for accepted, chance in enumerate(chances))
    square = sum(chance * (1 + accepted) ** 2 for accepted, chance in enumerate(chances))
    assert tokens_per_step(rates) == pytest.approx(mean)
    assert tokens_variance(rates) == pytest.approx(square - mean**2, abs=1e-9)
