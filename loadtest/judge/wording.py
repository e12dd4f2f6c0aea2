"""How figures are written: a unit that fits, and the interval in brackets."""

from __future__ import annotations

import math

from loadtest.judge.estimate import Estimate

NOTHING = "–"
SIGNIFICANT_DIGITS = 3


def number(value: float | None, digits: int | None = 0, scale: float = 1) -> str:
    """A number with a fixed count of decimals, or with three significant digits where `digits` is None.

    Fewer than none round before the point: 12,345 with -2 is 12,300.
    """
    if value is None:
        return NOTHING
    value *= scale
    if digits is None:
        digits = _decimals(value)
    return f"{round(value, digits):,.{max(0, digits)}f}"


def exact_or_rounded(value: float) -> str:
    """A count in full, anything else with three significant digits."""
    return number(value) if value == int(value) else number(value, None)


def estimate(estimated: Estimate | None, digits: int | None = 0, scale: float = 1) -> str:
    """`412 [390–441]`; the value alone where it has no interval."""
    if estimated is None:
        return NOTHING
    if digits is None:
        # The value's own precision for its bounds too: they are read side by side.
        digits = _decimals(estimated.value * scale)
    text = number(estimated.value, digits, scale)
    if estimated.low is None or estimated.high is None:
        return text
    return f"{text} [{number(estimated.low, digits, scale)}–{number(estimated.high, digits, scale)}]"


def share(quantity: Estimate | float | None) -> str:
    """A share of 1 in percent."""
    if quantity is None:
        return NOTHING
    made = quantity if isinstance(quantity, Estimate) else Estimate(quantity)
    value, bracket, interval = estimate(made, 1, 100).partition(" [")
    return f"{value}%{bracket}{interval}"


def time(quantity: Estimate | float | None) -> str:
    """Seconds, or milliseconds below one second, with three significant digits at most."""
    if quantity is None:
        return "unknown"
    made = quantity if isinstance(quantity, Estimate) else Estimate(quantity)
    size_s = abs(made.value)
    if size_s >= 1:
        return estimate(made, 1 if size_s < 100 else None) + " s"
    return estimate(made, 1 if 0.001 <= size_s < 0.1 else None, 1000) + " ms"


def rate(quantity: Estimate | float) -> str:
    """Requests/s."""
    made = quantity if isinstance(quantity, Estimate) else Estimate(quantity)
    return f"{estimate(made, None)} requests/s"


def count(number_of: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{number_of:,} {noun}" + ("" if number_of == 1 else "s")


def _decimals(value: float) -> int:
    """Those of three significant digits; below 0 for what is a thousand or more."""
    rounded = abs(float(f"{value:.{SIGNIFICANT_DIGITS}g}"))  # 99.96 is 100 and not 100.0
    return 0 if rounded == 0 else SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(rounded))
