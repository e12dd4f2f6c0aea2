from __future__ import annotations

import numpy as np
import pytest

from loadtest.judge.estimate import Estimate, is_settled, ratio_of_estimates


def test_a_ratio_of_estimates_against_numbers_worked_by_hand() -> None:
    # ln 2 apart; each interval is +-10 % upwards and downwards by the same factor.
    ratio = ratio_of_estimates(Estimate(10, 10 / 1.1, 11), Estimate(20, 20 / 1.1, 22))
    factor = np.exp(np.hypot(np.log(1.1), np.log(1.1)))
    assert ratio.value == 2
    assert (ratio.low, ratio.high) == pytest.approx((2 / factor, 2 * factor))


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        a, b = rng.normal(10, 0.5), rng.normal(20, 1.0)
        ratio = ratio_of_estimates(
            Estimate(a, a - 1.96 * 0.5, a + 1.96 * 0.5), Estimate(b, b - 1.96, b + 1.96)
        )
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 2 <= ratio.high
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize(
    "a",
    [
        Estimate(1.0),
        Estimate(1.0, 0.9, None),
        Estimate(1.0, None, 1.1),
        Estimate(1.0, -0.2, 2.2),
        Estimate(1.0, 0.0, 2.0),
    ],
)
def test_a_ratio_has_no_interval_where_a_term_has_none_above_zero(a: Estimate) -> None:
    assert ratio_of_estimates(a, Estimate(2.0, 1.9, 2.1)) == Estimate(2.0)
    assert ratio_of_estimates(Estimate(2.0, 1.9, 2.1), a) == Estimate(0.5)


@pytest.mark.parametrize(
    ("ratio", "settled"),
    [
        (Estimate(2.0), None),
        (Estimate(2.0, 1.5, None), None),
        (Estimate(2.0, None, 3.0), None),
        (Estimate(2.0, 1.5, 3.0), True),
        (Estimate(0.5, 0.4, 0.6), True),
        (Estimate(1.2, 1.0, 1.4), False),  # an end on 1 does not leave it out
        (Estimate(0.8, 0.6, 1.0), False),
    ],
)
def test_a_ratio_is_settled_where_its_interval_leaves_one_out(ratio: Estimate, settled: bool | None) -> None:
    assert is_settled(ratio) is settled
