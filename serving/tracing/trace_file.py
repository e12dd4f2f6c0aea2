"""`steps.jsonl`: a recorded trace as rows. One object a line, its shape named by the field `kind`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serving.core.errors import TandemError
from serving.tracing.events import RequestSpan, StepEvent, TraceHeader


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording: what it covers, requests by arrival, events by replica and step."""

    header: TraceHeader
    spans: list[RequestSpan]
    steps: list[StepEvent]


class TraceFileError(TandemError):
    """A file is no trace; the text names file and line."""


class _Kind(msgspec.Struct):
    kind: str


_KINDS: dict[str, type[TraceHeader | RequestSpan | StepEvent]] = {
    "header": TraceHeader,
    "span": RequestSpan,
    "step": StepEvent,
}


def write_trace(trace: Trace, path: Path) -> None:
    """Write the whole file, or leave the one that is there."""
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            for kind, rows in (("header", [trace.header]), ("span", trace.spans), ("step", trace.steps)):
                for row in rows:
                    # The tag stands first, so that a reader of the raw line sees it at once.
                    file.write(b'{"kind":"%b",%b\n' % (kind.encode(), msgspec.json.encode(row)[1:]))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_trace(path: Path) -> Trace:
    """Read a file that `write_trace` wrote.

    Raises:
        TraceFileError: it is not one, or is cut off.
    """
    headers: list[TraceHeader] = []
    spans: list[RequestSpan] = []
    steps: list[StepEvent] = []
    kind_of = msgspec.json.Decoder(_Kind).decode
    decoders = {kind: msgspec.json.Decoder(shape).decode for kind, shape in _KINDS.items()}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = decoders[kind_of(line).kind](line)
            except (msgspec.DecodeError, KeyError) as error:
                raise TraceFileError(f"{path}, line {number}: not a row of a trace: {error}") from None
            match row:
                case TraceHeader():
                    headers.append(row)
                case RequestSpan():
                    spans.append(row)
                case StepEvent():
                    steps.append(row)
    if len(headers) != 1:
        raise TraceFileError(f"{path}: {len(headers)} header rows; a trace has one")
    return Trace(headers[0], spans, steps)
