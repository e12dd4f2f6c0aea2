"""One row per request: what was asked, every instant, and how it ended. The raw data of each figure."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from serving.core.latency import RequestTimeline
from serving.core.request import Outcome

StampedBy = Literal["kernel", "process"]

MAX_INSTANT_S = 1e9  # of a run; beyond, floats tell instants apart no better than to 0.1 us
Instant = Annotated[float, Field(ge=0, le=MAX_INSTANT_S, allow_inf_nan=False)]  # where it is read

MAX_FAULTS = 3  # named of one line or file


class ClientReason(StrEnum):
    """Why a request did not complete, where the server gave no `x-tandem-reason` of its own."""

    CONNECT = "connect_failed"
    CONNECT_TIMEOUT = "connect_timeout"
    IDLE_TIMEOUT = "idle_timeout"
    REQUEST_TIMEOUT = "request_timeout"  # the whole answer took longer than the load tool was told to wait
    CUT_OFF = "cut_off"  # the stream ended before [DONE], and was not whole without it
    ERROR_EVENT = "error_event"  # the server reported an error inside the stream
    BAD_STREAM = "bad_stream"  # not HTTP, or not server-sent events
    NO_USAGE = "no_usage"  # ended well, but without the token counts that were asked for
    NO_TEXT = "no_text"  # ended without any text, and without saying that the answer is empty
    STAGE_TIME_UP = "stage_time_up"  # cancelled by the load tool: the stage reached its time box
    STAGE_HOPELESS = "stage_hopeless"  # cancelled by the load tool: the stage was decided before its end
    STAGE_DONE = "stage_done"  # withdrawn by the load tool before its answer began: the stage had what counts
    INTERRUPTED = "interrupted"  # cancelled by the load tool: the user stopped the run


@dataclass(frozen=True, slots=True)
class RequestLabel:
    """Where a request belongs: its stage, and its place in it.

    Attributes:
        stage: key of the stage, as `StagePlan.key` gives it.
        number: number of its prompt in the workload's order.
        is_warmup: sent before what counts: to a lane that was cold or idle, in the warm-up of an open loop, or
            while the users of a closed loop were coming.
        is_tail: sent after what counts, so that a closed loop stayed as it was until the last request ended.
    """

    request_id: str
    lane: str
    workload: str
    stage: str
    number: int
    is_warmup: bool = False
    is_tail: bool = False

    @property
    def counts(self) -> bool:
        """It is in the figures; the others only keep the load as it is."""
        return not (self.is_warmup or self.is_tail)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request. Instants are seconds since the start of the run, on one monotonic clock.

    Attributes:
        scheduled_at_s: when the request was due; in a closed loop, when its user was free and had it ready.
        dispatched_at_s: when the load tool began on it, before it had a connection.
        sent_at_s: when its first byte was handed to an open connection.
        first_byte_at_s: when the status line and headers were there.
        chunk_at_s: arrival of each chunk with text; an answer may complete without any.
        chunk_choice: which choice of the answer each of them belongs to; empty where there is one only.
        chunk_tokens: output tokens that each of them brought, where the server counts as it goes; else None.
        finished_at_s: arrival of the closing [DONE], or of the body's end where there is none; for a request that
            did not complete, its end.
        reason: None when completed; else the server's reason, a `ClientReason`, or `http_<status>`.
        error: the error in words, None when completed.
        output_tokens: the server's usage, of all choices together, never a count of chunks.
        asked_output_tokens: the exact length asked for; None where the model may stop by itself.
        num_reconnects: stale keep-alive connections replaced before this request got through.
        retry_after_s: what a refusal asked for. The load tool never retries; it only notes it.
        stamped_by: who stamped arrivals: the kernel as a packet came in, or this process when it got to read it.
        read_lag_s: the longest time that data lay in the kernel before this process read it; None when not known.
    """

    label: RequestLabel
    outcome: Outcome
    scheduled_at_s: Instant
    finished_at_s: Instant
    dispatched_at_s: Instant | None = None
    sent_at_s: Instant | None = None
    first_byte_at_s: Instant | None = None
    chunk_at_s: tuple[Instant, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    status: int | None = None
    reason: str | None = None
    error: str | None = None
    served_by_lane: str | None = None
    served_by_replica: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    asked_output_tokens: int | None = None
    num_reconnects: int = 0
    retry_after_s: float | None = None
    stamped_by: StampedBy = "process"
    read_lag_s: float | None = None
    text: str = ""
    chunk_choice: tuple[int, ...] = ()

    @property
    def timeline(self) -> RequestTimeline:
        """The instants in the form that `serving.core.latency` reads."""
        return RequestTimeline(
            scheduled_at_s=self.scheduled_at_s,
            sent_at_s=self.sent_at_s,
            chunk_at_s=self.chunk_at_s,
            finished_at_s=self.finished_at_s,
            output_tokens=self.output_tokens,
            chunk_choice=self.chunk_choice,
        )

    @property
    def is_completed(self) -> bool:
        return self.outcome is Outcome.COMPLETED


_ADAPTER = TypeAdapter(RequestRecord)


def to_row(record: RequestRecord) -> str:
    """One line of JSON. First and last token are repeated by name for readers of the file."""
    row = _ADAPTER.dump_python(record, mode="json")
    if not record.chunk_choice:
        del row["chunk_choice"]  # nearly every answer has one choice
    row["first_token_at_s"] = record.timeline.first_token_at_s
    row["last_token_at_s"] = record.timeline.last_token_at_s
    return json.dumps(row, ensure_ascii=False)


def from_row(row: str) -> RequestRecord:
    """The record of one line.

    Raises:
        ValueError: the line is not a record; the text says which field is wrong.
    """
    try:
        return _ADAPTER.validate_json(row)
    except ValidationError as error:
        raise ValueError(faults_in_words(error)) from None


def faults_in_words(error: ValidationError) -> str:
    """What is wrong with a file of a run, on one line: each fault with its field, a number with it, the first of
    many."""
    faults = []
    for fault in error.errors():
        is_number = isinstance(fault["input"], int | float)
        words = fault["msg"] + (f", not {fault['input']!r:.40}" if is_number else "")
        faults.append(": ".join(filter(None, (".".join(map(str, fault["loc"])), words))))
    more = f"; and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
    return "; ".join(faults[:MAX_FAULTS]) + more


def fault_of(record: RequestRecord) -> str | None:
    """What cannot be of a record whose fields are each as they should be, in words; None where nothing is."""
    num_chunks = len(record.chunk_at_s)
    if record.chunk_tokens is not None and len(record.chunk_tokens) != num_chunks:
        return f"chunk_tokens has {len(record.chunk_tokens)} entries, chunk_at_s {num_chunks}"
    if record.chunk_choice and len(record.chunk_choice) != num_chunks:
        return f"chunk_choice has {len(record.chunk_choice)} entries, chunk_at_s {num_chunks}"
    first_s = record.chunk_at_s[0] if num_chunks else record.finished_at_s
    if record.is_completed and first_s < record.scheduled_at_s:
        name = "the first of chunk_at_s" if num_chunks else "finished_at_s"
        return f"{name} is {first_s:g}, before scheduled_at_s, {record.scheduled_at_s:g}"
    stamps = [
        at_s for at_s in (record.sent_at_s, *record.chunk_at_s, record.finished_at_s) if at_s is not None
    ]
    if stamps != sorted(stamps):
        before_s, after_s = next(pair for pair in pairwise(stamps) if pair[1] < pair[0])
        return f"sent_at_s, chunk_at_s and finished_at_s are out of order: {after_s:g} follows {before_s:g}"
    return None


def read_records(path: Path) -> Iterator[RequestRecord]:
    """Every record of a `requests.jsonl`, in the order they ended.

    Raises:
        ValueError: with file and line number, when a line is not a record.
    """
    return (record for _, record in read_rows(path))


def read_rows(path: Path) -> Iterator[tuple[bytes, RequestRecord]]:
    """The same, each with its line.

    Raises:
        ValueError: with file and line number, when a line is not a record.
    """
    with closing(_lines(path)) as lines:
        for number, line in lines:
            if not line.endswith(b"\n"):
                return  # see torn_line; its stage has no end either
            try:
                record = from_row(line[:-1].decode("utf-8"))
                fault = fault_of(record)
            except ValueError as error:
                fault = str(error)
            if fault is not None:
                raise ValueError(f"{path}:{number}: not a request record: {fault}")
            yield line, record


def torn_line(path: Path) -> str | None:
    """What there is to say of a last line without an end, which is left out; None where all are whole.

    Raises:
        ValueError: the file cannot be read.
    """
    with closing(_lines(path)) as lines:
        for number, line in lines:
            if not line.endswith(b"\n"):
                return (
                    f"{path}:{number}: the last line is cut off, {len(line)} bytes are left out: "
                    "the run was killed while it wrote, or still writes"
                )
    return None


def _lines(path: Path) -> Generator[tuple[int, bytes]]:
    try:
        with path.open("rb") as lines:
            yield from enumerate(lines, start=1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
