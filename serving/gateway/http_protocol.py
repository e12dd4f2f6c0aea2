"""The client's connection: uvicorn's own protocol, with limits on what comes in and a short way out for streams.

uvicorn parses and frames. Here is what it has not: a bound on a request's head in bytes and in time, errors in the
shape of the OpenAI API, a connection that outlasts an `Upgrade` nobody wants, and bytes written without a task.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import termios
import uuid
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serving.core.errors import ERROR_SHAPES, Reason, RefusedError
from serving.gateway.client_response import CONNECTION, ClientStalledError, Pausable
from serving.gateway.errors import error_object, error_response
from serving.gateway.gate import MAX_HEADER_BYTES

# A client of a gateway that leaves has this long to send its next request on a connection it holds open.
IDLE_GRACE_S = 1.0
# Method, spaces, the protocol's name and line ends stand beside what MAX_HEADER_BYTES counts.
MAX_HEAD_BYTES = MAX_HEADER_BYTES + 1024
MAX_PIPELINED = 100  # requests of one connection that wait for the answers before theirs
STALL_GRACE_S = 1.0  # whoever relays an answer gives a client up first, and accounts for it
UNCHUNKED = ("0.9", "1.0")  # versions of HTTP whose clients know no chunks
END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
UPGRADE = re.compile(rb"\nupgrade[ \t]*:", re.IGNORECASE)
HIDDEN_UPGRADE = b"\nx-not-upgraded:"


@dataclass
class Door:
    """What the connections of one gateway share.

    Attributes:
        max_connections: above it a request is answered 503.
        header_timeout_s: from a connection, or the first byte of a further request, to the end of the head.
        client_stall_timeout_s: how long a client may take nothing of its answer.
        count_refusal: hears of what is turned away before it is a request.
        is_draining: the gateway leaves; each connection ends with its next answer.
    """

    max_connections: int
    header_timeout_s: float
    client_stall_timeout_s: float
    count_refusal: Callable[[Reason], None]
    is_draining: bool = False

    async def full(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection too many."""
        self.count_refusal(Reason.TOO_MANY_CONNECTIONS)
        message = f"{self.max_connections} connections are open (gateway.max_connections)"
        await error_response(RefusedError(Reason.TOO_MANY_CONNECTIONS, message, 1))(scope, receive, send)


