"""A refusal in a stream's first event, as vLLM sends it, becomes the response's status; all else passes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.engines.stream_refusal import refuse_by_status

pytestmark = pytest.mark.anyio


def refusal(code: int) -> str:
    return "data: " + json.dumps({"error": {"message": "min_p", "code": code}}) + "\n\n"


def answering(*events: str) -> ASGIApp:
    """An application that streams these events."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def stream() -> AsyncIterator[str]:
            for event in events:
                yield event

        await StreamingResponse(stream(), media_type="text/event-stream")(scope, receive, send)

    return app


async def answer(app: ASGIApp) -> httpx.Response:
    transport = httpx.ASGITransport(refuse_by_status(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        return await client.post("/v1/completions")


async def test_a_refusal_is_no_stream() -> None:
    found = await answer(answering(refusal(400), "data: [DONE]\n\n"))
    assert found.status_code == 400
    assert found.headers["content-type"] == "application/json"
    assert found.json() == {"error": {"message": "min_p", "code": 400}}


@pytest.mark.parametrize(
    "events",
    [
        ("data: {}\n\n", "data: [DONE]\n\n"),
        ("data: {}\n\n", refusal(400)),  # too late: the client has read the head
        (refusal(500), "data: [DONE]\n\n"),  # the engine's fault
        (": ping\n\n", refusal(400)),
        (),
    ],
)
async def test_other_streams_are_as_they_were(events: tuple[str, ...]) -> None:
    found = await answer(answering(*events))
    assert (found.status_code, found.text) == (200, "".join(events))


async def test_what_is_no_stream_is_as_it_was() -> None:
    found = await answer(PlainTextResponse(refusal(400), 418))
    assert (found.status_code, found.text) == (418, refusal(400))
