"""A bare engine and the gateway are compared repeat by repeat, and judged at each level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from serving.benchmarks.overhead.figures import (
    BARE,
    OURS,
    Measured,
    Sample,
    alternating,
    comparison_table,
    judge,
    sides_table,
)

FIRST = Sample(BARE, 4, 1, 100.0, 50.0, 25.0, 10, {})


def measured(tokens_per_s: float = 100, ttft_ms: float = 50, tpot_ms: float = 25) -> Measured:
    ours = replace(FIRST, side=OURS, tokens_per_s=tokens_per_s, ttft_p50_ms=ttft_ms, tpot_p50_ms=tpot_ms)
    return Measured([FIRST, ours])


def met(found: Measured, levels: Sequence[int] = (4,)) -> list[bool | None]:
    return [verdict.is_met for verdict in judge(found, levels)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (measured(), [True, True, True]),
        (measured(97, 55, 25.25), [True, True, True]),
        (measured(tokens_per_s=96.9), [False, True, True]),
        (measured(ttft_ms=55.1), [True, False, True]),
        (measured(tpot_ms=25.3), [True, True, False]),
    ],
)
def test_each_target_has_its_bound(found: Measured, expected: list[bool]) -> None:
    assert met(found) == expected


def test_a_level_with_a_failed_request_is_missed() -> None:
    bare, ours = measured().samples
    assert met(Measured([bare, replace(ours, failures={"status 503": 1})])) == [False] * 3


def test_a_level_that_was_not_measured_is_not_judged() -> None:
    assert met(measured(), [8]) == [None] * 3


def test_repeats_are_compared_with_each_other() -> None:
    """The machine slows down; both sides feel it, in whatever order they were measured."""
    samples = [
        replace(FIRST, side=side, repeat=repeat, tokens_per_s=100.0 / repeat)
        for repeat in (1, 2, 3)
        for side in alternating(repeat)
    ]
    found = Measured(samples).tokens_ratio(4)
    assert found is not None
    assert (found.least, found.most) == (1, 1)


def test_the_sides_take_turns() -> None:
    assert [alternating(repeat) for repeat in (1, 2, 3)] == [(BARE, OURS), (OURS, BARE), (BARE, OURS)]


def test_tables_show_both_sides_and_what_differs() -> None:
    found = measured(99, 51, 25.5)
    assert "99.0" in sides_table(found, [4])
    (line,) = [line for line in comparison_table(found, [4]).splitlines() if line.startswith("|     4")]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["4", "0.990", "+1.00", "1.020", "0"]
