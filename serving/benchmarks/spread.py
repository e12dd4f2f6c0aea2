"""A figure over repeats. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the repeats: median, and the least and the most."""

    median: float
    least: float
    most: float

    def text(self, form: str) -> str:
        """Median, and the range where there is one."""
        if self.least == self.most:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.least:{form}}..{self.most:{form}})"


def spread(values: Sequence[float | None]) -> Spread | None:
    """None where a repeat has no figure, or there is no repeat."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(median(known), min(known), max(known))


def quotients(over: Sequence[float | None], under: Sequence[float | None]) -> list[float | None]:
    """Of pairs; None where either is missing or the lower one is 0."""
    return [a / b if a is not None and b else None for a, b in zip(over, under, strict=True)]


def differences(of: Sequence[float | None], minus: Sequence[float | None]) -> list[float | None]:
    """Of pairs; None where either is missing."""
    return [a - b if a is not None and b is not None else None for a, b in zip(of, minus, strict=True)]
