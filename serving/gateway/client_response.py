"""The client's side of one request: its answer's bytes, and whether the client is still there."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from serving.core.errors import ERROR_SHAPES, Reason
from serving.gateway.errors import error_event, error_headers, error_object

# Where a server of ours puts a `ClientConnection` into the scope; others have none.
CONNECTION = "tandem.connection"


class ClientGoneError(Exception):
    """The client closed the connection before the answer was whole."""


class ClientStalledError(Exception):
    """The client is there and takes nothing of its answer."""


class Pausable(Protocol):
    """Where an answer's bytes come from."""

    def pause(self) -> None:
        """The client takes no more for now."""

    def resume(self) -> None:
        """It does again."""


class ClientConnection(Protocol):
    """The connection that an answer goes to, for bytes that need not wait for a turn of the event loop."""

    def hold_next(self) -> None:
        """Send what is written next together with what is written after it."""

    def write_chunk(self, data: bytes, *, hold: bool = False) -> None:
        """Send a part of a body whose head has been sent; `hold`: together with what is written after it."""

    def cut_off(self) -> None:
        """End the connection at once, whatever is still to be sent."""

    def hold_back(self, source: Pausable | None) -> None:
        """Pause `source` while the client takes no more; None: nobody any longer."""

    @property
    def is_full(self) -> bool:
        """The client has much to take before more is sent."""

    async def until_taken(self) -> None:
        """Wait until it has.

        Raises:
            ClientStalledError: it took nothing for too long.
        """

    def on_lost(self, call: Callable[[], None] | None) -> None:
        """Call `call` when the connection ends, or at once when it has; None: nobody any longer."""


class ClientResponse:
    """Writes an answer in order: it begins once, and nothing follows its end.

    Attributes:
        placed: headers of any answer from now on: where the request runs.
        connection: takes parts of the body without waiting; None where the server has no such thing.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.placed: Mapping[str, str] = {}
        self.connection: ClientConnection | None = scope.get("extensions", {}).get(CONNECTION)
        self._receive = receive
        self._send = send
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """Part of an answer is on its way: there is no second try, and no status to choose."""
        return self._has_begun

    async def begin(self, status: int, content_type: str, extra: Mapping[str, str] | None = None) -> None:
        """Send the answer's head, the first time."""
        if self._has_begun:
            return
        self._has_begun = True
        if self.connection is not None:
            self.connection.hold_next()  # a part of the body follows at once
        headers = {"content-type": content_type, **self.placed, **(extra or {})}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        """Send a part of the body; returns when the client's connection takes more."""
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def answer(
        self, status: int, content_type: str, body: bytes, extra: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer."""
        await self.begin(status, content_type, {**(extra or {}), "content-length": str(len(body))})
        await self.end(body)

    async def end(self, data: bytes = b"") -> None:
        """Send the rest of the body."""
        await self._put({"type": "http.response.body", "body": data})

    async def _put(self, message: Message) -> None:
        if self.connection is not None and self.connection.is_full:
            await self.connection.until_taken()  # the server would wait for ever
        await self._send(message)

    async def fail(self, reason: Reason, message: str, retry_after_s: float | None = None) -> None:
        """End with an error: a status while there still is one to choose, else an event in the stream."""
        if self._has_begun:
            await self.end(error_event(reason, message))
            return
        headers = error_headers(reason, retry_after_s)
        body = json.dumps(error_object(reason, message)).encode()
        await self.answer(ERROR_SHAPES[reason].status, "application/json", body, headers)

    def cut_off(self) -> None:
        """End it in the middle; without a connection to end, the server does so when the application returns."""
        if self.connection is not None:
            self.connection.cut_off()

    @contextlib.asynccontextmanager
    async def unless_gone(self) -> AsyncIterator[None]:
        """Run the block to its end, or cancel it when the client closes the connection.

        Raises:
            ClientGoneError: it did.
        """
        task = asyncio.current_task()
        assert task is not None
        is_gone = False

        def leave() -> None:
            nonlocal is_gone
            is_gone = True
            task.cancel()

        goodbye: asyncio.Task[None] | None = None
        try:
            if self.connection is not None:
                self.connection.on_lost(leave)
            else:
                goodbye = asyncio.create_task(self._disconnected())
                goodbye.add_done_callback(lambda done: None if done.cancelled() else leave())
            yield
        except asyncio.CancelledError:
            # As asyncio.timeout tells its own cancelling from that of others.
            if is_gone and task.uncancel() == 0:
                raise ClientGoneError from None
            raise
        finally:
            if self.connection is not None:
                self.connection.on_lost(None)
            if goodbye is not None:
                goodbye.cancel()

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
