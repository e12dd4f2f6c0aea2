"""Recordings of an engine's steps, one at a time, as pages of its replica.

`POST /tandem/trace/start?seconds=20` records and ends by itself, so a caller that dies leaves nothing running.
`POST /tandem/trace/stop?recording=1` ends it before its time, gives the events once, and forgets them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.engines.steps.log import StepLog, StepLogError
from serving.tracing.events import MAX_RECORDING_S, TracedReplica

T = TypeVar("T")
MAX_EVENTS = 1_000_000
# As long as a fetch may take to begin after the recording has ended by itself; then another may start.
FETCH_GRACE_S = 30.0
BATCH_EVENTS = 500  # encoded at once: streams of the same process must not wait for longer


@dataclass(frozen=True, slots=True)
class ReplicaLabels:
    """What a recording says of its replica."""

    replica_id: str
    lane: str
    strategy: str
    engine: str


class RecordingRefusedError(Exception):
    """A recording cannot be started or fetched; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StepRecorder:
    """Starts and ends recordings of one engine, and gives them away."""

    def __init__(self, log: StepLog, labels: ReplicaLabels) -> None:
        self._log = log
        self._labels = labels
        self._numbers = itertools.count(1)
        self._current: int | None = None  # not fetched yet
        self._is_being_read = False
        self._timers: list[asyncio.TimerHandle] = []

    def start(
        self,
        seconds: float,
        max_events: int = MAX_EVENTS,
        *,
        with_token_ids: bool = False,
        share: float = 1.0,
    ) -> int:
        """Record a share of the requests for `seconds`, or until `max_events`; the number of the recording.

        Raises:
            RecordingRefusedError: a bound is exceeded, another recording goes on, or the engine cannot.
        """
        if not 0 < seconds <= MAX_RECORDING_S:
            raise RecordingRefusedError(
                400, f"seconds={seconds:g} must be above 0 and at most {MAX_RECORDING_S:g}"
            )
        if not 1 <= max_events <= MAX_EVENTS:
            raise RecordingRefusedError(400, f"max_events={max_events} must be 1 to {MAX_EVENTS}")
        if not 0 < share <= 1:
            raise RecordingRefusedError(400, f"share={share!r} must be above 0 and at most 1")
        if self._current is not None:
            raise RecordingRefusedError(
                409,
                f"recording {self._current} of replica {self._labels.replica_id} is not over; try again later",
            )
        try:
            self._log.start(max_events, with_token_ids=with_token_ids, share=share)
        except StepLogError as error:
            raise RecordingRefusedError(501, str(error)) from None
        self._current = next(self._numbers)
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(seconds, self._log.stop),
            loop.call_later(seconds + FETCH_GRACE_S, self._forget_unless_read),
        ]
        return self._current

    def stop(self, recording: int) -> TracedReplica:
        """End the recording if it goes on, and keep it for the caller until `forget`.

        Raises:
            RecordingRefusedError: it is not there, another caller reads it, or the engine could not write it.
        """
        if recording != self._current or self._is_being_read:
            raise RecordingRefusedError(
                409, f"recording {recording} of replica {self._labels.replica_id} is not there: it was fetched, "
                f"or not within {FETCH_GRACE_S:g} s of its end"
            )  # fmt: skip
        self._log.stop()
        try:
            self._log.check()
        except StepLogError as error:
            self.forget()
            raise RecordingRefusedError(507, str(error)) from None
        self._is_being_read = True
        labels = self._labels
        events, lost = self._log.counts
        return TracedReplica(labels.replica_id, labels.lane, labels.strategy, labels.engine, events, lost)

    async def lines(self, replica: TracedReplica) -> AsyncIterator[bytes]:
        """The replica and its events as JSON, a line each, in batches."""
        encode = msgspec.json.Encoder().encode_lines
        yield encode([replica])
        rows = self._log.events(replica.replica_id)
        while batch := list(itertools.islice(rows, BATCH_EVENTS)):
            yield encode(batch)
            await asyncio.sleep(0)

    def forget(self) -> None:
        """Give the recording's room back; another may start."""
        for timer in self._timers:
            timer.cancel()
        self._log.clear()
        self._current, self._is_being_read = None, False

    def _forget_unless_read(self) -> None:
        if not self._is_being_read:
            self.forget()

    def app(self) -> Starlette:
        """The two pages."""
        return Starlette(
            routes=[
                Route("/tandem/trace/start", self._start_page, methods=["POST"]),
                Route("/tandem/trace/stop", self._stop_page, methods=["POST"]),
            ]
        )

    async def _start_page(self, request: Request) -> Response:
        asked = request.query_params
        try:
            recording = self.start(
                _number(asked, "seconds", float),
                _number(asked, "max_events", int, MAX_EVENTS),
                with_token_ids=asked.get("token_ids") == "1",
                share=_number(asked, "share", float, 1.0),
            )
        except RecordingRefusedError as refusal:
            return _refused(refusal)
        return JSONResponse({"recording": recording})

    async def _stop_page(self, request: Request) -> ASGIApp:
        try:
            replica = self.stop(_number(request.query_params, "recording", int))
        except RecordingRefusedError as refusal:
            return _refused(refusal)
        answer = StreamingResponse(self.lines(replica), media_type="application/x-ndjson")

        async def give_once(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await answer(scope, receive, send)
            finally:
                self.forget()

        return give_once


def _number(asked: QueryParams, name: str, kind: Callable[[Any], T], default: T | None = None) -> T:
    given = asked.get(name, default)
    try:
        return kind(given)
    except (TypeError, ValueError):
        raise RecordingRefusedError(400, f"{name}={given!r} must be a number") from None


def _refused(refusal: RecordingRefusedError) -> Response:
    return JSONResponse({"error": str(refusal)}, status_code=refusal.status)
