"""The table from what happened to what the client gets, row by row, through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from serving.core.errors import ERROR_SHAPES, Reason
from serving.scheduler import channel as channel_module
from serving.scheduler import client as client_module
from serving.scheduler import service as service_module
from tests.unit.gateway.fake_engine import DONE, Exchange, answers, dies_at_once, stays_silent
from tests.unit.gateway.gateway_lab import MODEL, Caller, GatewayLab, gateway_lab
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {
    "model": f"{MODEL}:sequential",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
}


@contextlib.asynccontextmanager
async def busy(lab: GatewayLab) -> AsyncIterator[None]:
    """The sequential lane runs a request for the length of the block."""
    ends = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await ends.wait()
        await exchange.send(DONE)
        await exchange.end_stream()

    lab.engine.script = script
    async with lab.calling(ASKED | {"stream": True}):
        await until(lambda: lab.engine.num_open == 1)
        try:
            yield
        finally:
            ends.set()


async def asked_while_busy(lab: GatewayLab, **headers: str) -> Caller:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with busy(lab):
        return await lab.post(ASKED, headers=named)


async def one_more_of_a_tenant(lab: GatewayLab) -> Caller:
    async with busy(lab):
        waiting = asyncio.create_task(lab.post(ASKED))
        await until(lambda: lab.plane.counts == (1, 1))
        caller = await lab.post(ASKED)
    await waiting
    return caller


async def after_the_last_replica_left(lab: GatewayLab) -> Caller:
    lab.plane.service._core.replica_gone("s")  # noqa: SLF001 - as if its connection had ended
    return await lab.post(ASKED)


async def while_draining(lab: GatewayLab) -> Caller:
    assert await lab.plane.service.drain()
    return await lab.post(ASKED)


async def without_a_scheduler(lab: GatewayLab) -> Caller:
    await lab.plane.stop()
    caller = await lab.post(ASKED)
    await lab.plane.start()
    return caller


async def waiting_too_long(lab: GatewayLab) -> Caller:
    async with busy(lab):
        async with lab.calling(ASKED) as caller:
            await until(lambda: lab.plane.counts == (1, 1))
            lab.plane.clock.now_s += 31
        return caller


async def leaving_during_the_answer(lab: GatewayLab) -> Caller:
    lab.engine.script = stays_silent
    async with lab.calling(ASKED) as caller:
        await until(lambda: lab.engine.num_open == 1)
        caller.gone.set()
    return caller


def engine_that(script: Any, **asked: Any) -> Callable[[GatewayLab], Awaitable[Caller]]:
    async def situation(lab: GatewayLab) -> Caller:
        lab.engine.script = script
        return await lab.post(ASKED | asked)

    return situation


def posted(body: Any) -> Callable[[GatewayLab], Awaitable[Caller]]:
    return lambda lab: lab.post(body)


TOO_LONG = b'{"error": {"message": "This model\'s maximum context length is 2048 tokens.", "code": 400}}'
WRONG = b'{"error": {"message": "temperature must be non-negative", "code": 400}}'


@dataclass(frozen=True)
class Row:
    """A situation, and what the client and the metrics see of it; `status` None: nothing is sent."""

    name: str
    situation: Callable[[GatewayLab], Awaitable[Caller]]
    status: int | None
    reason: Reason
    outcome: str = "rejected"
    lane: str = ""
    says_when_to_come_back: bool = False
    is_the_engines: bool = False
    scheduler: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)


ROWS = [
    Row(
        "queue full",
        asked_while_busy,
        429,
        Reason.QUEUE_FULL,
        says_when_to_come_back=True,
        scheduler={"max_waiting_requests": 0},
    ),
    Row(
        "tenant over its share",
        one_more_of_a_tenant,
        429,
        Reason.TENANT_OVER_SHARE,
        says_when_to_come_back=True,
        scheduler={"tenant_queue_share": 0.1},
    ),
    Row(
        "may not wait",
        lambda lab: asked_while_busy(lab, x_max_queue_ms="0"),
        429,
        Reason.DEADLINE_UNREACHABLE,
        says_when_to_come_back=True,
    ),
    Row(
        "longer than may wait",
        asked_while_busy,
        413,
        Reason.REQUEST_TOO_LONG,
        scheduler={"max_waiting_tokens": 1},
    ),
    Row(
        "longer than the model takes",
        engine_that(answers(TOO_LONG, 400)),
        400,
        Reason.REQUEST_TOO_LONG,
        lane="sequential",
        is_the_engines=True,
    ),
    Row(
        "refused by the engine",
        engine_that(answers(WRONG, 400)),
        400,
        Reason.BAD_REQUEST,
        lane="sequential",
        is_the_engines=True,
    ),
    Row(
        "no replica",
        after_the_last_replica_left,
        503,
        Reason.NO_REPLICA_READY,
        says_when_to_come_back=True,
    ),
    Row("draining", while_draining, 503, Reason.DRAINING),
    Row(
        "no scheduler",
        without_a_scheduler,
        503,
        Reason.SCHEDULER_UNREACHABLE,
        says_when_to_come_back=True,
    ),
    Row("waited too long", waiting_too_long, 504, Reason.QUEUE_TIMEOUT, scheduler={"max_queue_wait_s": 30}),
    Row("engine broke", engine_that(dies_at_once), 502, Reason.UPSTREAM_BROKE, "failed", "sequential"),
    Row(
        "engine answered 500",
        engine_that(answers(b"oops", 500)),
        502,
        Reason.UPSTREAM_BROKE,
        "failed",
        "sequential",
    ),
    Row(
        "engine silent",
        engine_that(stays_silent, stream=True),
        504,
        Reason.UPSTREAM_TIMEOUT,
        "failed",
        "sequential",
        gateway={"first_byte_timeout_s": 0.02},
    ),
    Row(
        "whole answer not ready",
        engine_that(stays_silent),
        504,
        Reason.UPSTREAM_TIMEOUT,
        "failed",
        "sequential",
        gateway={"answer_timeout_s": 0.02},
    ),
    Row("client left", leaving_during_the_answer, None, Reason.CLIENT_CLOSED, "cancelled", "sequential"),
    Row("not JSON", posted(b"{"), 400, Reason.BAD_REQUEST),
    Row(
        "a header out of bounds",
        lambda lab: lab.post(ASKED, headers={"x-max-queue-ms": "-1"}),
        400,
        Reason.BAD_REQUEST,
    ),
    Row("unknown model", posted({"model": "gpt-4"}), 404, Reason.UNKNOWN_MODEL),
    Row(
        "body too large",
        posted({"model": MODEL, "prompt": "x" * 2000}),
        413,
        Reason.REQUEST_TOO_LARGE,
        gateway={"max_body_bytes": 1024},
    ),
    Row(
        "body too slow",
        lambda lab: lab.post(b"", body_parts=[b'{"model":']),
        408,
        Reason.UPLOAD_TIMEOUT,
        gateway={"upload_timeout_s": 0.02},
    ),
    Row(
        "headers too long",
        lambda lab: lab.post(ASKED, headers={"x-long": "x" * 32_768}),
        431,
        Reason.HEADERS_TOO_LARGE,
    ),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ALONE_LIMIT_S", 0.02)
    monkeypatch.setattr(client_module, "ALONE_TICK_S", 0.005)
    monkeypatch.setattr(channel_module, "RECONNECT_DELAY_S", 0.01)
    monkeypatch.setattr(service_module, "TICK_S", 0.01)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_status(row: Row) -> None:
    async with gateway_lab(scheduler=row.scheduler, **row.gateway) as lab:
        caller = await row.situation(lab)
        assert caller.status == row.status
        # Beside it at most the request that made the lane busy.
        others: list[dict[tuple[str, str, str], float]] = [{("sequential", "completed", ""): 1}, {}]
        ended = lab.ended
        assert ended.pop((row.lane, row.outcome, str(row.reason))) == 1
        assert ended in others or row.reason is Reason.TENANT_OVER_SHARE
        if row.status is None:
            return
        assert caller.answer_headers["x-tandem-reason"] == str(row.reason)
        assert ("retry-after" in caller.answer_headers) == row.says_when_to_come_back
        if not row.is_the_engines:
            assert caller.error_code == str(row.reason)
            assert caller.json["error"]["type"] == ERROR_SHAPES[row.reason].type


def test_every_reason_has_a_row() -> None:
    # In test_app, test_completion, test_gate, test_reroute, test_server.
    elsewhere = {Reason.NOT_FOUND, Reason.METHOD_NOT_ALLOWED, Reason.INTERNAL, Reason.INVALID_API_KEY}
    elsewhere |= {Reason.TOO_MANY_CONNECTIONS, Reason.CLIENT_STALLED, Reason.ENGINE_DIED}
    assert {row.reason for row in ROWS} | elsewhere == set(Reason)


def test_a_clients_mistake_is_never_a_5xx_and_load_never_a_plain_4xx() -> None:
    for row in ROWS:
        status = row.status or 499
        if ERROR_SHAPES[row.reason].type == "invalid_request_error":
            assert 400 <= status < 500, row.name
            assert not row.says_when_to_come_back, row.name
        elif row.outcome == "rejected":
            assert status in (429, 503, 504), row.name
