"""Figures over repeats: the middle one and the range, and none where a repeat has none."""

from __future__ import annotations

import pytest

from serving.benchmarks.spread import Spread, differences, quotients, spread
from serving.benchmarks.verdict import judged


def test_a_spread_is_the_middle_and_the_ends() -> None:
    assert spread([3, 1, 2]) == Spread(2, 1, 3)


@pytest.mark.parametrize("values", [[], [None], [1, None]])
def test_a_repeat_without_a_figure_is_not_left_out_in_silence(values: list[float | None]) -> None:
    assert spread(values) is None


def test_pairs_are_compared_repeat_by_repeat() -> None:
    assert quotients([2, 3, None, 1], [1, 2, 1, 0]) == [2, 1.5, None, None]
    assert differences([2, 3, None], [1, None, 1]) == [1, None, None]


def test_a_range_is_shown_where_there_is_one() -> None:
    assert Spread(2, 2, 2).text(".1f") == "2.0"
    assert Spread(2, 1, 3).text(".1f") == "2.0 (1.0..3.0)"


@pytest.mark.parametrize(
    ("found", "is_met", "word"),
    [(Spread(1.5, 1, 2), True, "met"), (Spread(1.6, 1, 2), False, "MISSED"), (None, None, "not judged")],
)
def test_the_median_decides(found: Spread | None, is_met: bool | None, word: str) -> None:
    verdict = judged("it", "at most 1.5", found, at_most=1.5)
    assert verdict.is_met is is_met
    assert str(verdict).startswith(f"{word}: it: at most 1.5")
    assert judged("it", "", Spread(1.4, 1, 2), at_least=1.5).is_met is False
