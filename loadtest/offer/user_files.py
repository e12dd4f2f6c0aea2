"""Reads people's own files, line by line: bounded, and every fault with its file and line."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TextIO

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_ROWS = 1_000_000


def open_text(path: Path) -> TextIO:
    """Open a UTF-8 file of bounded size; a byte order mark is skipped, line ends are left as they are.

    Raises:
        ValueError: it cannot be read, or is too large.
    """
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size_bytes} bytes are more than {MAX_FILE_BYTES}; cut the file")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


Rows = Generator[tuple[int, dict[str, Any]]]  # close it: who leaves it early leaves the file open


def json_rows(path: Path) -> Rows:
    """Number and object of each line of a JSONL file; blank lines are skipped.

    Raises:
        ValueError: with file and line, when a line is not a JSON object or there are too many.
    """
    with open_text(path) as file:
        for line, text in bounded(path, file):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {line}: {row!r:.80} is not an object")
            yield line, row


def bounded(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    """Each line with its number.

    Raises:
        ValueError: there are more than `MAX_ROWS`, or bytes that are not UTF-8.
    """
    line = 0
    try:
        for line, text in enumerate(file, start=1):
            if line > MAX_ROWS + 1:  # one more, for the header of a CSV file
                raise ValueError(f"{path}: more than {MAX_ROWS} rows; cut the file")
            yield line, text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {line}: not UTF-8: {error.reason}") from None
