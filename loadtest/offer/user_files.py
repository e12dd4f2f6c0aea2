"""Reads people's own files, plain or gzipped, piece by piece: bounded, and every fault with its file and line."""

from __future__ import annotations

import gzip
import io
import json
import re
import stat
import zlib
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

MAX_FILE_BYTES = 2 * 1024 * 1024 * 1024
MAX_LINE_CHARS = 64 * 1024 * 1024  # one request; a gzipped file of zeros would fill the memory
MAX_ROWS = 1_000_000  # that are kept
CHUNK_CHARS = 1024 * 1024
DAMAGED = (EOFError, OSError, zlib.error)  # what gzip raises for a file that is cut or changed
_BETWEEN_ITEMS = re.compile(r"[\s,]*")
GZIP_MAGIC = b"\x1f\x8b"
# Files that hold the right thing in the wrong form: what they begin with, their name, and what makes lines of them.
FOREIGN_FORMS = (
    (
        b"PAR1",
        "Parquet",
        "python -c \"import pandas; pandas.read_parquet('{path}').to_json('{stem}.jsonl', orient='records', "
        "lines=True, date_format='iso')\"",
    ),
    (b"\x28\xb5\x2f\xfd", "Zstandard", "zstd -d {path}"),
    (b"\xfd7zXZ\x00", "xz", "xz -dk {path}"),
    (b"BZh", "bzip2", "bzip2 -dk {path}"),
    (b"PK\x03\x04", "a zip archive", "unzip {path}"),
)

# A row, and before it its place, such as `line 3`. Close it: who leaves it early leaves the file open.
Rows = Generator[tuple[str, dict[str, Any]]]


def open_text(path: Path) -> TextIO:
    """Open a UTF-8 file of bounded size, gzipped or not; a byte order mark is skipped, line ends stay as they are.

    Raises:
        ValueError: it cannot be read, is no regular file or too large, or has a form that must be converted first.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path}: cannot be read: a directory, a pipe or a device, and no regular file")
        size_bytes = found.st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size_bytes} bytes are more than {MAX_FILE_BYTES}; cut the file")
        with path.open("rb") as file:
            head = file.read(8)
        _refuse_foreign(path, head)
        if head.startswith(GZIP_MAGIC):
            return io.TextIOWrapper(gzip.open(path), "utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _refuse_foreign(path: Path, head: bytes) -> None:
    for magic, name, command in FOREIGN_FORMS:
        if head.startswith(magic):
            line = command.format(path=path, stem=path.with_suffix(""))
            raise ValueError(f"{path}: is {name}, which is not read here; convert it: {line}")


def is_json(path: Path) -> bool:
    """Whether the name says so; `.gz` behind it does not count."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix in (".jsonl", ".ndjson", ".json")


def json_rows(path: Path, not_json: str = "") -> Rows:
    """Each line of a JSONL file, or each item of a JSON array, with its place; blank lines are skipped.

    Args:
        not_json: what to say to whose very first line is no JSON.

    Raises:
        ValueError: with file and line (of an array: item), when it is not a JSON object or not JSON at all.
    """
    with open_text(path) as file:
        begun = _read(path, file, CHUNK_CHARS)
        if begun.lstrip().startswith("["):
            yield from _array_rows(path, file, begun.lstrip()[1:])
            return
    with open_text(path) as file:
        for line, text in bounded(path, file):
            if not text.strip():
                continue
            hint = not_json if line == 1 else ""
            where = f"{path}, line {line}"
            yield f"line {line}", _object(where, _parsed(where, text, hint))


def _array_rows(path: Path, file: TextIO, text: str) -> Rows:
    """The items of an array, of which little more is in memory than the item that is read."""
    decoder = json.JSONDecoder()
    number, position = 1, 0
    while True:
        between = _BETWEEN_ITEMS.match(text, position)
        assert between is not None  # it matches nothing, too
        position = between.end()
        if text.startswith("]", position):
            return
        where = f"{path}, item {number}"
        try:
            item, position = decoder.raw_decode(text, position)
        except RecursionError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        except ValueError as error:
            # As much again as there is, so that a long item is tried a few times only.
            more = _read(path, file, max(CHUNK_CHARS, len(text) - position))
            if not more or len(text) - position > MAX_LINE_CHARS:
                raise ValueError(f"{where}: not JSON: {error}") from None
            text, position = text[position:] + more, 0
            continue
        yield f"item {number}", _object(where, item)
        number += 1


def _read(path: Path, file: TextIO, num_chars: int) -> str:
    try:
        return file.read(num_chars)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason}") from None
    except DAMAGED as error:
        raise ValueError(f"{path}: damaged: {error}") from None


def _parsed(where: str, text: str, hint: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}{hint}") from None


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {row!r:.80} is not an object")
    return row


def bounded(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    """Each line with its number.

    Raises:
        ValueError: one is longer than `MAX_LINE_CHARS`, or there are bytes that are not UTF-8 or not gzip.
    """
    line = 0
    try:
        for line, text in enumerate(iter(partial(file.readline, MAX_LINE_CHARS), ""), start=1):
            if len(text) >= MAX_LINE_CHARS:
                raise ValueError(f"{path}, line {line}: longer than {MAX_LINE_CHARS} characters")
            yield line, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {line}: not UTF-8: {error.reason}") from None
    except DAMAGED as error:
        raise ValueError(f"{path}, after line {line}: damaged: {error}") from None
