"""Reads a recorded trace: when requests came, and how long prompt and answer were.

Three column layouts are known, as CSV with a header or as JSONL with the same names, gzipped or not:

    Azure LLM inference trace   TIMESTAMP (a date with time), ContextTokens, GeneratedTokens
    BurstGPT                    Timestamp (seconds), Request tokens, Response tokens
    Mooncake, Bailian           timestamp (milliseconds there, seconds here), input_length, output_length

Other columns are ignored; what they leave unsaid of the requests is in `RecordedTrace.notes`.
"""

from __future__ import annotations

import csv
import math
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from loadtest.offer.user_files import MAX_ROWS, Rows, bounded, is_json, json_rows, open_text

MAX_TOKENS = 10_000_000  # of one prompt or answer; more is a column read wrongly
SECONDS_OF_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
IMAGES = "NumImages"  # of Azure's trace of 2025
SHARED_PREFIXES = "hash_ids"  # of Mooncake's and Bailian's traces
MAX_CACHED_TRACES = 8  # a plan asks for the same one for each lane and repeat

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `at_s` counts from the first one, or from the begin of the window."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The requests of a trace, in order of time.

    Attributes:
        num_left_out: rows with an empty prompt or answer. In BurstGPT those are requests that failed.
        notes: what of the trace is not sent, a line each.
    """

    rows: tuple[TraceRow, ...]
    num_left_out: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Attributes: seconds: reads the time; None where the user must name its unit."""

    name: str
    timestamp: str
    prompt: str
    output: str
    seconds: Callable[[Any], float] | None

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


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError("is not a number of seconds")
    return number


