"""The targets of our gateway, each met, missed or not judged, with the figure that decides. Pure.

A target about a level is missed if any request of ours failed there, whatever the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serving.benchmarks.gateway.figures import Measured, Sample, Spread
from serving.benchmarks.gateway.names import DIRECT, ROUTER

LEAST_TOKENS_RATIO = {256: 1.0, 512: 1.1, 1000: 1.1}
MOST_TTFT_P50_RATIO = {128: 1.2, 256: 1.5, 512: 1.5}
MOST_TTFT_P99_RATIO = {128: 1.0, 256: 1.0, 512: 1.0}
MOST_CPU_RATIO = {256: 1.5, 512: 1.5, 1000: 1.5}
MOST_ADDED_MS = 1.5
MOST_IDLE_KB = 30.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target.

    Attributes:
        is_met: None where something that it needs was not measured.
        figure: that decides, the median of the repeats.
    """

    peer: str
    target: str
    is_met: bool | None
    figure: float | None
    note: str = ""

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not judged"}[self.is_met]
        figure = "" if self.figure is None else f": {self.figure:.2f}"
        return f"{word}: {self.peer}: {self.target}{figure}{f' ({self.note})' if self.note else ''}"


def judge(measured: Measured, peer: str) -> list[Verdict]:
    """All targets, of one of our own peers."""
    return [
        *_ratios(measured, peer, "tokens/s", LEAST_TOKENS_RATIO, lambda one: one.tokens_per_s, at_least=True),
        *_ratios(measured, peer, "TTFT p50", MOST_TTFT_P50_RATIO, lambda one: one.ttft_p50_ms),
        *_ratios(measured, peer, "TTFT p99", MOST_TTFT_P99_RATIO, lambda one: one.ttft_p99_ms),
        _added(measured, peer),
        *_ratios(
            measured,
            peer,
            "processor time per 1,000 tokens",
            MOST_CPU_RATIO,
            lambda one: one.cpu_s_per_1000_tokens,
        ),
        _idle(measured, peer),
    ]


def _ratios(
    measured: Measured,
    peer: str,
    what: str,
    bounds: dict[int, float],
    of: Callable[[Sample], float | None],
    *,
    at_least: bool = False,
) -> Iterator[Verdict]:
    for streams, bound in bounds.items():
        word = "at least" if at_least else "at most"
        target = f"{what} {word} {bound:g} times {ROUTER}'s at {streams:,} streams"
        found = measured.ratio(peer, ROUTER, streams, of)
        failures = measured.num_failures(peer, streams)
        if found is None:
            yield Verdict(peer, target, None, None)
            continue
        holds = found.median >= bound if at_least else found.median <= bound
        note = _range(found)
        if failures:
            note += f"; {failures} failed"
        if its := measured.num_failures(ROUTER, streams):
            note += f"; {its} of {ROUTER}'s failed"
        yield Verdict(peer, target, holds and not failures, found.median, note)


def _added(measured: Measured, peer: str) -> Verdict:
    target = f"at most {MOST_ADDED_MS:g} ms added to the time to first token at one stream"
    found = measured.added_ms(peer, DIRECT)
    if found is None:
        return Verdict(peer, target, None, None)
    return Verdict(peer, target, found.median <= MOST_ADDED_MS, found.median, _range(found))


def _idle(measured: Measured, peer: str) -> Verdict:
    target = f"under {MOST_IDLE_KB:g} KB for each idle stream"
    found = measured.idle_kb(peer)
    return Verdict(peer, target, None if found is None else found < MOST_IDLE_KB, found)


def _range(found: Spread) -> str:
    return f"{found.least:.2f}..{found.most:.2f}"
