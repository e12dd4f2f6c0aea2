"""A replica that breaks before its first byte: once more on another, and never after the first byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serving.core.sse import EventSplitter
from tests.unit.gateway.fake_engine import (
    DONE,
    USAGE,
    Exchange,
    FakeEngine,
    Script,
    answers,
    dies_at_once,
    event,
    fake_engine,
    in_turn,
    plays,
    stays_silent,
    text,
)
from tests.unit.gateway.gateway_lab import MODEL, GatewayLab, gateway_lab
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio

STREAM: dict[str, Any] = {
    "model": f"{MODEL}:batched",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
    "stream": True,
}
WELL = plays(text("a"), USAGE, DONE)


@pytest.fixture
async def second() -> AsyncIterator[FakeEngine]:
    """Another engine, for a second replica of the lane."""
    async with fake_engine() as engine:
        yield engine


def reroutes(lab: GatewayLab) -> dict[str, float]:
    """Reroutes by outcome."""
    outcomes = ("completed", "failed", "rejected", "cancelled")
    counts = {one: lab.value("tandem_reroutes_total", lane="batched", outcome=one) for one in outcomes}
    return {outcome: count for outcome, count in counts.items() if count}


async def _dies_within_its_first_event(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(USAGE + text("half")[:-3])
    exchange.break_off()


@pytest.mark.parametrize(
    "breaks",
    [
        dies_at_once,
        _dies_within_its_first_event,
        answers(b'{"error": {"message": "engine dead"}}', 500),
        answers(b"busy", 503, "text/plain"),
        answers(b'{"error": "x"}'),
        plays(event({"error": {"message": "x"}}), DONE),
    ],
    ids=["reset", "half an event", "500", "503", "200 with an error", "an error event"],
)
async def test_it_runs_on_another_replica(breaks: Any, second: FakeEngine) -> None:
    async with gateway_lab() as lab, lab.plane.replica("b2", "batched", url=second.url):
        second.script = lab.engine.script = in_turn(breaks, WELL)
        caller = await lab.post(STREAM)
        assert (caller.status, caller.got) == (200, text("a") + DONE)
        (one,), (other,) = lab.engine.requests, second.requests
        assert caller.answer_headers["x-tandem-replica"] in ("b", "b2")
        assert one.body == other.body
        assert one.headers["x-request-id"] != other.headers["x-request-id"]
        assert lab.ended == {("batched", "completed", ""): 1}
        assert reroutes(lab) == {"completed": 1}
        await until(lambda: lab.plane.counts == (0, 0))
        failures = {one["replica"]: one["failures_in_a_row"] for one in lab.plane.lane("batched")["replicas"]}
        is_answer = breaks not in (dies_at_once, _dies_within_its_first_event)
        assert sorted(failures.values()) == [0, 0 if is_answer else 1], "the verdict is on the one that broke"


@pytest.mark.parametrize(
    "poisoned",
    [answers(b"oops", 500), plays(event({"error": {"message": "no such grammar"}}), DONE)],
    ids=["500", "an error event"],
)
async def test_what_one_request_makes_of_a_healthy_engine_opens_no_breaker(poisoned: Script) -> None:
    """One client's schema, six times in a row, made a good neighbour wait until the breaker closed."""
    async with gateway_lab(scheduler={"breaker_failures": 2}) as lab:
        lab.engine.script, lab.engine.is_healthy = poisoned, True
        for _ in range(6):
            assert (await lab.post(STREAM)).status == 502
        (replica,) = lab.plane.lane("batched")["replicas"]
        assert (replica["breaker"], replica["failures_in_a_row"]) == ("closed", 0)
        lab.engine.is_healthy = False
        assert (await lab.post(STREAM)).error_code == "engine_died"
        await until(lambda: bool(lab.plane.lane("batched")["replicas"][0]["breaker"] == "open"))


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "dies", [dies_at_once, answers(b'{"error": {"message": "EngineDeadError"}}', 500)], ids=["reset", "500"]
)
async def test_a_request_in_whose_first_step_the_engine_died_is_not_run_again(
    dies: Script, is_stream: bool, second: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be what killed it, and would kill the next one."""
    async with gateway_lab() as lab, lab.plane.replica("b2", "batched", url=second.url):
        for engine in (lab.engine, second):
            engine.script, engine.is_healthy = dies, False
        caller = await lab.post(STREAM | {"stream": is_stream})
        assert (caller.status, caller.error_code) == (502, "engine_died")
        assert caller.answer_headers["x-tandem-reason"] == "engine_died"
        (sent,) = lab.engine.requests + second.requests
        assert lab.ended == {("batched", "failed", "engine_died"): 1}
        assert reroutes(lab) == {}
        request_id = sent.headers["x-request-id"]
        await until(lambda: f"died with request {request_id} in its first step" in caplog.text)


async def test_a_request_that_found_the_engine_dead_runs_on_another(second: FakeEngine) -> None:
    async def refuses(exchange: Exchange) -> None:
        head = b"HTTP/1.1 503 X\r\nx-tandem-not-begun: 1\r\ncontent-length: 0\r\n\r\n"
        exchange.writer.write(head)
        await exchange.writer.drain()

    async with gateway_lab() as lab, lab.plane.replica("b2", "batched", url=second.url):
        lab.engine.is_healthy = second.is_healthy = False
        lab.engine.script = second.script = in_turn(refuses, WELL)
        assert (await lab.post(STREAM)).got == text("a") + DONE
        assert reroutes(lab) == {"completed": 1}


async def test_the_time_on_a_replica_that_broke_is_no_waiting(second: FakeEngine) -> None:
    """A reroute whose patience was shorter than the first try was refused, and counted that try as its wait."""

    async def breaks_late(exchange: Exchange) -> None:
        await asyncio.sleep(0.05)  # longer than the client wants to wait; a real clock runs here
        exchange.break_off()

    async with gateway_lab() as lab, lab.plane.replica("b2", "batched", url=second.url):
        lab.engine.script = second.script = in_turn(breaks_late, WELL)
        headers = {"x-max-queue-ms": "40"}
        assert (await lab.post(STREAM, headers=headers)).got == text("a") + DONE
        labels = {"lane": "batched", "band": "normal"}
        registry = lab.plane.service.metrics.registry
        assert registry.get_sample_value("tandem_queue_wait_seconds_count", labels) == 2
        waited_s = registry.get_sample_value("tandem_queue_wait_seconds_sum", labels)
        assert waited_s is not None
        assert waited_s < 0.05


async def test_a_lone_replica_gets_a_second_chance() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = in_turn(dies_at_once, WELL)
        assert (await lab.post(STREAM)).got == text("a") + DONE
        assert reroutes(lab) == {"completed": 1}


async def test_a_silent_replica_is_left_for_another(second: FakeEngine) -> None:
    async with (
        gateway_lab(first_byte_timeout_s=0.05) as lab,
        lab.plane.replica("b2", "batched", url=second.url),
    ):
        second.script = lab.engine.script = in_turn(stays_silent, WELL)
        assert (await lab.post(STREAM)).status == 200
        assert reroutes(lab) == {"completed": 1}


async def test_there_is_one_reroute_and_no_more() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = dies_at_once
        caller = await lab.post(STREAM)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert len(lab.engine.requests) == 2
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}
        assert reroutes(lab) == {"failed": 1}


async def test_after_the_first_byte_the_stream_ends_with_an_error(second: FakeEngine) -> None:
    async def breaks(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a"))
        exchange.break_off()

    async with gateway_lab() as lab, lab.plane.replica("b2", "batched", url=second.url):
        second.script = lab.engine.script = in_turn(breaks, WELL)
        caller = await lab.post(STREAM)
        first, last = EventSplitter().feed(caller.got)
        assert first == text("a")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broke"
        assert len(lab.engine.requests) + len(second.requests) == 1
        assert reroutes(lab) == {}


async def test_not_when_the_deadline_has_passed_meanwhile() -> None:
    async def breaks_late(exchange: Exchange) -> None:
        await asyncio.sleep(0.02)  # longer than the client wants to wait; a real clock runs here
        exchange.break_off()

    async with gateway_lab() as lab:
        lab.engine.script = breaks_late
        caller = await lab.post(STREAM, headers={"x-tandem-ttft-deadline-ms": "5"})
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert len(lab.engine.requests) == 1
        assert reroutes(lab) == {}


async def test_a_refused_second_try_gives_the_first_error() -> None:
    async with gateway_lab() as lab:

        async def breaks_and_leaves(exchange: Exchange) -> None:
            lab.plane.service._core.replica_gone("b")  # noqa: SLF001 - as if its connection had ended
            exchange.break_off()

        lab.engine.script = breaks_and_leaves
        caller = await lab.post(STREAM)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert "no reroute: no ready replica can serve this request" in caller.json["error"]["message"]
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}
        assert reroutes(lab) == {"rejected": 1}


async def test_a_client_that_leaves_during_the_second_try_is_cancelled() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = in_turn(dies_at_once, stays_silent)
        async with lab.calling(STREAM) as caller:
            await until(lambda: len(lab.engine.requests) == 2)
            caller.gone.set()
        assert lab.ended == {("batched", "cancelled", "client_closed"): 1}
        assert reroutes(lab) == {"cancelled": 1}


async def test_an_engines_refusal_of_the_second_try_is_told_as_such() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = in_turn(dies_at_once, answers(b'{"error": {"message": "no"}}', 400))
        caller = await lab.post(STREAM)
        assert (caller.status, caller.answer_headers["x-tandem-reason"]) == (400, "bad_request")
        assert reroutes(lab) == {"rejected": 1}
