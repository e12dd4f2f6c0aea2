from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import (
    geometric_mean_of_repeats,
    mean_of_rates,
    mean_of_repeats,
    order_statistics,
    percentile_estimate,
    percentile_ratio,
    student_t,
    wilson,
)


@pytest.mark.parametrize(
    ("n", "share", "ranks"),
    [
        # The textbook's ranks for a median at 95 percent (sign test): Conover, Practical Nonparametric Statistics.
        (5, 0.5, None),
        (6, 0.5, (1, 6)),
        (10, 0.5, (2, 9)),
        (20, 0.5, (6, 15)),
        (25, 0.5, (8, 18)),
        (100, 0.5, (40, 61)),
        # 1 - 0.95^n >= 0.975 from 72 values on: then the largest value bounds a p95.
        (71, 0.95, None),
        (367, 0.99, None),
    ],
)
def test_ranks_are_the_published_ones(n: int, share: float, ranks: tuple[int, int] | None) -> None:
    assert order_statistics(n, share) == ranks


def test_the_smallest_sample_that_bounds_a_tail_percentile() -> None:
    for share in (0.95, 0.99):
        smallest = math.ceil(math.log(0.025) / math.log(share))
        assert order_statistics(smallest - 1, share) is None
        assert order_statistics(smallest, share) is not None


@given(st.integers(1, 300), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_ranks_cover_by_exact_arithmetic(n: int, share: float) -> None:
    def at_most(k: int) -> float:
        return math.fsum(math.comb(n, j) * share**j * (1 - share) ** (n - j) for j in range(k + 1))

    ranks = order_statistics(n, share)
    if ranks is None:
        assert at_most(0) > 0.025 or 1 - at_most(n - 1) > 0.025
        return
    low, high = ranks
    assert at_most(low - 1) <= 0.025 + 1e-12
    assert 1 - at_most(high - 1) <= 0.025 + 1e-12
    # And no rank nearer would do.
    assert at_most(low) > 0.025 - 1e-12
    assert 1 - at_most(high - 2) > 0.025 - 1e-12


def test_a_large_sample_keeps_its_ranks() -> None:
    ranks = order_statistics(1_000_000, 0.99)
    assert ranks is not None
    assert ranks[0] == pytest.approx(990_000 - 195, abs=2)  # 1.96 sqrt(n p (1 - p))
    assert ranks[1] == pytest.approx(990_000 + 196, abs=2)


def test_percentile_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    truth = -math.log(0.05)  # p95 of the exponential distribution
    covered = 0
    for _ in range(400):
        found = percentile_estimate(rng.exponential(size=200).tolist(), 95)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert covered >= 0.93 * 400


def test_few_values_have_a_percentile_and_no_interval() -> None:
    found = percentile_estimate([3.0, 1.0, 2.0], 50)
    assert found is not None
    assert (found.value, found.low, found.high) == (2.0, None, None)
    assert percentile_estimate([], 50) is None


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (20, 20, 0.8389, 1.0),  # the third, mirrored
    ],
)
def test_wilson_is_the_published_one(successes: int, total: int, low: float, high: float) -> None:
    found = wilson(successes, total)
    assert (found.value, found.low, found.high) == pytest.approx((successes / total, low, high), abs=6e-5)


@pytest.mark.parametrize(("successes", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_what_is_no_share_is_refused(successes: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"{successes} of {total} is no share"):
        wilson(successes, total)


@pytest.mark.parametrize(
    ("degrees", "t"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (5, 2.571),
        (7, 2.365),
        (10, 2.228),
        (15, 2.131),
        (40, 2.021),
        (100, 1.984),
    ],
)
def test_student_is_the_table(degrees: int, t: float) -> None:
    assert student_t(degrees) == pytest.approx(t, abs=6e-4)


def test_mean_of_repeats_by_hand() -> None:
    # Standard deviation 1, t(2) = 4.3027: half-width 4.3027 / sqrt 3.
    found = mean_of_repeats([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2 - 2.4841, 2 + 2.4841), abs=1e-4)
    single = mean_of_repeats([5.0])
    assert single is not None
    assert (single.value, single.low) == (5.0, None)
    assert mean_of_repeats([]) is None


def test_geometric_mean_is_between_factors() -> None:
    found = geometric_mean_of_repeats([1.0, 4.0])
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(2.0)
    assert found.low * found.high == pytest.approx(4.0)  # even by factors
    assert math.log(found.high) == pytest.approx(math.log(2) + 12.706 * math.log(2), abs=1e-3)
    assert geometric_mean_of_repeats([1.0]) == Estimate(1.0)
    assert geometric_mean_of_repeats([]) is None


def test_the_ratio_of_two_samples_finds_the_truth_and_repeats() -> None:
    rng = np.random.default_rng(2)
    slow, fast = (rng.gamma(4, scale, 300).tolist() for scale in (2.0, 1.0))
    found = percentile_ratio(slow, fast, 50, seed=3)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < 2.0 < found.high
    assert found.high - found.low < 0.6
    assert found == percentile_ratio(slow, fast, 50, seed=3)
    assert found != percentile_ratio(slow, fast, 50, seed=4)
    assert percentile_ratio([], fast, 50) is None


def test_the_ratio_of_a_single_value_has_no_interval_and_one_to_zero_is_none() -> None:
    assert percentile_ratio([3.0], [1.5, 1.5], 50) == Estimate(2.0)
    assert percentile_ratio([1.0, 2.0], [0.0, 0.0], 50) is None


def test_the_interval_of_a_ratio_leaves_out_two_and_a_half_percent_on_either_side() -> None:
    """Against a constant it is that of a median: of 100 values, ranks 40 to 61 or the half-way between two."""
    found = percentile_ratio([float(rank) for rank in range(1, 101)], [0.5, 0.5], 50)
    assert found is not None
    assert found.value == 101
    assert found.low is not None
    assert found.high is not None
    assert (found.low, found.high) == pytest.approx(
        (81.4, 120.6), abs=2
    )  # 1.96 sqrt(n / 4) ranks on either side
    assert found.low + found.high == pytest.approx(202, abs=1), "as much on one side as on the other"


def test_a_rate_is_never_below_zero() -> None:
    found = mean_of_rates([10.0, 400.0])
    assert found is not None
    assert (found.value, found.low) == (205, 0)
    assert found.high == pytest.approx(205 + 12.706 * 195, abs=0.1)
    assert mean_of_rates([10.0]) == Estimate(10.0)
    assert mean_of_rates([10.0, 10.0]) == Estimate(10.0, 10.0, 10.0)
    assert mean_of_rates([]) is None
