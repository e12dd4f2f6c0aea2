"""What a replica's port serves of an engine's application; tests/e2e/test_vllm_routes.py asks vLLM itself."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from serving.engines.route_filter import LAB_ROUTES, only_lab_routes
from tests.unit.gateway.gateway_lab import Caller

pytestmark = pytest.mark.anyio


async def anything(_: Request) -> Response:
    return PlainTextResponse("the engine answered")


EVERYTHING = Starlette(routes=[Route("/{path:path}", anything, methods=["GET", "POST", "PUT"])])


@pytest.mark.parametrize(("method", "path"), sorted(LAB_ROUTES))
async def test_the_labs_routes_reach_the_engine(method: str, path: str) -> None:
    caller = Caller(path, b"", method)
    await caller.call(only_lab_routes(EVERYTHING))
    assert (caller.status, caller.got) == (200, b"the engine answered")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics/x"),
        ("POST", "/metrics"),
        ("GET", "/v1/completions/"),
        ("POST", "//v1/completions"),
        ("GET", "/static/x"),
        ("PUT", "/v1/completions"),
    ],
)
async def test_what_only_resembles_a_route_of_the_lab_is_404(method: str, path: str) -> None:
    caller = Caller(path, b"", method)
    await caller.call(only_lab_routes(EVERYTHING))
    assert caller.status == 404


async def test_no_websocket_reaches_the_engine() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "query_string": b""}
    await only_lab_routes(EVERYTHING)(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]
