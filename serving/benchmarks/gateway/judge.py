"""The targets of our gateway, each met, missed or not judged, with the figure that decides. Pure.

A target about a level is missed if any request of ours failed there, whatever the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from serving.benchmarks.gateway.figures import Measured, Sample
from serving.benchmarks.gateway.names import DIRECT, ROUTER
from serving.benchmarks.verdict import Verdict, judged

LEAST_TOKENS_RATIO = {256: 1.0, 512: 1.1, 1000: 1.1}
MOST_TTFT_P50_RATIO = {128: 1.2, 256: 1.5, 512: 1.5}
MOST_TTFT_P99_RATIO = {128: 1.0, 256: 1.0, 512: 1.0}
MOST_CPU_RATIO = {256: 1.5, 512: 1.5, 1000: 1.5}
MOST_ADDED_MS = 1.5
MOST_IDLE_KB = 30.0


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
        verdict = judged(peer, target, found, **{"at_least" if at_least else "at_most": bound})
        for name, whose in ((peer, "of its own"), (ROUTER, f"of {ROUTER}'s")):
            if failures := measured.num_failures(name, streams):
                is_met = verdict.is_met and name != peer
                verdict = replace(verdict, is_met=is_met, note=f"{verdict.note}; {failures} {whose} failed")
        yield verdict


def _added(measured: Measured, peer: str) -> Verdict:
    target = f"at most {MOST_ADDED_MS:g} ms added to the time to first token at one stream"
    return judged(peer, target, measured.added_ms(peer, DIRECT), at_most=MOST_ADDED_MS)


def _idle(measured: Measured, peer: str) -> Verdict:
    target = f"under {MOST_IDLE_KB:g} KB for each idle stream"
    found = measured.idle_kb(peer)
    return Verdict(peer, target, None if found is None else found < MOST_IDLE_KB, found)
