"""The pages that the lab reads of each replica, for a server that somebody else runs.

Its metrics go through here, so that only the lab needs its key. Its steps cannot be seen: recordings have none.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.core.engine_paths import TRACE_PATHS
from serving.engines.attached.server import NOT_THERE, ServerClient, ServerError
from serving.engines.steps.recorder import StepRecorder
from serving.metrics.registry import CONTENT_TYPE


def agent_page(client: ServerClient, metrics_path: str, recorder: StepRecorder) -> ASGIApp:
    """`/metrics` as the server gives it, empty where it has none; `/health`; recordings without a step.

    Args:
        metrics_path: at the server.
    """

    async def metrics(_: Request) -> Response:
        try:
            status, body = await client.get(metrics_path)
        except ServerError as error:
            return PlainTextResponse(str(error), 503)
        if status in NOT_THERE:
            return Response(b"", media_type=CONTENT_TYPE)
        if status != 200:
            return PlainTextResponse(f"{metrics_path} answered {status}", 503)
        return Response(body, media_type=CONTENT_TYPE)

    async def health(_: Request) -> Response:
        try:
            await client.look()
        except ServerError as error:
            return PlainTextResponse(str(error), 503)
        return PlainTextResponse("ok")

    pages = Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])
    recordings = recorder.app()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_recording = scope["type"] == "http" and scope["path"].startswith(TRACE_PATHS)
        await (recordings if is_recording else pages)(scope, receive, send)

    return app
