"""A verdict says NOT MET when the figures say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.simulation.results import TtftSummary
from serving.simulation.verdicts import SJF_FAST_AGEING, PolicyRow, judge_edf, judge_fair, judge_sjf

NONE_SERVED = TtftSummary(0, None, None, None)


def row(order: str, load: float, **figures: object) -> PolicyRow:
    plain = PolicyRow(order, load, 100, NONE_SERVED, NONE_SERVED, None, {}, {})
    return replace(plain, **figures)  # type: ignore[arg-type]


def short(p50_s: float | None) -> TtftSummary:
    return TtftSummary(10, p50_s, 9.0, 9.0)


@pytest.mark.parametrize(
    ("fcfs_s", "sjf_s", "is_met"),
    [
        (10.0, 1.0, True),
        (10.0, 5.0, True),
        (10.0, 5.1, False),
        (10.0, 20.0, False),
        (None, 1.0, False),
        (1.0, None, False),
    ],
)
def test_sjf_must_halve_the_short_median(fcfs_s: float | None, sjf_s: float | None, is_met: bool) -> None:
    rows = [
        row("fcfs", 0.7, short_ttft=short(1.0)),
        row("sjf", 0.7, short_ttft=short(1.0)),
        row("fcfs", 1.2, short_ttft=short(fcfs_s)),
        row("sjf", 1.2, short_ttft=short(sjf_s)),
        row(SJF_FAST_AGEING, 1.2, short_ttft=short(0.1)),
    ]
    verdict, fast_ageing = judge_sjf(rows)
    assert fast_ageing.is_met is (fcfs_s is not None), "each on its own figures"
    assert verdict.is_met is is_met
    assert str(verdict).startswith("met: " if is_met else "NOT MET: ")
    assert ("Ageing" in str(verdict)) is not is_met, "explained when it is not met"


@pytest.mark.parametrize(
    ("tokens", "is_met"),
    [
        ({"heavy": 1200, "light": 1000}, True),
        ({"heavy": 1000, "light": 1200}, True),
        ({"heavy": 1201, "light": 1000}, False),
        ({"heavy": 1000, "light": 1201}, False),
        ({"heavy": 10, "light": 0}, False),
        ({"heavy": 0, "light": 0}, False),
    ],
)
def test_fair_must_keep_tenants_together(tokens: dict[str, int], is_met: bool) -> None:
    rows = [
        row("fcfs", 6.6, served_while_all_wait={"heavy": 10, "light": 1}),
        row("fair", 6.6, served_while_all_wait=tokens),
    ]
    assert judge_fair(rows).is_met is is_met


def test_edf_is_judged_load_by_load() -> None:
    attained = {0.9: (0.90, 0.95), 1.0: (0.80, 0.80), 1.1: (0.70, 0.60)}
    rows = [
        row(order, load, slo_attainment=share)
        for load, both in attained.items()
        for order, share in zip(("fcfs", "edf"), both, strict=True)
    ]
    assert [verdict.is_met for verdict in judge_edf(rows)] == [True, False, False]
    assert "60.0 % against 70.0 %" in str(judge_edf(rows)[2])


def test_a_missing_row_is_an_error_and_no_verdict() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        judge_sjf([row("fcfs", 1.2)])
