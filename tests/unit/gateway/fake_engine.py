"""An engine replica that does, byte by byte, what a test tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request to the engine, and the means to answer it."""

    path: str
    headers: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(
        self,
        body: bytes,
        status: int = 200,
        content_type: str = "application/json",
        *,
        length: int | None = None,
    ) -> None:
        """A whole answer; a `length` that is not the body's promises bytes that never come."""
        size = len(body) if length is None else length
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {size}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def begin_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        """One chunk of the stream."""
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self.writer.drain()

    async def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def break_off(self) -> None:
        """Die: the connection is reset."""
        self.writer.transport.abort()

    async def until_left(self) -> None:
        """Fall silent until the gateway closes the connection."""
        assert await self.reader.read() == b""


Script = Callable[[Exchange], Awaitable[None]]


@dataclass
class FakeEngine:
    """Plays `script` for every request; `num_open` are the requests it is at.

    Attributes:
        is_healthy: what its health check says.
    """

    script: Script | None = None
    is_healthy: bool = True
    url: str = ""
    num_open: int = 0
    requests: list[Exchange] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await _head(reader):
                request_line, *lines = head.decode().split("\r\n")
                pairs = (line.split(": ", 1) for line in lines if line)
                headers = {name.lower(): value for name, value in pairs}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                exchange = Exchange(request_line.split(" ")[1], headers, body, reader, writer)
                if exchange.path == "/health":
                    await exchange.answer(b"", 200 if self.is_healthy else 503)
                    continue
                self.requests.append(exchange)
                assert self.script is not None, "the test sent a request that it has no script for"
                self.num_open += 1
                try:
                    with contextlib.suppress(
                        ConnectionError
                    ):  # the gateway left: an engine notices by its writes
                        await self.script(exchange)
                finally:
                    self.num_open -= 1
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The next request's head; empty when the connection is closed instead."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


@contextlib.asynccontextmanager
async def fake_engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield engine
    finally:
        server.close()


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text(word: str, index: int = 0) -> bytes:
    return event({"choices": [{"index": index, "delta": {"content": word}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"


def plays(*chunks: bytes) -> Script:
    """Streams these chunks and ends well."""

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for chunk in chunks:
            await exchange.send(chunk)
        await exchange.end_stream()

    return script


def answers(body: bytes, status: int = 200, content_type: str = "application/json") -> Script:
    """Gives this whole answer."""

    async def script(exchange: Exchange) -> None:
        await exchange.answer(body, status, content_type)

    return script


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first script, and so on; the last one for all that follow."""
    left = list(scripts)

    async def script(exchange: Exchange) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(exchange)

    return script


async def dies_at_once(exchange: Exchange) -> None:
    """Takes the request and breaks off."""
    exchange.break_off()


async def stays_silent(exchange: Exchange) -> None:
    """Takes the request and says nothing."""
    await exchange.until_left()
