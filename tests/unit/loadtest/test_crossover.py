from __future__ import annotations

import pytest

from loadtest.crossover import Verdict, find_crossing


@pytest.mark.parametrize(
    ("ratios", "verdict", "levels"),
    [
        ([(1, 2.0), (4, 1.5), (8, 1.1)], Verdict.ALWAYS, []),
        ([(1, 0.9), (4, 0.8)], Verdict.NEVER, []),
        ([(1, 1.0), (4, 1.0)], Verdict.NEVER, []),  # a tie does not pay
        ([(1, 1.5), (4, 0.5)], Verdict.UP_TO, [2.0]),  # half-way on a log axis
        ([(1, 0.5), (4, 1.5)], Verdict.FROM, [2.0]),
        ([(1, 2.0), (4, 1.0), (8, 0.5)], Verdict.UP_TO, [4.0]),  # measured exactly at 1
        ([(1, 1.5), (4, 0.5), (16, 1.5)], Verdict.MIXED, [2.0, 8.0]),
        ([(1, 1.5), (4, None), (16, 0.5)], Verdict.UP_TO, [4.0]),  # a gap is bridged
        ([(1, None)], Verdict.UNKNOWN, []),
        ([], Verdict.UNKNOWN, []),
    ],
)
def test_crossing(ratios: list[tuple[int, float | None]], verdict: Verdict, levels: list[float]) -> None:
    crossing = find_crossing(ratios)
    assert crossing.verdict is verdict
    assert crossing.levels == pytest.approx(levels)
