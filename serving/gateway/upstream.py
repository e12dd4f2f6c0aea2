"""One request to one engine replica: its answer comes by callback, with a limit on every silence."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache, lru_cache
from typing import cast
from urllib.parse import urlsplit

import httptools

from serving.config import GatewayConfig
from serving.core.engine_paths import NOT_BEGUN_HEADER
from serving.core.errors import Reason, UpstreamError
from serving.gateway.client_response import ClientStalledError

IDLE_CONNECTION_S = 15.0  # less than a replica keeps one open (`serving/http_server.py`)
HEALTH_PATH = "/health"
MAX_KEPT_BYTES = 256 * 1024  # received and not yet taken; above it the replica has to wait

Sink = Callable[[bytes, bool], None]  # a block, and whether it is the last


class UpstreamAnswer:
    """A replica's answer: head first, then the body block by block, each with its limit.

    A block is what the network brought at once: any number of events, and parts of them.

    Attributes:
        status: of the head, once `head` has returned.
        content_type: likewise.
        was_begun: the engine may have begun with the request: its replica does not say that it has not.
    """

    def __init__(self, url: str, config: GatewayConfig, *, is_stream: bool) -> None:
        self.status = 0
        self.content_type = "application/json"
        self.was_begun = True
        self._url = url
        self._config = config
        self._is_stream = is_stream
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._blocks: list[bytes] = []
        self._num_kept_bytes = 0
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._fault: Exception | None = None
        self._has_head = False
        self._is_whole = False
        self._phase = "first byte"
        self._limit_s = config.first_byte_timeout_s if is_stream else config.answer_timeout_s
        self._heard_at_s = self._loop.time()
        self._paused_at_s: float | None = None  # the client takes no more
        self._timer = self._loop.call_later(self._limit_s, self._look)

    # For whoever relays it

    async def head(self) -> None:
        """Wait for the head.

        Raises:
            UpstreamError: it did not come, or not in time.
        """
        while not self._has_head and self._fault is None:
            await self._news()
        self._raise_fault()

    async def block(self) -> bytes | None:
        """The next block of the body; None at its end.

        Raises:
            UpstreamError: the answer broke off, or fell silent.
        """
        while not self._blocks and not self._is_whole and self._fault is None:
            await self._news()
        if self._blocks:
            return self._take()
        self._raise_fault()
        return None

    async def pour(self, sink: Sink) -> None:
        """Give each block to `sink` as it comes, from the very callback that received it, to the end of the body.

        Raises:
            UpstreamError: the answer broke off, or fell silent; or `sink` raised it.
        """
        self._sink = sink
        if self._blocks:
            sink(self._take(), self._is_whole)
        while not self._is_whole and self._fault is None:
            await self._news()
        self._raise_fault()

    def pause(self) -> None:
        """Let the replica wait: the client takes no more for now."""
        if self._paused_at_s is None and self._connection is not None and not self._is_whole:
            self._paused_at_s = self._loop.time()
            self._connection.pause()
            self._set_timer(self._config.client_stall_timeout_s)

    def resume(self) -> None:
        """The client takes more again."""
        if self._paused_at_s is not None:
            self._paused_at_s = None
            self._heard_at_s = self._loop.time()
            self._set_timer(self._limit_s)
            if self._connection is not None:
                self._connection.resume()

    # For the connection it comes by

    def begin(self, connection: _Connection) -> None:
        """The request is on its way."""
        self._connection = connection
        self._heard_at_s = self._loop.time()

    def take_head(self, status: int, content_type: str | None, *, was_begun: bool = True) -> None:
        """The head has come."""
        self.status = status
        self.was_begun = was_begun
        self.content_type = content_type or self.content_type
        self._has_head = True
        self._heard_at_s = self._loop.time()
        self._wake()

    def take_block(self, block: bytes, *, is_last: bool) -> None:
        """A part of the body has come."""
        self._heard_at_s = self._loop.time()
        if self._phase == "first byte":
            self._phase, self._limit_s = "next byte", self._config.idle_timeout_s
            self._set_timer(self._limit_s)
        if self._sink is None:
            self._blocks.append(block)
            self._num_kept_bytes += len(block)
            if self._num_kept_bytes > MAX_KEPT_BYTES and self._connection is not None:
                self._connection.pause()
            self._wake()
            return
        try:
            self._sink(block, is_last)
        except Exception as error:  # noqa: BLE001 - raised where the end is awaited, not in the event loop
            self.break_off(error)

    def finish(self) -> None:
        """The whole body has come."""
        self._is_whole = True
        self._timer.cancel()
        self._wake()

    def break_off(self, fault: Exception) -> None:
        """No more will come."""
        if self._fault is None and not self._is_whole:
            self._fault = fault
        self._timer.cancel()
        self._wake()

    def lose(self, why: str) -> None:
        """The connection broke."""
        message = f"the engine replica broke before its {self._phase}: {why}"
        self.break_off(UpstreamError(Reason.UPSTREAM_BROKE, message, was_begun=True))

    # Waiting

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        block = b"".join(self._blocks)
        self._blocks.clear()
        if (
            self._num_kept_bytes > MAX_KEPT_BYTES
            and self._connection is not None
            and self._paused_at_s is None
        ):
            self._connection.resume()
        self._num_kept_bytes = 0
        return block

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _look(self) -> None:
        """Whether it has been silent for too long; the one timer of an answer, which no block sets anew."""
        now_s = self._loop.time()
        if self._paused_at_s is not None:
            left_s = self._config.client_stall_timeout_s - (now_s - self._paused_at_s)
            if left_s <= 0:
                self.break_off(ClientStalledError())
                return
        else:
            left_s = self._limit_s - (now_s - self._heard_at_s)
            if left_s <= 0:
                self.break_off(self._silence())
                return
        self._set_timer(left_s)

    def _set_timer(self, after_s: float) -> None:
        self._timer.cancel()
        if not self._is_whole and self._fault is None:
            self._timer = self._loop.call_later(after_s, self._look)

    def _silence(self) -> UpstreamError:
        config = self._config
        if not self._is_stream and self._phase == "first byte":
            # Its head comes after the whole generation: that it is long is no fault of the replica.
            return UpstreamError(
                Reason.UPSTREAM_TIMEOUT,
                f"the answer was not ready in time (gateway.answer_timeout_s={config.answer_timeout_s:g})",
                blames_replica=False,
                is_final=True,
            )
        limits = f"gateway.first_byte_timeout_s={config.first_byte_timeout_s:g}, "
        limits += f"gateway.idle_timeout_s={config.idle_timeout_s:g}"
        return UpstreamError(Reason.UPSTREAM_TIMEOUT, f"the engine sent no {self._phase} in time ({limits})")


class _Connection(asyncio.Protocol):
    """One connection to a replica, for one exchange after the other.

    Args:
        on_lost: hears of its end.
    """

    def __init__(self, on_lost: Callable[[_Connection], None]) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: UpstreamAnswer | None = None
        self._content_type: str | None = None
        self._was_begun = True
        self._body: list[bytes] = []
        self._ends_by_close = True
        self._is_paused = False
        self.is_open = False
        self.free_since_s = 0.0

    def send(self, head: bytes, body: bytes, answer: UpstreamAnswer) -> None:
        """Send a request whose answer goes to `answer`."""
        assert self._transport is not None
        self._answer = answer
        self._content_type = None
        self._was_begun = True
        self._ends_by_close = True
        answer.begin(self)
        self._transport.writelines((head, body))

    def is_free(self) -> bool:
        """Whether it can carry another exchange: the last one came to its end."""
        return self.is_open and self._answer is None

    def close(self) -> None:
        """Close it now, whatever is under way."""
        self._answer = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self._is_paused and self.is_open and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and self.is_open and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # nobody has asked for it
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.lose(f"not HTTP: {error}")
            self.close()
            return
        self._hand_over(answer)

    def _hand_over(self, answer: UpstreamAnswer) -> None:
        if self._body:
            block = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            answer.take_block(block, is_last=self._answer is None)
        if self._answer is None:  # the message was complete
            answer.finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        answer, self._answer = self._answer, None
        self._on_lost(self)
        if answer is None:
            return
        if error is None and self._ends_by_close and answer.status:
            answer.finish()
        else:
            answer.lose(str(error) if error else "the connection was closed")

    # httptools, while it is fed

    def on_message_begin(self) -> None:
        if self._answer is None:
            self.is_open = False  # more than was asked for: the next answer could not be told from it

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._content_type = value.decode("latin-1")
            case _ if name.lower() == NOT_BEGUN_HEADER:
                self._was_begun = False
            case b"content-length" | b"transfer-encoding":
                self._ends_by_close = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._answer is not None and status >= 200:
            self._answer.take_head(status, self._content_type, was_begun=self._was_begun)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return  # 100 Continue: the answer follows
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._answer = None


class UpstreamClient:
    """Connections to the replicas, kept for further requests; one client per gateway.

    Their number has no bound of its own: the scheduler bounds what runs, and a second bound here would be a queue
    that nobody sees.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._free: dict[tuple[str, int, bool], dict[_Connection, None]] = {}
        self._all: set[_Connection] = set()

    async def close(self) -> None:
        """Close all connections."""
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def post(
        self, url: str, body: bytes, request_id: str, carried: Mapping[str, str], *, is_stream: bool
    ) -> AsyncIterator[UpstreamAnswer]:
        """Send a request; leaving the block before the answer's end closes the connection: the generation stops.

        Args:
            carried: further headers; with `connection: close` it has a connection of its own.
            is_stream: events are wanted, so a first byte comes long before the whole answer.

        Raises:
            UpstreamError: no connection, no answer in time, or the answer broke off.
        """
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": request_id,
            **carried,
        }
        async with self._ask("POST", url, headers, body, is_stream=is_stream) as answer:
            yield answer

    async def is_healthy(self, replica_url: str) -> bool:
        """Whether a replica's own health check says so, within the limit for a connection."""
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                async with self._ask("GET", replica_url + HEALTH_PATH, {}, b"", is_stream=False) as answer:
                    return answer.status == 200
        except (UpstreamError, TimeoutError):
            return False

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes, *, is_stream: bool
    ) -> AsyncIterator[UpstreamAnswer]:
        host, port, is_tls, path, authority = _parts(url)
        is_kept = headers.get("connection") != "close"
        connection = await self._connect(host, port, is_tls, url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{method} {path} HTTP/1.1\r\nhost: {authority}\r\n{lines}\r\n"
        answer = UpstreamAnswer(url, self._config, is_stream=is_stream)
        try:
            connection.send(head.encode("latin-1"), body, answer)
            await answer.head()
            yield answer
        finally:
            answer.finish()
            if is_kept and connection.is_free():
                connection.resume()
                connection.free_since_s = asyncio.get_running_loop().time()
                self._free.setdefault((host, port, is_tls), {})[connection] = None
            else:
                connection.close()

    async def _connect(self, host: str, port: int, is_tls: bool, url: str) -> _Connection:
        free = self._free.get((host, port, is_tls))
        loop = asyncio.get_running_loop()
        while free:
            connection, _ = free.popitem()
            if connection.is_free() and loop.time() - connection.free_since_s < IDLE_CONNECTION_S:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._forget), host, port, ssl=_tls() if is_tls else None
                )
        except TimeoutError as error:
            limit = f"gateway.connect_timeout_s={self._config.connect_timeout_s:g}"
            raise UpstreamError(
                Reason.UPSTREAM_TIMEOUT, f"the engine replica at {url} took no connection in time ({limit})"
            ) from error
        except OSError as error:
            raise UpstreamError(
                Reason.UPSTREAM_BROKE, f"the engine replica broke before its first byte: {error}"
            ) from error
        self._all.add(connection)
        return connection

    def _forget(self, connection: _Connection) -> None:
        self._all.discard(connection)
        for free in self._free.values():
            free.pop(connection, None)


@lru_cache(maxsize=4096)
def _parts(url: str) -> tuple[str, int, bool, str, str]:
    """Host, port, whether by TLS, path and authority of a replica's URL."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, parts.path, parts.netloc


@cache
def _tls() -> ssl.SSLContext:
    """Certificates are checked, by the authorities that OpenSSL knows here; `SSL_CERT_FILE` names others."""
    return ssl.create_default_context()
