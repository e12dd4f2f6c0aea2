"""What was measured, and the figures made of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from serving.benchmarks.spread import Spread, differences, quotients, spread
from serving.core.latency import percentile

MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One peer at one level in one repeat. Times in ms, except where the name says seconds.

    Attributes:
        tokens: of the window.
        gateway_cpu_s, rest_cpu_s: processor time within the window of the gateway's processes, and of those of the
            peer that no request passes through (Ray's own).
        engine_cpu_s: of the engines that it streams from.
        others_cpu_s: of all peers that were not measured then.
        failures: requests that failed or came incomplete, by kind, warm-up included.
        starved: streams without a token in the window.
        client_share: processor time of the client / time.
        client_lag_p99_ms: how late the client's event loop was.
    """

    peer: str
    streams: int
    repeat: int
    tokens: float
    window_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    gateway_cpu_s: float
    rest_cpu_s: float
    engine_cpu_s: float
    others_cpu_s: float
    failures: Mapping[str, int]
    starved: int
    client_share: float
    client_lag_p99_ms: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.window_s

    @property
    def num_failures(self) -> int:
        return sum(self.failures.values()) + self.starved

    @property
    def cpu_s_per_1000_tokens(self) -> float | None:
        """Processor seconds of the gateway."""
        return 1000 * self.gateway_cpu_s / self.tokens if self.tokens else None

    @property
    def tokens_per_core_s(self) -> float | None:
        """Tokens per second of processor time of the gateway."""
        return self.tokens / self.gateway_cpu_s if self.gateway_cpu_s else None


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Time to first token of one stream that asks for single tokens, one after another."""

    peer: str
    repeat: int
    requests: int
    ttft_p50_ms: float | None
    failures: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Idle:
    """The memory (PSS, bytes) of a gateway's processes without streams, and with so many that say nothing."""

    peer: str
    wanted: int
    held: int
    before_bytes: int
    held_bytes: int

    @property
    def kb_per_stream(self) -> float | None:
        """1 KB is 1,000 bytes; None where not all streams could be opened."""
        is_whole = self.held == self.wanted and self.held
        return (self.held_bytes - self.before_bytes) / self.held / 1000 if is_whole else None


@dataclass(frozen=True)
class Measured:
    """All that a run measured."""

    samples: Sequence[Sample]
    first_tokens: Sequence[FirstTokens]
    idle: Sequence[Idle]

    def at(self, peer: str, streams: int) -> list[Sample]:
        """The repeats of a peer at a level."""
        return [one for one in self.samples if (one.peer, one.streams) == (peer, streams)]

    def spread(self, peer: str, streams: int, of: Callable[[Sample], float | None]) -> Spread | None:
        """A figure over the repeats."""
        return spread([of(sample) for sample in self.at(peer, streams)])

    def ratio(self, peer: str, to: str, streams: int, of: Callable[[Sample], float | None]) -> Spread | None:
        """A figure / that of another peer in the same repeat, over the repeats that both have."""
        other = {sample.repeat: of(sample) for sample in self.at(to, streams)}
        samples = self.at(peer, streams)
        return spread(quotients(list(map(of, samples)), [other.get(one.repeat) for one in samples]))

    def added_ms(self, peer: str, to: str) -> Spread | None:
        """Time to first token at one stream beyond that of another peer in the same repeat."""
        other = {one.repeat: one.ttft_p50_ms for one in self.first_tokens if one.peer == to}
        own = [one for one in self.first_tokens if one.peer == peer]
        return spread(differences([one.ttft_p50_ms for one in own], [other.get(one.repeat) for one in own]))

    def num_failures(self, peer: str, streams: int) -> int:
        """Of all repeats."""
        return sum(sample.num_failures for sample in self.at(peer, streams))

    def idle_kb(self, peer: str) -> float | None:
        """Memory per silent stream, KB."""
        return next((one.kb_per_stream for one in self.idle if one.peer == peer), None)


def percentile_ms(values_s: Sequence[float], percent: float) -> float | None:
    """In milliseconds, of seconds; None of nothing."""
    found = percentile(values_s, percent)
    return None if found is None else MS_PER_S * found
