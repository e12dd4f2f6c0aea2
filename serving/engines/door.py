"""A replica's own door: the requests that are open at it, and who comes when the engine is dead already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.core.engine_paths import NOT_BEGUN_HEADER

API_PREFIX = "/v1/"


class Door:
    """In front of an engine's application.

    Args:
        check: raises a RuntimeError when the engine is dead.

    Attributes:
        num_open: requests to the API whose answer is not whole. The engine's own count comes with its first output,
            and so it lacks those in their first step.
    """

    def __init__(self, app: ASGIApp, check: Callable[[], None]) -> None:
        self.num_open = 0
        self._app = app
        self._check = check
        self._is_closed = False
        self._unanswered: set[asyncio.Task[object]] = set()

    def close(self) -> None:
        """The replica goes, though its engine is well: who has nothing of an answer is sent elsewhere."""
        self._is_closed = True
        for task in self._unanswered:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; 503 with `x-tandem-not-begun` when the engine had died before the request came."""
        if scope["type"] != "http" or not scope["path"].startswith(API_PREFIX):
            await self._app(scope, receive, send)
            return
        try:
            self._check()
        except RuntimeError:
            await _refusal()(scope, receive, send)
            return
        if self._is_closed:
            await _refusal()(scope, receive, send)
            return
        task, head = asyncio.current_task(), list[Message]()
        assert task is not None

        async def send_from_body_on(message: Message) -> None:
            if task in self._unanswered and message["type"] == "http.response.start":
                head.append(message)  # of a stream it comes before the first token
                return
            if task in self._unanswered:
                self._unanswered.discard(task)
                await send(head[0])
            await send(message)

        self.num_open += 1
        self._unanswered.add(task)
        try:
            await self._app(scope, receive, send_from_body_on)
        except asyncio.CancelledError:
            if not self._is_closed or task not in self._unanswered:
                raise
            task.uncancel()
            await _refusal()(scope, receive, send)
        finally:
            self._unanswered.discard(task)
            self.num_open -= 1


def _refusal() -> JSONResponse:
    error = {"message": "the engine is gone", "type": "InternalServerError", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, headers={NOT_BEGUN_HEADER.decode(): "1"})
