"""A refusal says so by its status, streamed or not.

vLLM sends a stream's head before it checks most options, and then the refusal as the first event of a 200.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

EVENT = b"data: "


def refuse_by_status(app: ASGIApp) -> ASGIApp:
    """The application, with each stream's head kept back until its first event, and 4xx if that is a refusal."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        head: Message | None = None
        is_refused = False

        async def send_checked(message: Message) -> None:
            nonlocal head, is_refused
            if is_refused:
                return
            if message["type"] == "http.response.start" and _is_stream(message):
                head = message
                return
            if head is not None:
                if (refusal := _refusal(message.get("body", b""))) is not None:
                    is_refused = True
                    await refusal(scope, receive, send)
                    return
                await send(head)
                head = None
            await send(message)

        await app(scope, receive, send_checked)

    return wrapped


def _is_stream(head: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head["headers"]
    )


def _refusal(body: bytes) -> Response | None:
    """What vLLM answers without a stream, if its first event is a client's mistake."""
    if not body.startswith(EVENT + b'{"error"'):
        return None
    event = body.removeprefix(EVENT).split(b"\n\n", 1)[0]
    code: Any = json.loads(event)["error"]["code"]
    return Response(event, code, media_type="application/json") if 400 <= code < 500 else None
