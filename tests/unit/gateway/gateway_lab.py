"""A gateway without Ray: its application, a real scheduler, and a fake engine behind one lane each.

It is called in one of two ways: as an ASGI server does it, message by message, or over a socket of its own server.
`conftest.py` runs each test that uses a lab in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httptools
from starlette.types import ASGIApp

from serving.config import GatewayConfig, LabConfig, SchedulerConfig
from serving.gateway.api_keys import ApiKeys
from serving.gateway.app import NO_KEYS, build_gateway_app
from serving.gateway.completion import Services
from serving.gateway.http_protocol import Door
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.server import GatewayServer, listen
from serving.gateway.upstream import UpstreamClient
from serving.tracing.otlp import Tracing
from serving.tracing.span_log import SpanLog
from tests.unit.gateway.fake_engine import FakeEngine, fake_engine
from tests.unit.scheduler.control_plane import LANES, ControlPlane, control_plane, until

MODEL = "smollm2-135m"
Message = MutableMapping[str, Any]


class Way(StrEnum):
    """How callers reach the gateway."""

    ASGI = "asgi"
    SOCKET = "socket"


way = Way.ASGI  # set by the fixture


@dataclass(frozen=True)
class OwnServer:
    """A gateway's server on a socket."""

    application: ASGIApp
    address: tuple[str, int]
    server: GatewayServer

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """The requests it is at."""
        return self.server.server_state.tasks

    @property
    def connections(self) -> set[Any]:
        return self.server.server_state.connections

    def leave(self) -> None:
        self.server.should_exit = True


@contextlib.asynccontextmanager
async def own_server(
    app: ASGIApp, metrics: GatewayMetrics, config: GatewayConfig
) -> AsyncIterator[OwnServer]:
    """The gateway's server for an application, until the block is left."""
    door = Door(
        config.max_connections, config.header_timeout_s, config.client_stall_timeout_s, metrics.refused
    )
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    server = GatewayServer(app, listener, door, drain_timeout_s=10)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield OwnServer(app, address, server)
    finally:
        server.should_exit = True
        await serving


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

    async def call(self, app: ASGIApp | OwnServer) -> None:
        if isinstance(app, OwnServer):
            await self._call_over_socket(app)
            return
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

    async def _call_over_socket(self, server: OwnServer) -> None:
        reader, writer = await asyncio.open_connection(*server.address)
        parts = [self.body] if self.body_parts is None else self.body_parts
        # An upload that is not whole promises a byte that never comes.
        length = sum(map(len, parts)) + (self.body_parts is not None)
        headers = self.headers | ({"content-length": str(length)} if length else {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"{self.method} {self.path} HTTP/1.1\r\n{lines}\r\n".encode() + b"".join(parts))
        if self.is_cut_off:
            await until(lambda: bool(server.tasks))
            writer.transport.abort()
        answered = asyncio.create_task(self._read_answer(reader))
        gone = asyncio.create_task(self.gone.wait())
        try:
            await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                answered.result()
        finally:
            gone.cancel()
            answered.cancel()
            writer.close()
        ours = writer.get_extra_info("sockname")
        await until(lambda: ours not in [connection.client for connection in server.connections])
        for _ in range(20):  # what its end sets off
            await asyncio.sleep(0)

    async def _read_answer(self, reader: asyncio.StreamReader) -> None:
        parser = httptools.HttpResponseParser(self)
        while not self.is_complete:
            data = await reader.read(65_536)
            if not data:
                return
            parser.feed_data(data)
            if self.status is None:
                self.status = parser.get_status_code() or None
        self.gone.set()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name not in (b"date", b"transfer-encoding"):  # the server's own
            self.answer_headers[name.decode()] = value.decode()

    def on_headers_complete(self) -> None:
        self.is_complete = self.method == "HEAD"  # nothing follows, whatever the length it says

    def on_body(self, data: bytes) -> None:
        self.got += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    # ASGI

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
    app: ASGIApp | OwnServer
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
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(upstream.close)
            door = (
                app
                if way is Way.ASGI
                else await opened.enter_async_context(own_server(app, metrics, config.gateway))
            )
            yield GatewayLab(door, plane, engine, metrics, spans)
            await until(lambda: plane.counts == (0, 0))
            await until(lambda: engine.num_open == 0)
