"""`requests.jsonl` while a run appends to it: each record is in the file, or is known not to be."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from loadtest.client.record import RequestRecord, to_row
from loadtest.run.directory import writing


class RecordFile:
    """Rows are appended as requests end. `open_records` makes one."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._fault: OSError | None = None

    def append(self, record: RequestRecord) -> bool:
        """Add a row, or take back what of it fitted; False from the first one on that cannot be written."""
        if self._fault is not None:
            return False
        row = to_row(record).encode() + b"\n"
        size_bytes = os.fstat(self._file.fileno()).st_size
        try:
            while row:
                row = row[self._file.write(row) :]
        except OSError as error:
            self._fault = error
            os.ftruncate(self._file.fileno(), size_bytes)
            return False
        return True

    def refuse_missing(self) -> None:
        """Without all of its records a stage has no figures.

        Raises:
            RunWriteError: a record could not be written; those before it are there.
        """
        if self._fault is not None:
            with writing(self.path):
                raise self._fault


@contextmanager
def open_records(path: Path) -> Iterator[RecordFile]:
    """The file, locked for the block: that is how `resume.refuse_running` knows of a run that goes on."""
    # Nothing is left in a buffer.
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield RecordFile(path, file)
