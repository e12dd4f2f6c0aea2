"""What of an engine's own application a replica's port serves: what the lab uses, and nothing else.

vLLM's has some thirty routes more. Some stop, reconfigure or unload the engine, and none of them asks who calls;
on a cluster other hosts reach this port.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

LAB_ROUTES = frozenset(
    {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/metrics"),
    }
)


def only_lab_routes(app: ASGIApp) -> ASGIApp:
    """The application, with 404 for every other method and path, WebSockets included."""

    async def filtered(scope: Scope, receive: Receive, send: Send) -> Any:
        kind = scope["type"]
        if kind == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if kind == "http" and (scope["method"], scope["path"]) not in LAB_ROUTES:
            return await Response(status_code=404)(scope, receive, send)
        return await app(scope, receive, send)

    return filtered
