"""The client's side of one request: its answer's bytes, and whether the client is still there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Receive, Send

from serving.core.errors import ERROR_SHAPES, Reason
from serving.gateway.errors import error_event, error_headers, error_object

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before the answer was whole."""


class ClientResponse:
    """Writes an answer in order: it begins once, and nothing follows its end.

    Attributes:
        placed: headers of any answer from now on: where the request runs.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self.placed: Mapping[str, str] = {}
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
        headers = {"content-type": content_type, **self.placed, **(extra or {})}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes) -> None:
        """Send a part of the body; returns when the client's connection takes more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last part of the body."""
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, reason: Reason, message: str, retry_after_s: float | None = None) -> None:
        """End with an error: a status while there still is one to choose, else an event in the stream."""
        if self._has_begun:
            await self.end(error_event(reason, message))
            return
        headers = error_headers(reason, retry_after_s)
        await self.begin(ERROR_SHAPES[reason].status, "application/json", headers)
        await self.end(json.dumps(error_object(reason, message)).encode())

    async def unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end, or cancel it when the client closes the connection.

        Raises:
            ClientGoneError: it did.
        """
        answer = asyncio.ensure_future(work)
        goodbye = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait({answer, goodbye}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ClientGoneError
            return answer.result()
        finally:
            goodbye.cancel()
            answer.cancel()
            # Wait for the lease and the connection to be given back before the request counts as ended.
            await asyncio.gather(answer, goodbye, return_exceptions=True)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
