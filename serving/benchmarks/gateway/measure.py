"""One measurement after another: who, at how many streams, in which order, and what each gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving.benchmarks.client import CONNECT_LIMIT_S, FIRST_LIMIT_S, hold, measure
from serving.benchmarks.gateway.figures import FirstTokens, Idle, Measured, Sample, percentile_ms
from serving.benchmarks.gateway.peers import START_LIMIT_S, Peer
from serving.benchmarks.gateway.requests import first_tokens, silent, speaking
from serving.benchmarks.lab import START_LIMIT_S as LAB_START_LIMIT_S
from serving.benchmarks.processes import memory_bytes, processor_s

SETTLE_S = (
    2.5  # after a measurement: longer than an answer, for gateways that do not notice that a client left
)
PROBE_WARM_UP_S = 0.5
PROBE_WINDOW_S = 4.0
HOLD_LIMIT_S = 60.0
HOLD_SETTLE_S = 2.0
OPEN_S = 2.0  # what opening the connections of a level takes, about, and the first tokens where all is well


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        repeats: of everything.
        warm_up_s, window_s: of each measurement.
        spread_s: over which streams begin; 0: all at once.
        idle_streams: that say nothing, for the memory of one; 0: not measured.
    """

    levels: Sequence[int]
    repeats: int
    warm_up_s: float
    window_s: float
    spread_s: float
    idle_streams: int

    def at_most_s(self, num_peers: int) -> float:
        """The longest it takes, in seconds: with the starts, and where first tokens are waited for in vain."""
        waited_s = (FIRST_LIMIT_S + CONNECT_LIMIT_S) * num_peers * self.repeats * (len(self.levels) + 1)
        starts_s = LAB_START_LIMIT_S + START_LIMIT_S * num_peers
        return self.lasts_s(num_peers) + waited_s + starts_s

    def lasts_s(self, num_peers: int) -> float:
        """About as long it takes without the starts, in seconds."""
        level_s = OPEN_S + self.spread_s + self.warm_up_s + self.window_s + SETTLE_S
        probe_s = PROBE_WARM_UP_S + PROBE_WINDOW_S + SETTLE_S
        idle_s = HOLD_LIMIT_S + 2 * HOLD_SETTLE_S if self.idle_streams else 0.0
        return num_peers * (self.repeats * (len(self.levels) * level_s + probe_s) + idle_s)


def rotated(peers: Sequence[Peer], by: int) -> list[Peer]:
    """The same peers, beginning with another one."""
    start = by % len(peers) if peers else 0
    return [*peers[start:], *peers[:start]]


def measure_all(plan: Plan, peers: Sequence[Peer], engines: Peer, say: Callable[[str], None]) -> Measured:
    """Everything of a plan. Memory first: what has been under load has memory to spare for idle streams.

    Args:
        engines: the lab with the engines that all but our second lab stream from.
    """
    idle = []
    for peer in peers if plan.idle_streams else ():
        if peer.root_pid is not None:
            say(f"memory of {plan.idle_streams:,} silent streams: {peer.name}")
            idle.append(_idle(peer, plan.idle_streams))
    samples, probes = [], []
    for repeat in range(1, plan.repeats + 1):
        for peer in rotated(peers, repeat - 1):
            say(f"repeat {repeat} of {plan.repeats}: single tokens: {peer.name}")
            probes.append(_first_tokens(peer, repeat))
        for number, streams in enumerate(plan.levels):
            for peer in rotated(peers, repeat - 1 + number):
                say(f"repeat {repeat} of {plan.repeats}: {streams:,} streams: {peer.name}")
                samples.append(_sample(peer, peers, engines, streams, repeat, plan))
    return Measured(samples, probes, idle)


def _sample(
    peer: Peer, peers: Sequence[Peer], engines: Peer, streams: int, repeat: int, plan: Plan
) -> Sample:
    own = peer.processes()
    # Of a lab of its own, else those that all share.
    behind = [one for one in own if one.part == "engine"] or [
        one for one in engines.processes() if one.part == "engine"
    ]
    groups = {
        "gateway": [one.pid for one in own if one.part == "gateway"],
        "rest": [one.pid for one in own if one.part == "rest"],
        "engine": [one.pid for one in behind],
    }
    used = {pid for pids in groups.values() for pid in pids}
    idle_peers = {one.name: one for one in [*peers, engines]}.values()
    groups["others"] = [
        one.pid
        for other in idle_peers
        if other is not peer
        for one in other.processes()
        if one.pid not in used
    ]
    edges: list[dict[str, float]] = []

    def at_edge() -> None:
        edges.append({part: processor_s(pids) for part, pids in groups.items()})

    counts = measure(speaking(peer.urls, streams, plan.warm_up_s, plan.window_s, plan.spread_s), at_edge)
    time.sleep(SETTLE_S)
    spent = {part: edges[1][part] - edges[0][part] for part in groups}
    return Sample(
        peer=peer.name,
        streams=streams,
        repeat=repeat,
        tokens=counts.tokens_per_s * counts.lasted_s,
        window_s=counts.lasted_s,
        ttft_p50_ms=percentile_ms(counts.ttft_s, 50),
        ttft_p99_ms=percentile_ms(counts.ttft_s, 99),
        gateway_cpu_s=spent["gateway"],
        rest_cpu_s=spent["rest"],
        engine_cpu_s=spent["engine"],
        others_cpu_s=spent["others"],
        failures=dict(counts.failures),
        starved=counts.starved,
        client_share=counts.client_share,
        client_lag_p99_ms=percentile_ms(counts.loop_lag_s, 99),
    )


def _first_tokens(peer: Peer, repeat: int) -> FirstTokens:
    counts = measure(first_tokens(peer.urls, PROBE_WARM_UP_S, PROBE_WINDOW_S))
    time.sleep(SETTLE_S)
    ttft_ms = percentile_ms(counts.ttft_s, 50)
    return FirstTokens(peer.name, repeat, len(counts.ttft_s), ttft_ms, dict(counts.failures))


def _idle(peer: Peer, streams: int) -> Idle:
    pids = [one.pid for one in peer.processes() if one.part == "gateway"]
    before = memory_bytes(pids)
    held, bytes_held = hold(
        silent(peer.urls, streams), HOLD_LIMIT_S, lambda: memory_bytes(pids), HOLD_SETTLE_S
    )
    time.sleep(HOLD_SETTLE_S)
    return Idle(peer.name, streams, held, before, bytes_held)