_LAYOUTS = (
    _Layout("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _date_s),
    _Layout("BurstGPT", "Timestamp", "Request tokens", "Response tokens", _number),
    _Layout("Mooncake or Bailian", "timestamp", "input_length", "output_length", None),
)
# Others that are published as CSV: all they lack is the names of the columns, with times in seconds.
_FOREIGN_LAYOUTS = (
    ("Splitwise", "arrival_timestamp", "prompt_size", "token_size"),
    ("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
)


def read_recorded_trace(
    path: Path, *, unit: str = "", from_s: float = 0.0, length_s: float = math.inf
) -> RecordedTrace:
    """Read a trace; `.jsonl`, `.ndjson` and `.json` as JSON, anything else as CSV.

    A window is read in the order of the file, and no further than it goes; the whole trace may have any order.

    Args:
        unit: of the time in layouts that have more than one: a key of `SECONDS_OF_UNIT`.
        from_s: begin of the window, in seconds after the first request.
        length_s: its length.

    Raises:
        ValueError: with file, line, column and value; or the file is too large, or holds no requests.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    return _read(path, unit, from_s, length_s, (found.st_mtime_ns, found.st_size))


@lru_cache(MAX_CACHED_TRACES)
def _read(path: Path, unit: str, from_s: float, length_s: float, _version: tuple[int, int]) -> RecordedTrace:
    is_window = from_s > 0 or length_s < math.inf
    rows: list[TraceRow] = []
    num_left_out = num_with_images = 0
    layout: _Layout | None = None
    first_s = last_s = math.nan
    shares_prefixes = False
    with closing(json_rows(path) if is_json(path) else _csv_rows(path)) as placed_rows:
        for place, row in placed_rows:
            if layout is None:
                layout, shares_prefixes = _layout(path, place, row), SHARED_PREFIXES in row
                seconds = _clock(path, layout, unit)
            where = f"{path}, {place}"
            at_s = _cell(row, layout.timestamp, seconds, where)
            if is_window and not math.isnan(first_s):
                if at_s < last_s:
                    raise ValueError(
                        f"{where}: earlier than the line before it; a window (from=, a duration) is read in the "
                        "order of the file: sort it by time"
                    )
                if at_s - first_s >= from_s + length_s:
                    break
                if at_s - first_s < from_s:
                    last_s = at_s
                    continue
            prompt_tokens = _cell(row, layout.prompt, _tokens, where)
            output_tokens = _cell(row, layout.output, _tokens, where)
            if not (prompt_tokens and output_tokens):
                num_left_out += from_s == 0 or not math.isnan(first_s)
                continue
            last_s = at_s
            if math.isnan(first_s):
                first_s = at_s
                if from_s > 0:
                    continue
            if len(rows) == MAX_ROWS:
                raise ValueError(f"{path}: more than {MAX_ROWS} requests; name a window, such as from=1h,60s")
            rows.append(TraceRow(at_s, prompt_tokens, output_tokens))
            num_with_images += bool(row.get(IMAGES)) and _cell(row, IMAGES, _tokens, where) > 0
    if not rows:
        window = f" from {from_s:g} s on, for {length_s:g} s" if is_window else ""
        raise ValueError(
            f"{path}: no requests in it{window} ({num_left_out} rows with an empty prompt or answer)"
        )
    rows.sort(key=lambda row: row.at_s)
    zero_s = first_s + from_s if is_window else rows[0].at_s
    return RecordedTrace(
        tuple(TraceRow(row.at_s - zero_s, row.prompt_tokens, row.output_tokens) for row in rows),
        num_left_out,
        _notes(path, len(rows), num_left_out, num_with_images, shares_prefixes),
    )


def _notes(
    path: Path, num_rows: int, num_left_out: int, num_with_images: int, shares_prefixes: bool
) -> tuple[str, ...]:
    notes = []
    if num_left_out:
        notes.append(
            f"{path}: {num_left_out} of {num_rows + num_left_out} rows are left out: an empty prompt or answer"
        )
    if num_with_images:
        notes.append(
            f"{path}: {num_with_images} of {num_rows} requests had images ({IMAGES}); they are sent as text alone"
        )
    if shares_prefixes:
        notes.append(
            f"{path}: what prompts have in common ({SHARED_PREFIXES}) is the workload's, not the trace's"
        )
    return tuple(notes)


def _csv_rows(path: Path) -> Rows:
    with open_text(path) as file:
        reader = csv.reader((text for _, text in bounded(path, file)), strict=True)
        header: list[str] = []
        try:
            for cells in reader:
                if len(cells) < len(header):
                    if "".join(cells).strip():
                        yield f"line {reader.line_num}", dict(zip_longest(header, cells))
                elif header:
                    yield f"line {reader.line_num}", dict(zip(header, cells, strict=False))
                else:
                    header = cells
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: not CSV: {error}") from None


def _layout(path: Path, place: str, row: Mapping[str, Any]) -> _Layout:
    for layout in _LAYOUTS:
        if all(column in row for column in layout.columns):
            return layout
    names = [str(name) for name in row]
    if names and names[0].lstrip().startswith(("[", "{")):
        raise ValueError(f"{path}: is JSON, but not named so: mv {_quoted(path)} {_beside(path, '.jsonl')}")
    for name, *foreign in _FOREIGN_LAYOUTS:
        if all(column in names for column in foreign):
            ours = _LAYOUTS[1].columns
            renames = " ".join(f"-e '1s/{theirs}/{own}/'" for theirs, own in zip(foreign, ours, strict=True))
            raise ValueError(
                f"{path}: has the columns of {name}; give them BurstGPT's names: "
                f"sed {renames} {_quoted(path)} > {_beside(path, '.burstgpt.csv')}"
            )
    known = " or ".join(f"{', '.join(layout.columns)} ({layout.name})" for layout in _LAYOUTS)
    raise ValueError(
        f"{path}, {place}: columns {', '.join(names):.200} are neither {known}; rename yours: "
        f"sed -e '1s/YOURS/{_LAYOUTS[1].timestamp}/' ... {_quoted(path)} > {_beside(path, '.burstgpt.csv')}"
    )


def _quoted(path: Path) -> str:
    return shlex.quote(os.fspath(path))


def _beside(path: Path, suffix: str) -> str:
    return shlex.quote(os.fspath(path.with_suffix(suffix)))


def _clock(path: Path, layout: _Layout, unit: str) -> Callable[[Any], float]:
    if layout.seconds is not None:
        if unit:
            raise ValueError(
                f"{path}: unit={unit}: the columns of {layout.name} have a unit of their own; leave it out"
            )
        return layout.seconds
    if not unit:
        raise ValueError(
            f"{path}: has the columns of {layout.name}: in Mooncake's files {layout.timestamp} is in milliseconds, "
            "in Bailian's in seconds; name the unit, as in trace:PATH,unit=ms"
        )
    factor = SECONDS_OF_UNIT[unit]
    return lambda value: factor * _number(value)


def _cell(row: Mapping[str, Any], column: str, convert: Callable[[Any], Number], where: str) -> Number:
    value = row.get(column)
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{where}, column {column}: {value!r:.80} {error}") from None


def _tokens(value: Any) -> int:
    try:
        number = _number(value)
    except ValueError:
        number = math.nan
    if not (0 <= number <= MAX_TOKENS and number == int(number)):
        raise ValueError(f"is not a whole number of tokens in 0..{MAX_TOKENS}")
    return int(number)
