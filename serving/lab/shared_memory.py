"""Shared memory that processes leave in /dev/shm when they are killed.

Engines make segments with Python's `multiprocessing.shared_memory`. When an engine is killed together with the
process that would tidy up, their names and their memory stay until the machine restarts. Nothing in a segment says
whose it is, so what a lab's processes have mapped is recorded while they live. The OpenMP library that computes on
a CPU writes a file there too, with its process' id in its name.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import psutil

from serving.core.errors import TandemError
from serving.lab import state as lab_state

SHM_DIR = Path("/dev/shm")
LOOK_EVERY_S = 2.0
# As Python names segments that were given no name. That of an unlinked one ends in " (deleted)" and does not match.
MAPPED_SEGMENT = re.compile(rf"(\d+) +{SHM_DIR}/(psm_[0-9a-f]+)$", re.MULTILINE)
# As LLVM's and Intel's OpenMP name what they register themselves with: process id, then user id.
OPENMP_FILE = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")


class Segment(NamedTuple):
    """A file in /dev/shm; the inode tells it from a later one of the same name."""

    name: str
    inode: int


def segments_of(pids: Iterable[int]) -> set[Segment]:
    """Segments that these processes have mapped now, and the files of their OpenMP libraries.

    Processes that have ended or are another user's count as having none. Another user cannot have ours mapped:
    Python makes segments for their owner alone.
    """
    pids = set(pids)
    mapped = {segment for pid, segment in _openmp_files() if pid in pids}
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        mapped |= {Segment(name, int(inode)) for inode, name in MAPPED_SEGMENT.findall(maps)}
    return mapped


def remove_left(segments: set[Segment]) -> None:
    """Remove those of the segments that are still there and that are no living process'."""
    left = {segment for segment in segments if _is_there(segment)}
    if not left:
        return
    for segment in left - segments_of(psutil.pids()):
        (SHM_DIR / segment.name).unlink(missing_ok=True)


def _openmp_files() -> Iterator[tuple[int, Segment]]:
    """Each with the process that it is of."""
    for path in SHM_DIR.iterdir():
        if named := OPENMP_FILE.fullmatch(path.name):
            with suppress(FileNotFoundError):
                yield int(named[1]), Segment(path.name, path.stat().st_ino)


def _is_there(segment: Segment) -> bool:
    try:
        return (SHM_DIR / segment.name).stat().st_ino == segment.inode
    except FileNotFoundError:
        return False


def recorded(directory: Path, run_id: str) -> set[Segment]:
    """What the watch of that run has written down; nothing where there was none.

    Raises:
        TandemError: the record is damaged.
    """
    path = _record(directory)
    try:
        data = json.loads(path.read_text())
        segments = {Segment(str(name), int(inode)) for name, inode in data["segments"]}
        return segments if data["run_id"] == run_id else set()
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError, KeyError) as error:
        raise TandemError(f"{path}: damaged record ({error}); stop any lab, then delete it") from None


def forget(directory: Path) -> None:
    """Remove the record."""
    _record(directory).unlink(missing_ok=True)


def _record(directory: Path) -> Path:
    return directory / "shared_memory.json"


class Watch:
    """Records what a run's processes have mapped, every `LOOK_EVERY_S` and when told, on a thread of its own.

    Beside the state file, so that whoever cleans up later knows it even when the supervisor was killed.

    Args:
        pids: the run's processes now.
    """

    def __init__(self, directory: Path, run_id: str, pids: Callable[[], Iterable[int]]) -> None:
        self._directory = directory
        self._run_id = run_id
        self._pids = pids
        self._seen: set[Segment] = set()
        self._listings: deque[set[str]] = deque(maxlen=2)  # what was there at the last looks
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="shared-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """From here on nothing more is written."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Record what is mapped now and was not known."""
        with self._lock:
            names = {
                path.name
                for path in SHM_DIR.iterdir()
                if path.name.startswith("psm_") or OPENMP_FILE.fullmatch(path.name)
            }
            # Reading every process' map is dear. A segment is listed a moment before it is mapped: look twice.
            if list(self._listings) == [names, names]:
                return
            self._listings.append(names)
            mapped = segments_of(self._pids())
            if mapped <= self._seen:
                return
            self._seen |= mapped
            record = {"run_id": self._run_id, "segments": sorted(self._seen)}
            lab_state.replace_file(_record(self._directory), json.dumps(record))

    def _keep_looking(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            self.look()
