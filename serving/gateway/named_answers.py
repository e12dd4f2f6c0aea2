"""Puts `x-request-id` on every answer: the client's own, or one made here."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
CLIENT_REQUEST_ID = "client_request_id"  # where in the scope's state it is
_HEADER = REQUEST_ID_HEADER.encode()


class NamedAnswers:
    """ASGI middleware outside of all others, so that errors have an id, too. One that is no id is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[CLIENT_REQUEST_ID] = request_id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (_HEADER, request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_named)
