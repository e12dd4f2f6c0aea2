"""The result as one text: Markdown that reads in a terminal too. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from serving.benchmarks.gateway.figures import Measured, Sample, Spread
from serving.benchmarks.gateway.judge import Verdict
from serving.benchmarks.gateway.names import DIRECT, ROUTER
from serving.benchmarks.gateway.peers import NotStarted, Peer
from serving.benchmarks.processes import Seen

NONE = "-"
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
    rows = [_row(["gateway", *COLUMNS]), _row(["---", *["---:"] * len(COLUMNS)])]
    for peer in peers:
        if isinstance(peer, NotStarted):
            rows.append(_row([f"{peer.name}: not measured, {_plain(peer.reason)}", *[NONE] * len(COLUMNS)]))
            continue
        rows += [_row([peer.name, *_cells(measured, peer.name, streams)]) for streams in levels]
    return _aligned(rows)


def once_table(measured: Measured, peers: Sequence[Peer | NotStarted]) -> str:
    """What is measured once for each peer and not at each level."""
    rows = [_row(["gateway", "what", *ONCE]), _row(["---", "---", *["---:"] * len(ONCE)])]
    for peer in peers:
        if isinstance(peer, NotStarted):
            continue
        added = NONE if peer.name == DIRECT else _spread(measured.added_ms(peer.name, DIRECT), ".2f")
        idle = measured.idle_kb(peer.name)
        memory = NONE if idle is None else f"{idle:.1f}"
        if idle is None and (failed := [one for one in measured.idle if one.peer == peer.name]):
            memory = f"{failed[0].held} of {failed[0].wanted} opened"
        rows.append(_row([peer.name, peer.version, added, memory]))
    return _aligned(rows)


def processes_table(seen: Sequence[Seen]) -> str:
    """What decides who gets the processors: niceness and scheduling group of every process."""
    rows = [_row(["of", "part", "process", "pid", "niceness", "group"]), _row(["---"] * 6)]
    for one in seen:
        group = one.group or "none"
        rows.append(_row([one.peer, one.part, _plain(one.title), str(one.pid), str(one.niceness), group]))
    return _aligned(rows)


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
    if found is None:
        return NONE
    if found.least == found.most:
        return f"{found.median:{form}}"
    return f"{found.median:{form}} ({found.least:{form}}..{found.most:{form}})"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:300]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _aligned(rows: Sequence[str]) -> str:
    """The same table with its columns in line; a first cell that is a sentence does not widen its column."""
    cut = [row.strip("| ").split(" | ") for row in rows]
    widths = [
        max((len(cells[n]) for cells in cut if len(cells[n]) <= 60), default=0) for n in range(len(cut[0]))
    ]
    lines = []
    for cells in cut:
        if set(cells[0]) == {"-"}:
            cells = [
                "-" * (width - 1) + ":" if cell.endswith(":") else "-" * width
                for cell, width in zip(cells, widths, strict=True)
            ]
        lines.append(_row([cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]))
    return "\n".join(lines)
