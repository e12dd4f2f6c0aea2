"""What is concluded of ratios: seldom anything where there is nothing, always what is large enough."""

from __future__ import annotations

import math
import random

import pytest

from loadtest.judge.estimate import Estimate
from loadtest.judge.settled import (
    ASSUMED_STAGE_SD,
    Standing,
    ratios_by_level,
    smallest_settled,
    standing,
    with_stage_noise,
)

NOISE = 0.03  # of a stage's figure: what two runs of the same stage differ by
TRIES = 3_000
SETTLED = (Standing.ABOVE, Standing.BELOW)


def measured(
    rng: random.Random, truths: tuple[float, ...], repeats: int, noise: float = NOISE
) -> list[list[float]]:
    """The ratio of two stages at each level, each repeat with noise of its own on both."""

    def draw() -> float:
        return math.exp(rng.gauss(0, noise))

    return [[truth * draw() / draw() for _ in range(repeats)] for truth in truths]


def share_of_verdicts(truths: tuple[float, ...], repeats: int, noise: float = NOISE) -> float:
    """In how many tries something is said of any level."""
    rng = random.Random(f"{truths}/{repeats}/{noise}")
    tries = [ratios_by_level(measured(rng, truths, repeats, noise)) for _ in range(TRIES)]
    return sum(any(standing(each) in SETTLED for each in levels) for levels in tries) / TRIES


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
@pytest.mark.parametrize("num_levels", [1, 3, 4])
def test_identical_lanes_seldom_get_a_verdict(repeats: int, num_levels: int) -> None:
    assert share_of_verdicts((1.0,) * num_levels, repeats) <= 0.05


def test_without_repeats_it_takes_more_noise_than_is_assumed_to_be_fooled() -> None:
    assert share_of_verdicts((1.0, 1.0, 1.0), 1, ASSUMED_STAGE_SD) <= 0.05
    assert share_of_verdicts((1.0, 1.0, 1.0), 1, 3 * ASSUMED_STAGE_SD) > 0.05, "the assumption carries it"


def test_what_is_large_enough_is_settled() -> None:
    assert share_of_verdicts((1.15, 1.15, 1.15), 3) > 0.9
    assert share_of_verdicts((3.0, 1.0, 1.0), 1) == 1.0


def test_levels_are_told_apart_one_by_one() -> None:
    levels = ratios_by_level([[2.0, 2.05, 1.98], [], [1.01, 0.98, 1.0], [0.7, 0.71, 0.69]])
    assert [standing(each) for each in levels] == [
        Standing.ABOVE,
        Standing.UNKNOWN,
        Standing.OPEN,
        Standing.BELOW,
    ]


def test_an_interval_by_hand() -> None:
    # Logarithms -d, 0, d with d = 0.1: deviation 0.1 with 2 degrees of freedom, t 4.303, half-width 0.2484.
    (level,) = ratios_by_level([[math.exp(-0.1), 1.0, math.exp(0.1)]])
    assert level is not None
    assert level.low is not None
    assert (level.value, math.log(level.low)) == pytest.approx((1.0, -0.2484), abs=1e-4)
    # A second level with the same spread: 4 degrees, and 97.5 percent each for 95 together, t 3.495.
    both = ratios_by_level([[math.exp(-0.1), 1.0, math.exp(0.1)]] * 2)
    assert both[0] is not None
    assert both[0].low is not None
    assert math.log(both[0].low) == pytest.approx(-3.495 * 0.1 / math.sqrt(3), abs=1e-4)


def test_a_design_says_what_it_can_settle() -> None:
    three = [[1.0, 1.03, 0.97]] * 3
    smallest = smallest_settled(ratios_by_level(three))
    assert smallest is not None
    levels = ratios_by_level([[ratio * smallest * 1.001 for ratio in ratios] for ratios in three])
    assert all(standing(each) is Standing.ABOVE for each in levels)
    below = ratios_by_level([[ratio * smallest * 0.99 for ratio in ratios] for ratios in three])
    assert all(standing(each) is Standing.OPEN for each in below)
    assert smallest_settled(ratios_by_level([[], []])) is None


def test_a_ratio_without_interval_says_nothing() -> None:
    assert standing(Estimate(3.0)) is Standing.OPEN
    assert standing(None) is Standing.UNKNOWN


def test_a_single_stage_is_taken_to_vary_by_what_is_assumed() -> None:
    (level,) = ratios_by_level([[2.0]])
    assert level is not None
    assert level.high is not None
    assert (level.value, level.high) == pytest.approx(
        (2.0, 2 * math.exp(1.9623 * math.sqrt(2) * 0.05)), abs=1e-4
    )


def test_an_interval_from_requests_is_widened_by_the_noise_of_a_stage() -> None:
    widened = with_stage_noise(Estimate(2.0, 1.8, 2.3))
    assert widened is not None
    noise = 1.9623 * math.sqrt(2) * 0.05
    low, high = (
        2 / math.exp(math.hypot(math.log(2 / 1.8), noise)),
        2 * math.exp(math.hypot(math.log(2.3 / 2), noise)),
    )
    assert (widened.value, widened.low, widened.high) == pytest.approx((2.0, low, high), abs=1e-4)


@pytest.mark.parametrize("ratio", [None, Estimate(2.0), Estimate(2.0, 0.0, 3.0)])
def test_what_has_no_interval_above_zero_is_not_widened(ratio: Estimate | None) -> None:
    assert with_stage_noise(ratio) == ratio
