"""What a replica needs of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from serving.core.lane import EngineFacts
from serving.engines.steps.log import StepLog

KEEP_FINISHED = 1024
KEEP_SENT = 1024


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request as the engine saw it. Instants are seconds since the epoch, on the engine's machine.

    Attributes:
        request_id: the engine's own id; it contains the id that the gateway sent.
        started_at_s: first scheduled into a step.
        ended_at_s: last token made.
    """

    request_id: str
    started_at_s: float
    ended_at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SentWrite:
    """One write to a client's connection, stamped around the call that hands it to the transport.

    On asyncio's own event loop that call ends in the system call while the connection keeps up, so the bytes
    left between the two monotonic instants. uvloop only queues them there and sends at the end of its turn.

    Attributes:
        tokens: output tokens in it; 0 for the closing `[DONE]`.
        choice: index of the choice they belong to.
        sent_unix_ns, sent_monotonic_ns: right before, on CLOCK_REALTIME and CLOCK_MONOTONIC.
        written_monotonic_ns: right after.
    """

    tokens: int
    sent_unix_ns: int
    sent_monotonic_ns: int
    written_monotonic_ns: int
    choice: int = 0


@dataclass(slots=True)
class SentStream:
    """What was really sent for one streamed request. All processes of a machine share CLOCK_MONOTONIC.

    Attributes:
        request_id: the `x-request-id` it came with, or one that the engine gave it.
        received_monotonic_ns: when the whole request was there.
        chunks: each write with text, in order.
        done: the write of `[DONE]`; None while it goes on, and for ever when its client left.
    """

    request_id: str
    prompt_tokens: int
    received_monotonic_ns: int
    chunks: list[SentWrite] = field(default_factory=list)
    done: SentWrite | None = None


@dataclass
class EngineTally:
    """The engine's own counts, kept by the engine's own reports.

    Attributes:
        num_steps, busy_s: steps that followed another without a pause, and the seconds they took.
        num_all_steps: those after a pause too.
        sent: the last `KEEP_SENT` streams as they were sent, of engines that stamp them.
    """

    running: int = 0
    waiting: int = 0
    most_running: int = 0
    num_steps: int = 0
    num_all_steps: int = 0
    busy_s: float = 0.0
    finished: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=KEEP_FINISHED))
    sent: deque[SentStream] = field(default_factory=lambda: deque(maxlen=KEEP_SENT))
    _step_ended_at_s: float | None = None

    def step(self, running: int, waiting: int, ended_at_s: float) -> None:
        """A step ended, at an instant of the monotonic clock; `running` and `waiting` are what it left.

        The first step after a pause is not timed: nothing tells when it began.
        """
        self.num_all_steps += 1
        if self._step_ended_at_s is not None:
            self.num_steps += 1
            self.busy_s += ended_at_s - self._step_ended_at_s
        self._step_ended_at_s = ended_at_s
        self.load(running, waiting)

    def load(self, running: int, waiting: int) -> None:
        """Requests being computed and requests waiting inside the engine, now."""
        if not running:
            self._step_ended_at_s = None  # what follows is a pause and no step
        self.running = running
        self.waiting = waiting
        self.most_running = max(self.most_running, running)

    def finish(self, requests: Iterable[FinishedRequest]) -> None:
        """Remember finished requests, the last `KEEP_FINISHED` of them."""
        self.finished.extend(requests)

    def as_json(self) -> dict[str, Any]:
        """The JSON of a replica's `GET /tandem/engine`."""
        return {
            "running": self.running,
            "waiting": self.waiting,
            "most_running": self.most_running,
            "finished": [asdict(request) for request in self.finished],
        }

    def sent_as_json(self, request_id: str | None = None) -> bytes:
        """The JSON of a replica's `GET /tandem/engine/sent`: `SentStream`s, of one request if it is named."""
        return msgspec.json.encode(
            [stream for stream in self.sent if request_id in (None, stream.request_id)]
        )


class Engine(Protocol):
    """An engine that speaks the OpenAI API by an ASGI application of its own. `engines.make` makes it.

    Of the application the paths of `route_filter.LAB_ROUTES` are served, streams as server-sent events, a closed
    connection ends the generation, and more than `max_num_seqs` requests wait inside. Figures are compared over
    answers of one length, so it should honour `min_tokens` and `ignore_eos`: each shorter answer is a warning.
    """

    @property
    def tally(self) -> EngineTally:
        """Its own counts.

        `finished` is what tests trust; its ids contain the `x-request-id` that the request came with.
        """
        ...

    @property
    def facts(self) -> EngineFacts:
        """What the scheduler, `/lab` and reports say of it; read after `start`."""
        ...

    @property
    def step_log(self) -> StepLog:
        """Where a `StepWriter` writes its steps while they are wanted; without one nothing can be recorded."""
        ...

    @property
    def registry(self) -> CollectorRegistry:
        """What the application's `/metrics` shows, the replica's own metrics included, so no other engine's.

        Dashboards and reports read vLLM's names, `VLLM_*` of `serving.metrics.names`, and show nothing of others.
        """
        ...

    async def start(self) -> ASGIApp:
        """Load the model and give the application; its first request is a completion of at most 8 tokens.

        Raises:
            TandemError: it cannot start; the replica is not announced and the lab says why.
        """
        ...

    def served_by(self, server: uvicorn.Server) -> None:
        """Learn the HTTP server of the application, which may end it; most engines need not know."""
        ...

    def check(self) -> None:
        """Asked several times a second: raise a RuntimeError when the engine is dead and should be replaced."""
        ...

    def close(self) -> None:
        """End the engine and all its processes, also when it has not started; close the step log."""
        ...
