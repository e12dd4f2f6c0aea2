"""The result as one text: Markdown that reads in a terminal too. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serving.benchmarks.gateway.figures import Measured, Sample
from serving.benchmarks.gateway.names import DIRECT, ROUTER
from serving.benchmarks.gateway.peers import NotStarted, Peer
from serving.benchmarks.processes import Seen
from serving.benchmarks.spread import Spread
from serving.benchmarks.text_table import NONE, text_table
from serving.benchmarks.verdict import Verdict

COLUMNS = (
    "streams", "tokens/s", f"x {ROUTER}'s", "TTFT p50, ms", "TTFT p99, ms", "CPU s/1,000 tokens",
    "tokens/s per core", "failed", "client",
)  # fmt: skip
ONCE = ("added TTFT at one stream, ms", "KB per idle stream")
# The client is saturated beyond either: what it says is then of the client too.
MAX_CLIENT_SHARE = 0.85
MAX_CLIENT_LAG_MS = 20.0


def levels_table(measured: Measured, peers: Sequence[Peer | NotStarted], levels: Sequence[int]) -> str:
    """A row for each peer and level: median over the repeats, and the range of it."""
    rows = []
    for peer in peers:
        if isinstance(peer, NotStarted):
            rows.append([f"{peer.name}: not measured, {peer.reason}", *[NONE] * len(COLUMNS)])
        else:
            rows += [[peer.name, *_cells(measured, peer.name, streams)] for streams in levels]
    return text_table(["gateway"], COLUMNS, rows)


def once_table(measured: Measured, peers: Sequence[Peer | NotStarted]) -> str:
    """What is measured once for each peer and not at each level."""
    rows = []
    for peer in peers:
        if isinstance(peer, NotStarted):
            continue
        added = NONE if peer.name == DIRECT else _spread(measured.added_ms(peer.name, DIRECT), ".2f")
        idle = measured.idle_kb(peer.name)
        memory = NONE if idle is None else f"{idle:.1f}"
        if idle is None and (failed := [one for one in measured.idle if one.peer == peer.name]):
            memory = f"{failed[0].held} of {failed[0].wanted} opened"
        rows.append([peer.name, peer.version, added, memory])
    return text_table(["gateway", "what"], ONCE, rows)


def processes_table(seen: Sequence[Seen]) -> str:
    """What decides who gets the processors: niceness and scheduling group of every process."""
    names = ("of", "part", "process", "pid", "niceness", "group")
    return text_table(
        names,
        (),
        [
            (one.peer, one.part, one.title, str(one.pid), str(one.niceness), one.group or "none")
            for one in seen
        ],
    )


def equality(seen: Sequence[Seen]) -> str:
    """Whether all processes compete as equals."""
    nices, groups = sorted({one.niceness for one in seen}), sorted({one.group for one in seen})
    if len(nices) == 1 and len(groups) <= 1:
        return f"All {len(seen)} processes have niceness {nices[0]} and one scheduling group."
    return (
        f"NOT EQUAL: nicenesses {', '.join(map(str, nices))}; "
        f"{len(groups)} scheduling groups: {', '.join(group or 'none' for group in groups)}."
    )


def failures_list(measured: Measured) -> str:
    """What failed, where anything did."""
    lines = []
    for one in measured.samples:
        kinds = [f"{number} x {kind}" for kind, number in one.failures.items()]
        kinds += [f"{one.starved} streams without a token in the window"] if one.starved else []
        if kinds:
            lines.append(f"- {one.peer}, {one.streams:,} streams, repeat {one.repeat}: {'; '.join(kinds)}")
    for probe in measured.first_tokens:
        if kinds := [f"{number} x {kind}" for kind, number in probe.failures.items()]:
            lines.append(f"- {probe.peer}, single tokens, repeat {probe.repeat}: {'; '.join(kinds)}")
    return "\n".join(lines) or "None."


def verdict_lines(verdicts: Sequence[Verdict]) -> str:
    """One line for each target."""
    return "\n".join(f"- {verdict}" for verdict in verdicts)


def is_client_saturated(sample: Sample) -> bool:
    """Whether the client was too busy to be believed."""
    lag_ms = sample.client_lag_p99_ms
    return sample.client_share > MAX_CLIENT_SHARE or (lag_ms is not None and lag_ms > MAX_CLIENT_LAG_MS)


def _cells(measured: Measured, peer: str, streams: int) -> list[str]:
    samples = measured.at(peer, streams)
    failures = measured.num_failures(peer, streams)
    client = NONE
    if samples:
        worst = max(samples, key=lambda one: one.client_lag_p99_ms or 0.0)
        lag = NONE if worst.client_lag_p99_ms is None else f"{worst.client_lag_p99_ms:.0f}"
        share = max(one.client_share for one in samples)
        mark = " SATURATED" if any(map(is_client_saturated, samples)) else ""
        client = f"{share:.0%}, lag {lag} ms{mark}"
    return [
        f"{streams:,}",
        _spread(measured.spread(peer, streams, lambda one: one.tokens_per_s), ",.0f"),
        _spread(measured.ratio(peer, ROUTER, streams, lambda one: one.tokens_per_s), ".2f"),
        _spread(measured.spread(peer, streams, lambda one: one.ttft_p50_ms), ",.1f"),
        _spread(measured.spread(peer, streams, lambda one: one.ttft_p99_ms), ",.1f"),
        NONE
        if peer == DIRECT
        else _spread(measured.spread(peer, streams, lambda one: one.cpu_s_per_1000_tokens), ".3f"),
        NONE
        if peer == DIRECT
        else _spread(measured.spread(peer, streams, lambda one: one.tokens_per_core_s), ",.0f"),
        f"{failures} FAILED" if failures else "0",
        client,
    ]


def _spread(found: Spread | None, form: str) -> str:
    return NONE if found is None else found.text(form)
