"""A gateway without Ray: its application, a real scheduler, and a fake engine behind one lane each."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from serving.config import GatewayConfig, LabConfig, SchedulerConfig
from serving.gateway.api_keys import ApiKeys
from serving.gateway.app import NO_KEYS, build_gateway_app
from serving.gateway.completion import Services
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.upstream import UpstreamClient
from serving.tracing.otlp import Tracing
from serving.tracing.span_log import SpanLog
from tests.unit.gateway.fake_engine import FakeEngine, fake_engine
from tests.unit.scheduler.control_plane import LANES, ControlPlane, control_plane, until

MODEL = "smollm2-135m"
Message = MutableMapping[str, Any]


@dataclass
class Caller:
    """An HTTP client as an ASGI server shows it to the application, to the message."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    body_parts: list[bytes] | None = None  # of an upload that is not yet whole
    status: int | None = None
    answer_headers: dict[str, str] = field(default_factory=dict)
    got: bytes = b""
    is_complete: bool = False
    is_cut_off: bool = False  # the connection breaks under the next write
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        parts = [self.body] if self.body_parts is None else self.body_parts
        is_whole = self.body_parts is None
        self._to_send: list[Message] = [
            {"type": "http.request", "body": part, "more_body": not is_whole or part is not parts[-1]}
            for part in parts
        ]

    async def call(self, app: ASGIApp) -> None:
        path, _, query = self.path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": self.method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in self.headers.items()],
        }
        await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._to_send:
            return self._to_send.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.is_cut_off:
            raise ConnectionResetError("the client's connection broke")
        assert not self.is_complete, "nothing may follow the end of an answer"
        if message["type"] == "http.response.start":
            assert self.status is None, "an answer begins once"
            self.status = message["status"]
            self.answer_headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        assert self.status is not None, "an answer begins before its body"
        self.got += message.get("body", b"")
        if not message.get("more_body", False):
            self.is_complete = True
            self.gone.set()  # a server tells of the end of the answer the same way

    @property
    def json(self) -> Any:
        return json.loads(self.got)

    @property
    def error_code(self) -> str:
        """The code of an OpenAI error object, and nothing beside it."""
        assert set(self.json) == {"error"}
        code: str = self.json["error"]["code"]
        return code


@dataclass
class GatewayLab:
    app: FastAPI
    plane: ControlPlane
    engine: FakeEngine
    metrics: GatewayMetrics
    spans: SpanLog

    async def post(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> Caller:
        """Send a request and wait for the end of its answer."""
        caller = self.caller(body, path, **options)
        await caller.call(self.app)
        assert caller.is_complete
        return caller

    async def get(self, path: str, method: str = "GET", **options: Any) -> Caller:
        caller = Caller(path, b"", method, **options)
        await caller.call(self.app)
        return caller

    def caller(self, body: Any, path: str = "/v1/chat/completions", **options: Any) -> Caller:
        return Caller(path, body if isinstance(body, bytes) else json.dumps(body).encode(), **options)

    @contextlib.asynccontextmanager
    async def calling(self, body: Any, **options: Any) -> AsyncIterator[Caller]:
        """A request in flight; it must end by itself soon after the block."""
        caller = self.caller(body, **options)
        task = asyncio.create_task(caller.call(self.app))
        try:
            yield caller
            async with asyncio.timeout(20):
                await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def value(self, name: str, **labels: str) -> float:
        """A metric's value; 0 when it has none."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def ended(self) -> dict[tuple[str, str, str], float]:
        """Requests ended, by (lane, outcome, reason)."""
        return {
            (sample.labels["lane"], sample.labels["outcome"], sample.labels["reason"]): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "tandem_requests_total"
        }


@contextlib.asynccontextmanager
async def gateway_lab(
    *,
    scheduler: dict[str, Any] | None = None,
    ask: Callable[[str], Any] = str,
    tracing: Tracing | None = None,
    logs_requests: bool = False,
    keys: ApiKeys = NO_KEYS,
    **gateway: Any,
) -> AsyncIterator[GatewayLab]:
    """A lab that is at rest again when the block is left: no lease, nobody waiting, no request at the engine.

    Args:
        scheduler, gateway: settings of these sections.
    """
    scheduling = {"max_waiting_requests": 10} | (scheduler or {})
    config = LabConfig(
        gateway=GatewayConfig(**gateway), scheduler=SchedulerConfig(**scheduling), lanes=tuple(LANES)
    )

    async def ask_scheduler(path: str) -> Any:
        return ask(path)

    async with (
        control_plane(**scheduling) as plane,
        fake_engine() as engine,
        plane.replica("b", "batched", url=engine.url),
        plane.replica("s", "sequential", url=engine.url),
        plane.client() as client,
    ):
        upstream, metrics, spans = UpstreamClient(config.gateway), GatewayMetrics(), SpanLog("g")
        services = Services(client, upstream, metrics, spans, tracing, logs_requests)
        app = build_gateway_app(config, services, ask_scheduler, keys)
        try:
            yield GatewayLab(app, plane, engine, metrics, spans)
            await until(lambda: plane.counts == (0, 0))
            await until(lambda: engine.num_open == 0)
        finally:
            await upstream.close()
