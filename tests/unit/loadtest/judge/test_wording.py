from __future__ import annotations

import pytest

from loadtest.judge.estimate import Estimate
from loadtest.judge.wording import count, estimate, number, share, time


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123, "0.0123"),
        (0.5, "0.500"),
        (1.234, "1.23"),
        (98.76, "98.8"),
        (99.96, "100"),
        (123.45, "123"),
        (1234.5, "1,230"),
        (12_345_678, "12,300,000"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert number(value, None) == text


def test_an_interval_has_the_precision_of_its_value() -> None:
    assert estimate(Estimate(0.412, 0.39, 0.441), 0, 1000) == "412 [390–441]"
    assert estimate(Estimate(1.9, 1.786, 2.014), None) == "1.90 [1.79–2.01]"
    assert estimate(Estimate(12_345.6, 11_987.6, 12_511.1), None) == "12,300 [12,000–12,500]"
    assert estimate(Estimate(1.9), 1) == "1.9"
    assert estimate(None) == "–"


def test_shares_and_times() -> None:
    assert share(Estimate(0.97, 0.93, 0.99)) == "97.0% [93.0–99.0]"
    assert (share(0.5), share(None)) == ("50.0%", "–")
    assert [time(value) for value in (0.0123, 0.412, 2.5, None)] == ["12.3 ms", "412 ms", "2.5 s", "unknown"]
    assert [time(value) for value in (0.000669, 0.0, 99.44, 847.31)] == [
        "0.669 ms",
        "0 ms",
        "99.4 s",
        "847 s",
    ]
    assert (count(1, "stage"), count(1200, "stage")) == ("1 stage", "1,200 stages")
