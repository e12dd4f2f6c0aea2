"""What a load client reported, held against what the server stamped as it sent.

Both processes read CLOCK_MONOTONIC of one machine, so instants can be compared as they are. The server stamps
each write before and after: a server that is preempted in between sends at an unknown moment of that interval.
The truth is therefore an interval, and a report is wrong by its distance from it. No report is left out, and
no percentile is taken: one wrong gap is one fault.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from loadtest.client.record import RequestRecord
from serving.core import latency
from serving.engines.base import SentStream, SentWrite

TOLERANCE_S = 0.002
TOLERANCE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Span:
    """A time in seconds that is known to lie between two bounds."""

    low_s: float
    high_s: float

    @property
    def tolerance_s(self) -> float:
        """2 ms or 2 percent, the larger."""
        return max(TOLERANCE_S, TOLERANCE_SHARE * self.low_s)

    def error_s(self, reported_s: float) -> float:
        """How far outside the bounds; 0 inside."""
        return max(self.low_s - reported_s, reported_s - self.high_s, 0.0)


def instant(write: SentWrite) -> Span:
    """When the bytes of a write left, on CLOCK_MONOTONIC."""
    return Span(write.sent_monotonic_ns / 1e9, write.written_monotonic_ns / 1e9)


def since(start_s: float, write: SentWrite) -> Span:
    return Span(instant(write).low_s - start_s, instant(write).high_s - start_s)


def between(earlier: SentWrite, later: SentWrite) -> Span:
    return Span(
        instant(later).low_s - instant(earlier).high_s, instant(later).high_s - instant(earlier).low_s
    )


def pairs_of_choices(stream: SentStream) -> list[tuple[SentWrite, SentWrite]]:
    """Writes of one choice that follow each other, of all choices, in the order of the later ones."""
    return sorted(
        (
            pair
            for choice in {chunk.choice for chunk in stream.chunks}
            for pair in pairwise(chunk for chunk in stream.chunks if chunk.choice == choice)
        ),
        key=lambda pair: pair[1].sent_monotonic_ns,
    )


def decoding(stream: SentStream) -> Span:
    """From the first write of a choice to its last, and from the last of all to the end: all choices added up."""
    assert stream.done is not None
    firsts = {chunk.choice: chunk for chunk in reversed(stream.chunks)}
    lasts = {chunk.choice: chunk for chunk in stream.chunks}
    end = between(stream.chunks[-1], stream.done)
    written = [between(firsts[choice], lasts[choice]) for choice in firsts]
    return Span(
        sum(one.low_s + end.low_s for one in written), sum(one.high_s + end.high_s for one in written)
    )


def faults(records: Collection[RequestRecord], sent: Mapping[str, SentStream]) -> list[str]:
    """Everything that is not as it was sent, a line each. No records at all are a fault too."""
    if not records:
        return ["no records"]
    found: list[str] = []
    for record in records:
        name = record.label.request_id
        stream = sent.get(name)
        lines = _faults(record, stream) if stream else ["the server knows nothing of it"]
        found += [f"{name}: {line}" for line in lines]
    return found


def was_starved(record: RequestRecord) -> bool:
    """Whether the record itself tells that the client came too late to read.

    It says how long data lay unread, or chunks share an instant: then one receive brought both.
    """
    lag_s = record.read_lag_s or 0
    return lag_s > TOLERANCE_S or 0 in latency.inter_chunk_latencies_s(record.timeline)


def _faults(record: RequestRecord, stream: SentStream) -> list[str]:
    if not record.is_completed or stream.done is None:
        return [f"{record.outcome}: {record.error}; the server's end was {'' if stream.done else 'not '}sent"]
    tokens = [chunk.tokens for chunk in stream.chunks]
    counts = [
        ("output tokens", record.output_tokens, sum(tokens)),
        ("tokens by chunk", list(record.chunk_tokens or ()), tokens),
        ("prompt tokens", record.prompt_tokens, stream.prompt_tokens),
        ("chunks", len(record.chunk_at_s), len(tokens)),
        (
            "choice by chunk",
            list(record.chunk_choice) or [0] * len(tokens),
            [c.choice for c in stream.chunks],
        ),
    ]
    if wrong := [f"{what}: reported {got}, sent {true}" for what, got, true in counts if got != true]:
        return wrong  # times of chunks that do not pair up say nothing
    timeline = record.timeline
    tokens_after_first = sum(tokens) - len({chunk.choice for chunk in stream.chunks})
    tpot_s = latency.tpot_s(timeline) or 0.0
    gaps = zip(latency.inter_chunk_latencies_s(timeline), pairs_of_choices(stream), strict=True)
    times = [
        ("TTFT", latency.ttft_s(timeline), since(record.scheduled_at_s, stream.chunks[0])),
        ("decoding", tpot_s * tokens_after_first, decoding(stream)),
        ("E2E", latency.e2e_latency_s(timeline), since(record.scheduled_at_s, stream.done)),
        *((f"gap {number}", got, between(*pair)) for number, (got, pair) in enumerate(gaps, start=1)),
    ]
    return [
        f"{what}: reported {got * 1000:.2f} ms, sent {true.low_s * 1000:.2f} to {true.high_s * 1000:.2f} ms "
        f"(read lag up to {(record.read_lag_s or 0) * 1000:.2f} ms, stamped by {record.stamped_by})"
        for what, got, true in times
        if true.error_s(got) > true.tolerance_s
    ]
