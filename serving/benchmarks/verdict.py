"""A target, and whether it is met. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from serving.benchmarks.spread import Spread


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target.

    Attributes:
        subject: what is judged.
        is_met: None where something that it needs was not measured.
        figure: that decides, the median of the repeats.
    """

    subject: str
    target: str
    is_met: bool | None
    figure: float | None
    note: str = ""

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not judged"}[self.is_met]
        figure = "" if self.figure is None else f": {self.figure:.3f}"
        return f"{word}: {self.subject}: {self.target}{figure}{f' ({self.note})' if self.note else ''}"


def judged(
    subject: str,
    target: str,
    found: Spread | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Verdict:
    """A target about the median of a figure, with the figure's range."""
    if found is None:
        return Verdict(subject, target, None, None)
    is_met = (at_least is None or found.median >= at_least) and (at_most is None or found.median <= at_most)
    return Verdict(subject, target, is_met, found.median, f"{found.least:.3f}..{found.most:.3f}")
