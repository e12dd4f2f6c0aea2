"""Reads a recorded trace: when requests came, and how long prompt and answer were.

Two column layouts are known, as CSV with a header or as JSONL with the same names; other columns are ignored:

    Azure LLM inference trace   TIMESTAMP (a date with time), ContextTokens, GeneratedTokens
    BurstGPT                    Timestamp (seconds), Request tokens, Response tokens
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from loadtest.offer.user_files import Rows, bounded, json_rows, open_text

MAX_TOKENS = 10_000_000  # of one prompt or answer; more is a column read wrongly

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `at_s` counts from the first."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The requests of a trace, in order of time.

    Attributes:
        num_left_out: rows with an empty prompt or answer. In BurstGPT those are requests that failed.
    """

    rows: tuple[TraceRow, ...]
    num_left_out: int


@dataclass(frozen=True, slots=True)
class _Layout:
    name: str
    timestamp: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.timestamp, self.prompt, self.output


def _date_s(value: Any) -> float:
    """Seconds since 1970 of an ISO 8601 date; one without a time zone is UTC. Digits after the sixth are cut."""
    if not isinstance(value, str):
        raise ValueError("is not a date")
    try:
        moment = datetime.fromisoformat(value.strip())
    except ValueError:
        raise ValueError("is not a date such as 2023-11-16 18:15:46.6805900") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number_s(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not math.isfinite(seconds):
        raise ValueError("is not a number of seconds")
    return seconds


_LAYOUTS = (
    _Layout("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date_s),
    _Layout("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _number_s),
)


def read_recorded_trace(path: Path) -> RecordedTrace:
    """Read a trace; `.jsonl` and `.ndjson` as JSON lines, anything else as CSV.

    Raises:
        ValueError: with file, line, column and value; or the file is too large, or holds no requests.
    """
    is_json = path.suffix in (".jsonl", ".ndjson")
    rows = []
    num_left_out = 0
    layout = None
    with closing(json_rows(path) if is_json else _csv_rows(path)) as numbered_rows:
        for line, row in numbered_rows:
            layout = layout or _layout(path, line, row)
            read = _read_row(layout, row, f"{path}, line {line}")
            if read.prompt_tokens and read.output_tokens:
                rows.append(read)
            else:
                num_left_out += 1
    if not rows:
        raise ValueError(f"{path}: no requests in it ({num_left_out} rows with an empty prompt or answer)")
    rows.sort(key=lambda row: row.at_s)
    first_s = rows[0].at_s
    return RecordedTrace(
        tuple(TraceRow(row.at_s - first_s, row.prompt_tokens, row.output_tokens) for row in rows),
        num_left_out,
    )


def _csv_rows(path: Path) -> Rows:
    with open_text(path) as file:
        reader = csv.DictReader((text for _, text in bounded(path, file)), strict=True)
        try:
            for row in reader:
                if any(isinstance(value, str) and value.strip() for value in row.values()):
                    yield reader.line_num, row
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _layout(path: Path, line: int, row: Mapping[str, Any]) -> _Layout:
    for layout in _LAYOUTS:
        if all(column in row for column in layout.columns):
            return layout
    known = " or ".join(f"{', '.join(layout.columns)} ({layout.name})" for layout in _LAYOUTS)
    columns = ", ".join(str(name) for name in row)
    raise ValueError(f"{path}, line {line}: columns {columns:.200} are neither {known}")


def _read_row(layout: _Layout, row: Mapping[str, Any], where: str) -> TraceRow:
    def read(column: str, convert: Callable[[Any], Number]) -> Number:
        value = row.get(column)
        try:
            return convert(value)
        except ValueError as error:
            raise ValueError(f"{where}, column {column}: {value!r:.80} {error}") from None

    return TraceRow(
        read(layout.timestamp, layout.seconds), read(layout.prompt, _tokens), read(layout.output, _tokens)
    )


def _tokens(value: Any) -> int:
    try:
        number = _number_s(value)
    except ValueError:
        number = math.nan
    if not (0 <= number <= MAX_TOKENS and number == int(number)):
        raise ValueError(f"is not a whole number of tokens in 0..{MAX_TOKENS}")
    return int(number)