class _HoldingTransport:
    """A transport that can hold back one write for the next: each is a call of the kernel, dearer than all else.

    Closed while more is to come, it tells its end first: to close then resets the connection, and takes from the
    client the answer that it has not read yet.

    Args:
        must_linger: whether more is to come.

    Attributes:
        holds_next: the next write is held.
        is_lingering: what comes is for nobody.
    """

    def __init__(self, transport: asyncio.Transport, must_linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._must_linger = must_linger
        self._held = b""
        self.holds_next = False
        self.is_lingering = False

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if not self.is_closing() and self._must_linger():
            self.is_lingering = True
            self._transport.write_eof()
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        if self.holds_next:
            self.holds_next, self._held = False, data
        else:
            self._transport.write(data)


class GatewayProtocol(HttpToolsProtocol):
    """One client's connection; also a `ClientConnection`."""

    def __init__(self, *args: Any, door: Door, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app: ASGIApp
        self.transport: _HoldingTransport  # type: ignore[assignment]
        self._door = door
        self._head = bytearray()  # of a request that is not yet given to the parser
        self._is_between = True  # requests: the parser holds no part of one
        self._is_in_head = False  # the parser holds a part of a head
        self._num_idle_bytes = 0  # given to the parser since it last made something of them
        self._has_made_something = False
        self._running: RequestResponseCycle | None = None  # `cycle` is the one that was parsed last
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._num_untaken_bytes = 0  # when that timer was set
        self._source: Pausable | None = None
        self._call_when_lost: Callable[[], None] | None = None

    # ClientConnection

    def hold_next(self) -> None:
        self.transport.holds_next = True

    def write_chunk(self, data: bytes, *, hold: bool = False) -> None:
        if not self.transport.is_closing():
            self.transport.holds_next = hold
            is_chunked = self._running is not None and self._running.chunked_encoding
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def cut_off(self) -> None:
        self._end_running()
        self.transport.abort()

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused

    async def until_taken(self) -> None:
        try:
            async with asyncio.timeout(self._door.client_stall_timeout_s):
                await self.flow.drain()
        except TimeoutError:
            raise ClientStalledError from None

    def hold_back(self, source: Pausable | None) -> None:
        self._source = source
        if source is not None and self.flow.write_paused:
            source.pause()

    def on_lost(self, call: Callable[[], None] | None) -> None:
        self._call_when_lost = call
        if call is not None and self.transport.is_closing():
            call()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_client()
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_awaiting_client()
        if self._source is not None:
            self._source.resume()

    # The connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_HoldingTransport(transport, self._must_linger))  # type: ignore[arg-type]
        if len(self.connections) > self._door.max_connections:
            self.app = self._door.full
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_awaiting_head()
        self._stop_awaiting_client()
        self._source = None
        self._end_running()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._call_when_lost is not None:
            call, self._call_when_lost = self._call_when_lost, None
            call()

    def _await_client(self) -> None:
        """Whatever the connection is at, it does not outlast a client that takes nothing."""
        self._stop_awaiting_client()
        limit_s = self._door.client_stall_timeout_s + STALL_GRACE_S
        self._num_untaken_bytes = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(limit_s, self._client_stalls)

    def _client_stalls(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_untaken_bytes:
            self._await_client()  # a whole answer may be long, and a client slow
        else:
            self.transport.abort()

    def _stop_awaiting_client(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _must_linger(self) -> bool:
        """Whether a body is still to come, though its request is answered; for a while it is read, then no more."""
        if self._is_between or self._is_in_head or self._is_busy:
            return False
        self.flow.resume_reading()
        self._await_head()
        return True

    def _end_running(self) -> None:
        """So that uvicorn writes no more of it, and does not call its end the application's fault."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def shutdown(self) -> None:
        """End the connection with the next answer whose head can say so."""
        if self._is_busy and not self.cycle.response_started:
            self.cycle.keep_alive = False
        elif not self._is_busy:
            self._close_soon()

    def _close_soon(self) -> None:
        """Not at once: a client that has not been told sends its next request as the last answer ends."""
        self.loop.call_later(IDLE_GRACE_S, self._close_if_idle)

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if self._is_busy or self._head or self.transport.is_closing():
            return
        if self._has_unread_bytes():
            self._close_soon()
        else:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        if not self._has_unread_bytes():
            super().timeout_keep_alive_handler()

    def _has_unread_bytes(self) -> bool:
        """Whether a request is there that a busy event loop has not read yet: to close now would be to lose it."""
        if self.transport.is_closing():
            return False
        num_bytes = array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.FIONREAD, num_bytes)
        return num_bytes[0] > 0

    # A request's head: given to the parser when it is whole

    def data_received(self, data: bytes) -> None:
        if self.transport.is_lingering:
            return
        if self._is_between:
            whole = self._whole_head(data)
            if whole is None:
                return
            data = whole
        self._has_made_something = False
        self._feed(data)
        if self.transport.is_closing():
            return
        if not self._is_between and not self._has_made_something:  # a pipelined head, or what follows a body
            self._num_idle_bytes += len(data)
            if self._num_idle_bytes > MAX_HEAD_BYTES:
                self._refuse(Reason.HEADERS_TOO_LARGE, _head_bound(self._num_idle_bytes))
                return
        is_idle = self._is_between and not self._is_busy  # what came was line ends, or the rest of a body
        if (self._is_in_head or is_idle) and self._head_timer is None:
            self._await_head()

    def _whole_head(self, data: bytes) -> bytes | None:
        """What has come, once it begins with a whole head; else it is kept, and None."""
        search_from = max(0, len(self._head) - 3)
        self._head += data
        end = END_OF_HEAD.search(self._head, search_from)
        num_bytes = end.end() if end else len(self._head)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse(Reason.HEADERS_TOO_LARGE, _head_bound(num_bytes))
            return None
        if end is None and self._head[:1].isalpha():  # else it is no HTTP, and not worth the wait
            if self._head_timer is None:
                self._unset_keepalive_if_required()
                self._await_head()
            return None
        whole = bytes(self._head)
        self._head.clear()
        if UPGRADE.search(whole, 0, num_bytes):
            # With that line the parser takes the body for another protocol's.
            whole = UPGRADE.sub(HIDDEN_UPGRADE, whole[:num_bytes]) + whole[num_bytes:]
        return whole

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # CONNECT, or an upgrade in a pipelined request: what follows it cannot be told from its body.
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between = False
        self._is_in_head = True
        self._note_progress()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else it stands behind the body, where nobody has looked for it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError(f"{MAX_PIPELINED} requests wait already")  # the parser tells `_feed`
        super().on_headers_complete()
        self._is_in_head = False
        self._note_progress()
        self._stop_awaiting_head()
        if self._door.is_draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._note_progress()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_between = True
        self._note_progress()
        self._stop_awaiting_head()
        super().on_message_complete()

    def _note_progress(self) -> None:
        self._has_made_something = True
        self._num_idle_bytes = 0

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        is_unchunked = cycle.scope["http_version"] in UNCHUNKED
        super()._start_asgi_task(cycle, cast("Any", _unchunked(app, cycle)) if is_unchunked else app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._door.is_draining and not self._is_busy:
            self._close_soon()
        if self.pipeline:
            self.flow.pause_reading()  # else each answer lets in many more requests
        elif not self._is_between and self._head_timer is None:
            self._await_head()  # a body that is still to come, though its request is answered

    # Refusals of what is no request

    def _await_head(self) -> None:
        self._stop_awaiting_head()
        self._head_timer = self.loop.call_later(self._door.header_timeout_s, self._head_is_late)

    def _stop_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_busy:
            self._await_head()  # an answer is under way, and has its own limits
        elif not self._is_between and not self._is_in_head:
            self.transport.abort()  # the body of what is answered already is not whole yet
        elif not self._head and not self._is_in_head:
            self.transport.close()  # it never said a word
        else:
            limit = f"gateway.header_timeout_s={self._door.header_timeout_s:g}"
            self._refuse(
                Reason.UPLOAD_TIMEOUT, f"the head of the request was not whole after that time ({limit})"
            )

    def send_400_response(self, msg: str) -> None:
        """As uvicorn calls it for what it cannot read."""
        self._refuse(Reason.BAD_REQUEST, "this is not a valid HTTP/1.1 request")

    def _refuse(self, reason: Reason, message: str) -> None:
        """Answer and close; behind an answer under way there is only the closing."""
        self._head.clear()
        self._stop_awaiting_head()
        if self.transport.is_closing():
            return
        if self._is_between or self._is_in_head:
            self._door.count_refusal(reason)
            may_answer = not self._is_busy
        else:  # the body; whoever reads it accounts for it
            is_read = self._is_busy and self.cycle is self._running
            may_answer = is_read and not self.cycle.response_started
            if may_answer:
                self._end_running()
        if may_answer:
            body = json.dumps(error_object(reason, message)).encode()
            head = STATUS_LINE[ERROR_SHAPES[reason].status]
            head += b"content-type: application/json\r\nx-tandem-reason: %b\r\n" % str(reason).encode()
            head += b"x-request-id: %b\r\n" % uuid.uuid4().hex.encode()
            head += b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(head + body)
        self.transport.close()


def _head_bound(num_bytes: int) -> str:
    return f"the head of the request has {num_bytes} bytes or more; at most {MAX_HEAD_BYTES}"


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """The application for a client that knows no chunks: a body without a length ends with the connection."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_as_it_is(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn's check of each part
            await send(message)

        await app(scope, receive, send_as_it_is)

    return wrapped
