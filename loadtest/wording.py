"""How figures are written: a unit that fits, and the interval in brackets."""

from __future__ import annotations

import math

from loadtest.estimate import Estimate

NOTHING = "–"
SIGNIFICANT_DIGITS = 3


def number(value: float | None, digits: int | None = 0, scale: float = 1) -> str:
    """A number with a fixed count of decimals; None as `digits` keeps three significant ones."""
    if value is None:
        return NOTHING
    value *= scale
    return f"{value:,.{_decimals(value) if digits is None else digits}f}"


def estimate(found: Estimate | None, digits: int | None = 0, scale: float = 1) -> str:
    """`412 [390–441]`; the value alone where it has no interval."""
    if found is None:
        return NOTHING
    if digits is None:
        # The value's own precision for its bounds too: they are read side by side.
        digits = _decimals(found.value * scale)
    text = number(found.value, digits, scale)
    if found.low is None or found.high is None:
        return text
    return f"{text} [{number(found.low, digits, scale)}–{number(found.high, digits, scale)}]"


def share(found: Estimate | float | None) -> str:
    """A share of 1 in percent."""
    if found is None:
        return NOTHING
    made = found if isinstance(found, Estimate) else Estimate(found)
    value, bracket, interval = estimate(made, 1, 100).partition(" [")
    return f"{value}%{bracket}{interval}"


def time(found: Estimate | float | None) -> str:
    """Seconds, or milliseconds below one second."""
    if found is None:
        return "unknown"
    made = found if isinstance(found, Estimate) else Estimate(found)
    if abs(made.value) >= 1:
        return estimate(made, 1) + " s"
    return estimate(made, 0 if abs(made.value) >= 0.1 else 1, 1000) + " ms"


def rate(found: Estimate | float) -> str:
    """Requests/s."""
    made = found if isinstance(found, Estimate) else Estimate(found)
    return f"{estimate(made, None)} requests/s"


def count(number_of: int, noun: str) -> str:
    """`1 request`, `2 requests`."""
    return f"{number_of:,} {noun}" + ("" if number_of == 1 else "s")


def _decimals(value: float) -> int:
    if value == 0:
        return 0
    return max(0, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value))))
