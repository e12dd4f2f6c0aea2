"""The figures that are compared, made of what was sent and of what our client recorded; when two are as close."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

from loadtest.client.record import RequestRecord
from serving.core import latency

NS_PER_MS = 1e6
TOLERANCE_SHARE = 0.02
TTFT_TOLERANCE_MS = 2.0
# Errors that differ by less are a tie: two runs of one tool differ by as much.
TIE_SHARE = 0.005
TTFT_TIE_MS = 2.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, as sent or as a tool reports it. None where a tool has no figure of that meaning.

    Attributes:
        tpot_mean_ms: mean over requests of (last token - first token) / (tokens - 1).
        gap_mean_ms, gap_p95_ms: of the gaps between chunks with text, of all requests together.
        output_tokens_per_s, requests_per_s: over the time from the first request to the last answer's end.
    """

    requests: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_mean_ms: float | None
    gap_mean_ms: float | None
    gap_p95_ms: float | None
    output_tokens_per_s: float | None
    requests_per_s: float | None


QUANTITIES = tuple(field.name for field in fields(Figures) if field.name != "requests")


def tolerance(quantity: str, true: float) -> float:
    """How far from the truth a figure may be: 2 percent; for TTFT at least 2 ms."""
    share = TOLERANCE_SHARE * true
    return max(TTFT_TOLERANCE_MS, share) if quantity.startswith("ttft") else share


def tie(quantity: str, true: float, resolution_ms: float = 0.0) -> float:
    """How far apart two errors may be and count as equal.

    2 ms for TTFT: a request takes a millisecond or two from due to received, which is real and no part of what the
    engine can stamp. A percentile of instants is known no better than the instants are.

    Args:
        resolution_ms: of the truth, as `resolution_ms` gives it.
    """
    apart = TTFT_TIE_MS if quantity.startswith("ttft") else TIE_SHARE * true
    return max(apart, resolution_ms) if quantity.endswith(("_p50_ms", "_p95_ms")) else apart


def from_sent(streams: Sequence[Mapping[str, Any]]) -> Figures:
    """The truth: the streams of a simulated engine's `GET /tandem/engine/sent`.

    TTFT counts from the instant the whole request was there, since the server cannot know when it was due.

    Raises:
        ValueError: there are none, or some were not sent to their end.
    """
    if not streams or not all(stream["done"] for stream in streams):
        raise ValueError(f"{len(streams)} streams were sent, not all of them to their end")
    ttft_ms, tpot_ms, gaps_ms, tokens = [], [], [], 0
    for stream in streams:
        by_choice: dict[int, list[int]] = defaultdict(list)
        for chunk in stream["chunks"]:
            by_choice[chunk["choice"]].append(chunk["sent_monotonic_ns"])
        count = sum(chunk["tokens"] for chunk in stream["chunks"])
        tokens += count
        ttft_ms.append(
            (stream["chunks"][0]["sent_monotonic_ns"] - stream["received_monotonic_ns"]) / NS_PER_MS
        )
        written_ns = sum(at_ns[-1] - at_ns[0] for at_ns in by_choice.values())
        tpot_ms.append(written_ns / NS_PER_MS / (count - len(by_choice)))
        gaps_ms += [(b - a) / NS_PER_MS for at_ns in by_choice.values() for a, b in pairwise(at_ns)]
    return _figures(ttft_ms, tpot_ms, gaps_ms, tokens, lasted_s(streams))


def lasted_s(streams: Sequence[Mapping[str, Any]]) -> float:
    """From the first request to the last answer's end."""
    begun_ns: int = min(stream["received_monotonic_ns"] for stream in streams)
    ended_ns: int = max(stream["done"]["sent_monotonic_ns"] for stream in streams)
    return (ended_ns - begun_ns) / 1e9


def most_at_once(streams: Sequence[Mapping[str, Any]]) -> int:
    """The most streams that were open at one instant."""
    begun = [(stream["received_monotonic_ns"], 1) for stream in streams]
    ended = [(stream["done"]["sent_monotonic_ns"], -1) for stream in streams]
    return max(accumulate(change for _, change in sorted(begun + ended)))


def resolution_ms(streams: Sequence[Mapping[str, Any]]) -> float:
    """How well the truth is known: p95 of what a write took, for its bytes left at some instant of that time."""
    took_ms = [
        (chunk["written_monotonic_ns"] - chunk["sent_monotonic_ns"]) / NS_PER_MS
        for stream in streams
        for chunk in stream["chunks"]
    ]
    return latency.percentile(took_ms, 95) or 0.0


def arrivals_per_s(streams: Sequence[Mapping[str, Any]]) -> float:
    """The rate that a tool really offered: requests after the first / time from the first to the last."""
    received_ns: list[int] = [stream["received_monotonic_ns"] for stream in streams]
    return (len(streams) - 1) / ((max(received_ns) - min(received_ns)) / 1e9)


def from_records(records: Sequence[RequestRecord]) -> Figures:
    """What our client reports, by the definitions of `serving.core.latency`.

    Raises:
        ValueError: there are none, or some requests did not complete.
    """
    if not records or not all(record.is_completed for record in records):
        faults = [record.error for record in records if not record.is_completed]
        raise ValueError(f"{len(faults)} of {len(records)} requests did not complete: {faults[:1]}")
    timelines = [record.timeline for record in records]
    gaps_s = [gap for timeline in timelines for gap in latency.inter_chunk_latencies_s(timeline)]
    begun_s = min(record.scheduled_at_s for record in records)
    return _figures(
        [latency.ttft_s(timeline) * 1000 for timeline in timelines],
        [tpot_s * 1000 for tpot_s in latency.tpots_s(timelines)],
        [gap * 1000 for gap in gaps_s],
        sum(record.output_tokens or 0 for record in records),
        max(record.finished_at_s for record in records) - begun_s,
    )


def _figures(
    ttft_ms: list[float], tpot_ms: list[float], gaps_ms: list[float], tokens: int, lasted_s: float
) -> Figures:
    return Figures(
        requests=len(ttft_ms),
        ttft_p50_ms=latency.percentile(ttft_ms, 50),
        ttft_p95_ms=latency.percentile(ttft_ms, 95),
        tpot_mean_ms=sum(tpot_ms) / len(tpot_ms),
        gap_mean_ms=sum(gaps_ms) / len(gaps_ms),
        gap_p95_ms=latency.percentile(gaps_ms, 95),
        output_tokens_per_s=tokens / lasted_s,
        requests_per_s=len(ttft_ms) / lasted_s,
    )
