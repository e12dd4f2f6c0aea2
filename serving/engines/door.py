"""A replica's own door: the requests that are open at it, and who comes when the engine is dead already."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

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
        self.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= 1


def _refusal() -> JSONResponse:
    error = {"message": "the engine is dead", "type": "InternalServerError", "param": None, "code": 503}
    return JSONResponse({"error": error}, 503, headers={NOT_BEGUN_HEADER.decode(): "1"})
