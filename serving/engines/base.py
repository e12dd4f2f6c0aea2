"""What a replica needs of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

KEEP_FINISHED = 1024


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


@dataclass
class EngineTally:
    """The engine's own counts, kept by the engine's own reports."""

    running: int = 0
    waiting: int = 0
    most_running: int = 0
    finished: deque[FinishedRequest] = field(default_factory=lambda: deque(maxlen=KEEP_FINISHED))

    def load(self, running: int, waiting: int) -> None:
        """Requests being computed and requests waiting inside the engine, now."""
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


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is; `name` is `vllm` or `simulated`."""

    name: str
    version: str
    device: str
    dtype: str


class Engine(Protocol):
    """An engine that speaks the OpenAI API by an ASGI application of its own, `/metrics` included."""

    @property
    def tally(self) -> EngineTally: ...

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def registry(self) -> CollectorRegistry:
        """What the application's `/metrics` shows."""
        ...

    async def start(self) -> ASGIApp:
        """Load the model and give the application that serves it."""
        ...

    def served_by(self, server: uvicorn.Server) -> None:
        """Learn the HTTP server of the application."""
        ...

    def check(self) -> None:
        """Raise when the engine is dead and its replica should be replaced."""
        ...

    def close(self) -> None:
        """End the engine and all its processes."""
        ...
