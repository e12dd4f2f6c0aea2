"""The only definitions of TTFT, TPOT, inter-chunk latency and E2E latency.

Client and server both fill a `RequestTimeline` and call these functions, so a number means the same
wherever it is printed. All instants are seconds on one monotonic clock of the process that stamped them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


class IncompleteTimelineError(ValueError):
    """A figure was asked of a request that has not reached the instant it needs."""


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """The instants of one request, in seconds; `None` until they happen.

    Attributes:
        scheduled_at_s: When the request was due. The client's plan, or arrival at the gateway.
        sent_at_s: When its first byte was written to the connection.
        chunk_at_s: Arrival of each chunk that carried text, in order. The first is the first token.
        finished_at_s: Arrival of the last byte.
        output_tokens: Completion tokens as the server's `usage` counts them, those of all choices together;
            never the number of chunks.
        chunk_choice: Which choice of the answer each chunk belongs to, beside `chunk_at_s`; empty: all to one.
    """

    scheduled_at_s: float
    sent_at_s: float | None = None
    chunk_at_s: tuple[float, ...] = ()
    finished_at_s: float | None = None
    output_tokens: int | None = None
    chunk_choice: tuple[int, ...] = ()

    @property
    def first_token_at_s(self) -> float | None:
        return self.chunk_at_s[0] if self.chunk_at_s else None

    @property
    def last_token_at_s(self) -> float | None:
        return self.chunk_at_s[-1] if self.chunk_at_s else None


def choices_of(choice_of_chunk: Sequence[int]) -> tuple[int, ...]:
    """The `chunk_choice` of a timeline: empty where all chunks are of one choice, as nearly always."""
    return tuple(choice_of_chunk) if len(set(choice_of_chunk)) > 1 else ()


def ttft_s(timeline: RequestTimeline) -> float:
    """Time to first token: scheduled instant to first chunk with text, queueing included, in seconds.

    Of several choices it is the first chunk of any.

    Raises:
        IncompleteTimelineError: no chunk with text has arrived.
    """
    if timeline.first_token_at_s is None:
        raise IncompleteTimelineError("ttft_s needs the first token's instant; no chunk has arrived")
    return timeline.first_token_at_s - timeline.scheduled_at_s


def ttfts_s(timelines: Iterable[RequestTimeline]) -> list[float]:
    """`ttft_s` of each answer that has text, in seconds: an empty one has no first token."""
    return [ttft_s(timeline) for timeline in timelines if timeline.chunk_at_s]


def e2e_latency_s(timeline: RequestTimeline) -> float:
    """Scheduled instant to last byte, in seconds.

    Raises:
        IncompleteTimelineError: the stream has not ended.
    """
    if timeline.finished_at_s is None:
        raise IncompleteTimelineError("e2e_latency_s needs finished_at_s; the stream has not ended")
    return timeline.finished_at_s - timeline.scheduled_at_s


def tpot_s(timeline: RequestTimeline) -> float | None:
    """Time per output token after the first, in seconds: (E2E - TTFT) / (output tokens - 1).

    Choices are decoded side by side, so the time of an answer with several is the sum of theirs, each from its
    first chunk to its last and from the last of all to the end: sum / (output tokens - choices with text).

    Returns:
        None for answers without a token after the first of each choice, and for those that ended without text.

    Raises:
        IncompleteTimelineError: the stream has not ended, or the server sent no usage.

    Source: the definition of inference-perf and of vLLM's benchmark; the first token is excluded.
    """
    if timeline.output_tokens is None:
        raise IncompleteTimelineError("tpot_s needs output_tokens from the server's usage; none arrived")
    num_choices = len(set(timeline.chunk_choice)) or 1
    is_empty = not timeline.chunk_at_s and timeline.finished_at_s is not None
    if is_empty or timeline.output_tokens <= num_choices:
        return None
    return _decode_s(timeline, num_choices) / (timeline.output_tokens - num_choices)


def _decode_s(timeline: RequestTimeline, num_choices: int) -> float:
    """How long each choice was written after its first chunk, all of them added up."""
    first_to_end_s = e2e_latency_s(timeline) - ttft_s(timeline)
    if num_choices == 1:
        return first_to_end_s
    first_at_s: dict[int, float] = {}
    last_at_s: dict[int, float] = {}
    for choice, at_s in zip(timeline.chunk_choice, timeline.chunk_at_s, strict=True):
        first_at_s.setdefault(choice, at_s)
        last_at_s[choice] = at_s
    first_to_last_s = timeline.chunk_at_s[-1] - timeline.chunk_at_s[0]
    written_s = sum(last_at_s[choice] - at_s for choice, at_s in first_at_s.items())
    return written_s + num_choices * (first_to_end_s - first_to_last_s)


def tpots_s(timelines: Iterable[RequestTimeline]) -> list[float]:
    """`tpot_s` of each answer that has one, in seconds.

    Raises:
        IncompleteTimelineError: as `tpot_s`.
    """
    return [tpot for timeline in timelines if (tpot := tpot_s(timeline)) is not None]


def inter_chunk_latencies_s(timeline: RequestTimeline) -> tuple[float, ...]:
    """Gaps between consecutive chunks with text of one choice, in seconds; shape (chunks - choices,).

    Those of several choices come in the order in which they end. A speculative chunk may hold several tokens,
    so these are not per-token times: see `tpot_s`.
    """
    if not timeline.chunk_choice:
        return tuple(b - a for a, b in pairwise(timeline.chunk_at_s))
    gaps_s: list[float] = []
    last_at_s: dict[int, float] = {}
    for choice, at_s in zip(timeline.chunk_choice, timeline.chunk_at_s, strict=True):
        if choice in last_at_s:
            gaps_s.append(at_s - last_at_s[choice])
        last_at_s[choice] = at_s
    return tuple(gaps_s)


def percentile(values: Sequence[float], q: float) -> float | None:
    """Percentile by linear interpolation between closest ranks (numpy's default); None when empty.

    Args:
        values: any order, any unit.
        q: in [0, 100].

    Raises:
        ValueError: q is out of range.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"percentile q={q} is outside 0..100")
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
