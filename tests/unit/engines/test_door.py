"""The replica's own door: who is open at it, and who comes too late to be why the engine died."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.engines.door import Door
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio


def client(door: Door) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://replica")


async def test_a_request_is_open_before_the_engine_has_said_anything() -> None:
    goes_on = asyncio.Event()

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await goes_on.wait()
        await Response()(scope, receive, send)

    door = Door(engine, check=lambda: None)
    async with client(door) as one:
        asking = asyncio.create_task(one.post("/v1/completions"))
        await until(lambda: door.num_open == 1)
        goes_on.set()
        await asking
        await one.get("/metrics")
    assert door.num_open == 0


async def test_one_that_finds_the_engine_dead_is_told_that_it_was_not_begun() -> None:
    def check() -> None:
        raise RuntimeError("the engine died")

    door = Door(Response(), check)
    async with client(door) as one:
        answer = await one.post("/v1/completions")
        assert (answer.status_code, answer.headers["x-tandem-not-begun"]) == (503, "1")
        assert (await one.get("/health")).status_code == 200, "the engine's own word"
    assert door.num_open == 0


@pytest.mark.parametrize("has_head", [False, True])
async def test_who_has_nothing_when_the_replica_goes_is_sent_elsewhere(has_head: bool) -> None:
    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        if has_head:  # of a stream it comes before the first token
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    door = Door(engine, check=lambda: None)
    async with client(door) as one:
        asking = asyncio.create_task(one.post("/v1/completions"))
        await until(lambda: door.num_open == 1)
        door.close()
        for answer in (await asking, await one.post("/v1/completions")):
            assert (answer.status_code, answer.headers["x-tandem-not-begun"]) == (503, "1")
    assert door.num_open == 0


async def test_an_answer_that_has_begun_goes_on_when_the_replica_goes() -> None:
    goes_on, has_begun = asyncio.Event(), asyncio.Event()

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        has_begun.set()
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"b"})

    door = Door(engine, check=lambda: None)
    async with client(door) as one:
        asking = asyncio.create_task(one.post("/v1/completions"))
        await has_begun.wait()
        door.close()
        goes_on.set()
        assert (await asking).content == b"ab"
