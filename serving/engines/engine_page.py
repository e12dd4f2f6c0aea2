"""The pages with the engine's own counts and instants, put in front of its application."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.core.engine_paths import SENT_PATH, TALLY_PATH, TRACE_PATHS
from serving.engines.base import EngineTally
from serving.engines.steps.recorder import StepRecorder


def with_engine_page(app: ASGIApp, tally: EngineTally, recorder: StepRecorder) -> ASGIApp:
    """The engine's application, with `/tandem/engine`, `/tandem/engine/sent?request_id=` and recordings."""
    recordings = recorder.app()

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> Any:
        path = scope["path"] if scope["type"] == "http" else None
        if path == TALLY_PATH:
            return await JSONResponse(tally.as_json())(scope, receive, send)
        if path == SENT_PATH:
            (request_id,) = parse_qs(scope["query_string"].decode()).get("request_id", [None])[:1]
            page = Response(tally.sent_as_json(request_id), media_type="application/json")
            return await page(scope, receive, send)
        if path is not None and path.startswith(TRACE_PATHS):
            return await recordings(scope, receive, send)
        return await app(scope, receive, send)

    return wrapped
