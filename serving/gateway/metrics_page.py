"""What a gateway serves on its own port, behind the proxy: `/metrics`, and its requests for `tandem trace`."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.metrics.registry import CONTENT_TYPE, exposition
from serving.tracing.events import GatewaySpans
from serving.tracing.span_log import SpanLog


def build_own_app(registry: CollectorRegistry, spans: SpanLog) -> Starlette:
    """The application; `GET /tandem/spans?since_ns=` takes an instant of CLOCK_MONOTONIC."""

    async def metrics(_: Request) -> Response:
        return Response(exposition(registry), headers={"content-type": CONTENT_TYPE})

    async def requests(request: Request) -> Response:
        given = request.query_params.get("since_ns", "0")
        if not given.isdecimal():
            return JSONResponse({"error": f"since_ns={given!r} must be a number of ns"}, status_code=400)
        requests_since, is_complete = spans.since(int(given))
        body = msgspec.json.encode(GatewaySpans(spans.gateway_id, is_complete, requests_since))
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route("/metrics", metrics), Route("/tandem/spans", requests)])
