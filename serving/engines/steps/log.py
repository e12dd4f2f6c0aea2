"""An engine's steps, from the engine's process to its replica's, through one nameless file.

The first page is control: a byte that the engine reads once a step, bounds, and counts. Records follow.
The file has no name: its room is given back when both processes have ended, however they did.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from typing import Final

import msgspec

from serving.core.errors import TandemError
from serving.tracing.events import Phase, StepEvent
from serving.tracing.sampling import is_sampled

PATH_VARIABLE: Final = "TANDEM_STEP_LOG"  # where the engine's process finds the file
PAGE_BYTES: Final = mmap.PAGESIZE

# Byte 0 is what the engine looks at; the rest is looked at only when that says so.
_IS_ON, _WITH_TOKEN_IDS = 1, 2
_IS_ATTACHED = 1  # byte 1: an engine has opened the file
_COUNTS = struct.Struct("=QQQQi")  # most events, bytes, events, lost events, errno of a failed write
_COUNTS_AT = 8
_SHARE = struct.Struct("=d")  # of the requests
_SHARE_AT = 64
_LENGTH = struct.Struct("=I")


class StepLogError(TandemError):
    """The steps of an engine cannot be recorded."""


class RequestStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request's part in a step; see `serving.tracing.events.StepEvent`."""

    request_id: str
    is_prefill: bool
    scheduled_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    drafted_ids: tuple[int, ...] | None = None
    emitted_ids: tuple[int, ...] | None = None


class _Step(msgspec.Struct, frozen=True, array_like=True, gc=False):
    step: int
    started_ns: int
    ended_ns: int
    requests: list[RequestStep]


class StepLog:
    """The replica's side: says when to record, and reads what was."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="tandem-steps-")  # noqa: SIM115 - lives as long as the log
        self._file.truncate(PAGE_BYTES)
        self._control = mmap.mmap(self._file.fileno(), PAGE_BYTES)

    @property
    def path(self) -> str:
        """Opens the nameless file, from any process of this user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    @property
    def counts(self) -> tuple[int, int]:
        """Events of this recording, and events lost because it was full."""
        _, _, events, lost, _ = _COUNTS.unpack_from(self._control, _COUNTS_AT)
        return events, lost

    def start(self, max_events: int, *, with_token_ids: bool, share: float = 1.0) -> None:
        """Forget what was recorded and record from the next step on.

        Args:
            share: of the requests, as `serving.tracing.sampling` chooses them.

        Raises:
            StepLogError: the engine does not write to this log.
        """
        if not self._control[1] & _IS_ATTACHED:
            raise StepLogError("the engine does not record its steps: its scheduler is of an unknown kind")
        self.clear()
        _COUNTS.pack_into(self._control, _COUNTS_AT, max_events, 0, 0, 0, 0)
        _SHARE.pack_into(self._control, _SHARE_AT, share)
        self._control[0] = _IS_ON | (_WITH_TOKEN_IDS if with_token_ids else 0)

    def stop(self) -> None:
        """Record no step that ends after this."""
        if not self._control.closed:
            self._control[0] = 0

    def clear(self) -> None:
        """Give the room back."""
        if self._file.closed:
            return
        self.stop()
        self._file.truncate(PAGE_BYTES)
        _COUNTS.pack_into(self._control, _COUNTS_AT, 0, 0, 0, 0, 0)

    def check(self) -> None:
        """Raises: StepLogError: the engine could not write."""
        *_, errno = _COUNTS.unpack_from(self._control, _COUNTS_AT)
        if errno:
            raise StepLogError(f"the engine could not write its steps: {os.strerror(errno)}")

    def events(self, replica_id: str) -> Iterator[StepEvent]:
        """What was recorded, in the order of the steps."""
        _, size, *_ = _COUNTS.unpack_from(self._control, _COUNTS_AT)
        decode = msgspec.msgpack.Decoder(_Step).decode
        with open(self.path, "rb") as file:
            file.seek(PAGE_BYTES)
            while file.tell() < PAGE_BYTES + size:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                step = decode(file.read(length))
                for request in step.requests:
                    yield StepEvent(
                        replica_id=replica_id,
                        step=step.step,
                        started_ns=step.started_ns,
                        ended_ns=step.ended_ns,
                        request_id=request.request_id,
                        phase=Phase.PREFILL if request.is_prefill else Phase.DECODE,
                        scheduled_tokens=request.scheduled_tokens,
                        drafted_tokens=request.drafted_tokens,
                        accepted_tokens=request.accepted_tokens,
                        emitted_tokens=request.emitted_tokens,
                        drafted_ids=request.drafted_ids,
                        emitted_ids=request.emitted_ids,
                    )

    def close(self) -> None:
        """Record no more; the engine may go on looking at its own copy of the control page."""
        self.stop()
        self._control.close()
        self._file.close()


class StepWriter:
    """The engine's side. Only one engine writes to a log."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._control = mmap.mmap(self._fd, PAGE_BYTES)
        self._encode = msgspec.msgpack.Encoder().encode
        self._control[1] |= _IS_ATTACHED

    @property
    def is_on(self) -> bool:
        """Whether steps are wanted: the only cost while they are not."""
        return self._control[0] != 0

    @property
    def wants_token_ids(self) -> bool:
        """Whether the tokens themselves are wanted, too."""
        return bool(self._control[0] & _WITH_TOKEN_IDS)

    def write(self, step: int, started_ns: int, ended_ns: int, requests: list[RequestStep]) -> None:
        """Append what is wanted of a step, or count its events as lost when there is no room for all of them."""
        (share,) = _SHARE.unpack_from(self._control, _SHARE_AT)
        if share < 1:
            requests = [request for request in requests if is_sampled(request.request_id, share)]
            if not requests:
                return
        most, size, events, lost, _ = _COUNTS.unpack_from(self._control, _COUNTS_AT)
        errno = 0
        if lost or events + len(requests) > most:
            lost += len(requests)
        else:
            record = self._encode(_Step(step, started_ns, ended_ns, requests))
            data = _LENGTH.pack(len(record)) + record
            try:
                written = os.pwrite(self._fd, data, PAGE_BYTES + size)
            except OSError as error:
                # A full disk ends the recording, never the engine.
                self._control[0], errno, written = 0, error.errno or 0, 0
            if written == len(data):
                size, events = size + written, events + len(requests)
            else:
                lost += len(requests)
        _COUNTS.pack_into(self._control, _COUNTS_AT, most, size, events, lost, errno)

    def close(self) -> None:
        """Let go of the file."""
        self._control.close()
        os.close(self._fd)
