"""Completions through a gateway to an engine that behaves and misbehaves. Each ends with all counts at 0."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from serving.core.sse import EventSplitter, parse_event
from serving.gateway import relay
from serving.gateway.completion import Completion
from tests.unit.gateway.fake_engine import (
    DONE,
    USAGE,
    Exchange,
    answers,
    dies_at_once,
    event,
    in_turn,
    plays,
    text,
)
from tests.unit.gateway.gateway_lab import MODEL, GatewayLab, Way, gateway_lab
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
STREAM = CHAT | {"stream": True}
SEQUENTIAL = STREAM | {"model": f"{MODEL}:sequential"}
WHOLE = json.dumps(
    {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}
).encode()

# What passes through


async def test_a_whole_answer_passes_through_unchanged() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = answers(WHOLE)
        caller = await lab.post(CHAT, headers={"x-request-id": "mine"})
        assert (caller.status, caller.got) == (200, WHOLE)
        assert caller.answer_headers == {
            "content-type": "application/json",
            "content-length": str(len(WHOLE)),
            "x-tandem-lane": "batched",
            "x-tandem-replica": "b",
            "x-request-id": "mine",
        }
        (sent,) = lab.engine.requests
        assert sent.path == "/v1/chat/completions"
        assert json.loads(sent.body) == CHAT
        assert sent.headers["x-request-id"] not in ("mine", ""), (
            "ids of clients need not be unique; this one is"
        )
        assert lab.ended == {("batched", "completed", ""): 1}
        assert lab.value("tandem_prompt_tokens_total", lane="batched") == 3
        assert lab.value("tandem_output_tokens_total", lane="batched") == 5
        assert lab.value("tandem_e2e_latency_seconds_count", lane="batched") == 1
        assert lab.value("tandem_ttft_seconds_count", lane="batched") == 0, "streams only"


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_a_stream_passes_through_and_usage_only_to_who_asked(wants_usage: bool) -> None:
    async with gateway_lab() as lab:
        everything = text("") + text("a") + b": ping\n\n" + text("b") + USAGE + DONE
        lab.engine.script = plays(*(everything[i : i + 7] for i in range(0, len(everything), 7)))
        caller = await lab.post(STREAM | {"stream_options": {"include_usage": wants_usage}})
        assert caller.status == 200
        assert caller.answer_headers["content-type"] == "text/event-stream; charset=utf-8"
        assert caller.got == (everything if wants_usage else everything.replace(USAGE, b""))
        assert json.loads(lab.engine.requests[0].body)["stream_options"] == {"include_usage": True}
        assert lab.ended == {("batched", "completed", ""): 1}
        assert lab.value("tandem_output_tokens_total", lane="batched") == 5
        for name, count in (("ttft", 1), ("tpot", 1), ("inter_chunk", 1), ("e2e_latency", 1)):
            assert lab.value(f"tandem_{name}_seconds_count", lane="batched") == count, name


async def test_gaps_are_those_of_each_choice() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = plays(*(text(word, index) for word in "ab" for index in range(2)), USAGE, DONE)
        await lab.post(STREAM | {"n": 2})
        assert lab.value("tandem_inter_chunk_seconds_count", lane="batched") == 2, "3 between chunks of any"
        assert lab.value("tandem_tpot_seconds_count", lane="batched") == 1


async def test_each_event_is_passed_on_when_it_is_whole_not_when_the_stream_ends() -> None:
    async with gateway_lab() as lab:
        goes_on = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            await exchange.begin_stream()
            await exchange.send(text("a") + text("b")[:10])
            await goes_on.wait()
            await exchange.send(text("b")[10:] + DONE)
            await exchange.end_stream()

        lab.engine.script = script
        async with lab.calling(STREAM) as caller:
            await until(lambda: caller.got == text("a"))
            goes_on.set()
        assert caller.got == text("a") + text("b") + DONE


async def test_a_connection_is_used_again_after_an_answer_that_was_read_to_its_end() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = plays(text("a"), DONE)
        for _ in range(3):
            await lab.post(STREAM)
        assert len({id(request.reader) for request in lab.engine.requests}) == 1


@pytest.mark.parametrize(
    ("status", "message", "reason"),
    [
        (400, "This model's maximum context length is 2048 tokens. However, ...", "request_too_long"),
        (
            400,
            "The decoder prompt (length 9) is longer than the maximum model length of 8.",
            "request_too_long",
        ),
        (400, "min_p is not supported with speculative decoding.", "bad_request"),
        (404, "The model `x` does not exist.", "bad_request"),
        (422, "", "bad_request"),
    ],
)
async def test_the_engines_own_refusal_passes_through_with_a_reason(
    status: int, message: str, reason: str
) -> None:
    async with gateway_lab() as lab:
        refusal = json.dumps({"error": {"message": message, "code": status}}).encode()
        lab.engine.script = answers(refusal, status)
        caller = await lab.post(STREAM)
        assert (caller.status, caller.got) == (status, refusal)
        assert caller.answer_headers["x-tandem-reason"] == reason
        assert caller.answer_headers["x-tandem-lane"] == "batched"
        assert lab.ended == {("batched", "rejected", reason): 1}
        assert lab.value("tandem_e2e_latency_seconds_count", lane="batched") == 0
        assert len(lab.engine.requests) == 1, "no other replica would like it better"
        await until(lambda: lab.plane.counts == (0, 0))
        assert lab.plane.lane("batched")["replicas"][0]["failures_in_a_row"] == 0


async def test_a_refusal_that_is_not_json_is_a_bad_request() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = answers(b"<html>no</html>", 400, "text/html")
        caller = await lab.post(CHAT)
        assert (caller.status, caller.got) == (400, b"<html>no</html>")
        assert lab.ended == {("batched", "rejected", "bad_request"): 1}


# An engine that breaks


async def test_an_engine_that_answers_500_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway_lab() as lab:
        lab.engine.script = answers(b'{"error": {"message": "CUDA out of memory"}}', 500)
        caller = await lab.post(CHAT)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert "the engine answered 500: " in caller.json["error"]["message"]
        assert "CUDA out of memory" in caller.json["error"]["message"]
        assert "CUDA" not in caplog.text, "the engine's words may repeat the client's"
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}


@pytest.mark.parametrize(
    "body", [b"<html>oops</html>", b"", b"[]", b'"text"', b"{", b'{"choices": [null]}', b'{"error": "x"}']
)
async def test_a_200_that_is_no_answer_is_a_502(body: bytes) -> None:
    async with gateway_lab() as lab:
        lab.engine.script = answers(body)
        caller = await lab.post(CHAT)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert caller.answer_headers["x-tandem-reason"] == "upstream_broke"
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}


async def _dies_at_once(exchange: Exchange) -> None:
    exchange.break_off()


async def _dies_after_its_head(exchange: Exchange) -> None:
    await exchange.begin_stream()
    exchange.break_off()


async def _dies_within_its_first_event(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.send(text("a")[:-1])
    exchange.break_off()


async def _dies_within_a_whole_answer(exchange: Exchange) -> None:
    await exchange.answer(WHOLE, length=len(WHOLE) + 1)
    exchange.break_off()


async def _ends_without_an_event(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.end_stream()


@pytest.mark.parametrize(
    "script",
    [
        _dies_at_once,
        _dies_after_its_head,
        _dies_within_its_first_event,
        _dies_within_a_whole_answer,
        _ends_without_an_event,
    ],
)
async def test_an_engine_that_dies_before_its_first_event_is_a_502(script: Any) -> None:
    async with gateway_lab() as lab:
        lab.engine.script = script
        caller = await lab.post(STREAM)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}


@pytest.mark.parametrize("dies", [True, False], ids=["reset", "ends early"])
async def test_an_engine_that_dies_later_ends_the_stream_with_an_error_and_no_done(dies: bool) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a") + text("b")[:-3])
        if dies:
            exchange.break_off()
        else:
            await exchange.end_stream()

    async with gateway_lab() as lab:
        lab.engine.script = script
        caller = await lab.post(STREAM)
        assert caller.status == 200
        first, last = EventSplitter().feed(caller.got)
        assert first == text("a"), "the half event is not passed on"
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_broke"
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}
        assert lab.value("tandem_e2e_latency_seconds_count", lane="batched") == 0


async def test_an_error_inside_a_stream_ends_it_with_an_error_of_ours() -> None:
    async with gateway_lab() as lab:
        broken = event({"error": {"message": "engine died"}})
        lab.engine.script = plays(text("a"), broken, DONE)
        caller = await lab.post(STREAM)
        first, last = EventSplitter().feed(caller.got)
        assert first == text("a")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["message"]) == (
            "upstream_broke",
            "the engine reported an error: engine died",
        )
        assert lab.ended == {("batched", "failed", "upstream_broke"): 1}


async def test_an_endless_event_is_cut_off() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        while True:
            await exchange.send(b"x" * 1024 * 1024)

    async with gateway_lab() as lab:
        lab.engine.script = script
        caller = await lab.post(STREAM)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")


async def test_others_stand_in_for_a_replica_that_is_not_there_until_its_breaker_opens() -> None:
    async with gateway_lab() as lab:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        lab.engine.script = answers(WHOLE)
        async with lab.plane.replica("nobody", "batched", url=f"http://127.0.0.1:{port}"):
            callers = [await lab.post(CHAT) for _ in range(20)]
        assert {caller.status for caller in callers} == {200}
        assert lab.value("tandem_reroutes_total", lane="batched", outcome="completed") == 3, (
            "breaker_failures of them; after that nothing is sent there"
        )


async def test_a_replica_that_takes_no_connection_is_a_504_that_names_the_limit() -> None:
    async with gateway_lab(connect_timeout_s=0.5) as lab:
        # A listener whose queue is full: the kernel answers no further connection.
        with socket.socket() as full, socket.socket() as first:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            first.connect(full.getsockname())
            url = "http://{}:{}".format(*full.getsockname())
            lab.plane.service._core.replica_gone("s")  # noqa: SLF001 - as if its connection had ended
            async with lab.plane.replica("full", "sequential", url=url):
                failed = await lab.post(SEQUENTIAL)
        assert (failed.status, failed.error_code) == (504, "upstream_timeout")
        assert "gateway.connect_timeout_s=0.5" in failed.json["error"]["message"]


# An engine that falls silent


async def _silent(exchange: Exchange) -> None:
    await exchange.until_left()


async def _silent_after_its_head(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.until_left()


@pytest.mark.parametrize("script", [_silent, _silent_after_its_head])
async def test_silence_before_the_first_byte_is_a_504(script: Any) -> None:
    async with gateway_lab(first_byte_timeout_s=0.05) as lab:
        lab.engine.script = script
        caller = await lab.post(STREAM)
        assert (caller.status, caller.error_code) == (504, "upstream_timeout")
        assert "gateway.first_byte_timeout_s=0.05" in caller.json["error"]["message"]
        assert lab.ended == {("batched", "failed", "upstream_timeout"): 1}


async def test_silence_after_the_first_byte_ends_the_stream_with_an_error() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a"))
        await exchange.until_left()

    async with gateway_lab(idle_timeout_s=0.05) as lab:
        lab.engine.script = script
        caller = await lab.post(STREAM)
        assert caller.status == 200
        first, last = EventSplitter().feed(caller.got)
        assert first == text("a")
        said = parse_event(last).error
        assert said is not None
        assert "idle_timeout_s=0.05" in said
        assert lab.ended == {("batched", "failed", "upstream_timeout"): 1}


# A client that leaves


async def test_a_client_that_leaves_a_stream_stops_the_engine() -> None:
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a"))
        try:
            await exchange.until_left()
        finally:
            left.set()

    async with gateway_lab() as lab:
        lab.engine.script = script
        caller = lab.caller(STREAM)

        async def call_and_look() -> list[str]:
            await caller.call(lab.app)
            return [repr(task.get_coro()) for task in asyncio.all_tasks()]

        calling = asyncio.create_task(call_and_look())
        await until(lambda: caller.got == text("a"))
        assert lab.plane.counts == (0, 1)
        caller.gone.set()
        answering = [coroutine for coroutine in await calling if "Completion._answer" in coroutine]
        assert answering == [], "a request has ended when all it held is given back, not before"
        assert not caller.is_complete
        await until(left.is_set)
        assert lab.ended == {("batched", "cancelled", "client_closed"): 1}


async def test_a_client_that_leaves_at_done_had_its_whole_answer() -> None:
    """As OpenAI's client does, while the last bytes of the engine's answer are still to come."""
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a") + USAGE + DONE)
        try:
            await exchange.until_left()
        finally:
            left.set()

    async with gateway_lab() as lab:
        lab.engine.script = in_turn(dies_at_once, dies_at_once, script)
        assert (await lab.post(STREAM)).status == 502
        await until(lambda: _failures(lab) == 2)
        async with lab.calling(STREAM) as caller:
            await until(lambda: caller.got == text("a") + DONE)
            caller.gone.set()
        await until(left.is_set)
        await until(lambda: lab.ended.get(("batched", "completed", "")) == 1)
        assert lab.value("tandem_output_tokens_total", lane="batched") == 5
        await until(lambda: lab.plane.counts == (0, 0))
        assert _failures(lab) == 0, "the replica served it"


def _failures(lab: GatewayLab) -> int:
    (replica,) = lab.plane.lane("batched")["replicas"]
    return int(replica["failures_in_a_row"])


async def test_a_connection_that_breaks_under_a_write_is_a_client_that_left() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a"))
        await exchange.until_left()

    async with gateway_lab() as lab:
        lab.engine.script = script
        caller = lab.caller(STREAM, is_cut_off=True)
        await caller.call(lab.app)
        assert lab.ended == {("batched", "cancelled", "client_closed"): 1}


async def test_a_client_that_leaves_before_a_whole_answer_stops_the_engine() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = _silent
        async with lab.calling(CHAT) as caller:
            await until(lambda: lab.engine.num_open == 1)
            caller.gone.set()
        assert caller.status is None
        assert lab.ended == {("batched", "cancelled", "client_closed"): 1}


async def test_a_client_that_leaves_the_queue_never_reaches_the_engine() -> None:
    ends = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await ends.wait()
        await exchange.send(DONE)
        await exchange.end_stream()

    async with gateway_lab() as lab:
        lab.engine.script = script
        async with lab.calling(SEQUENTIAL):
            await until(lambda: lab.engine.num_open == 1)
            async with lab.calling(SEQUENTIAL) as waiting:
                await until(lambda: lab.plane.counts == (1, 1))
                waiting.gone.set()
            await until(lambda: lab.plane.counts == (0, 1))
            ends.set()
        assert len(lab.engine.requests) == 1
        assert lab.ended == {("", "cancelled", "client_closed"): 1, ("sequential", "completed", ""): 1}


async def test_leaving_at_any_moment_leaves_no_trace() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for word in "abcdef":
            await exchange.send(text(word))
            await asyncio.sleep(0)
        await exchange.send(DONE)
        await exchange.end_stream()

    async with gateway_lab() as lab:
        lab.engine.script = script
        for ticks in range(0, 80, 2):
            async with lab.calling(SEQUENTIAL) as caller:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                caller.gone.set()
        await until(lambda: lab.plane.counts == (0, 0))
        outcomes = {outcome for _, outcome, _ in lab.ended}
        assert "cancelled" in outcomes
        assert "failed" not in outcomes
        assert sum(lab.ended.values()) == 40
        # The lane still serves.
        assert (await lab.post(SEQUENTIAL)).got.endswith(DONE)


@pytest.mark.only_way(Way.ASGI)
async def test_a_server_that_cancels_the_request_gives_everything_back() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = _silent_after_its_head
        task = asyncio.create_task(lab.caller(STREAM).call(lab.app))
        await until(lambda: lab.engine.num_open == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert lab.ended == {("batched", "cancelled", "client_closed"): 1}


# The scheduler says no, and faults of our own


async def test_a_full_queue_is_a_429_with_retry_after() -> None:
    ends = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await ends.wait()
        await exchange.send(DONE)
        await exchange.end_stream()

    async with gateway_lab(scheduler={"max_waiting_requests": 0}) as lab:
        lab.engine.script = script
        async with lab.calling(SEQUENTIAL):
            await until(lambda: lab.engine.num_open == 1)
            refused = await lab.post(SEQUENTIAL)
            ends.set()
        assert (refused.status, refused.error_code) == (429, "queue_full")
        assert refused.answer_headers["retry-after"] == "1"
        assert refused.answer_headers["x-tandem-reason"] == "queue_full"
        assert "x-tandem-lane" not in refused.answer_headers
        assert ("", "rejected", "queue_full") in lab.ended


async def test_no_replica_is_a_503() -> None:
    async with gateway_lab() as lab:
        lab.plane.service._core.replica_gone("b")  # noqa: SLF001 - as if its connection had ended
        refused = await lab.post(CHAT)
        assert (refused.status, refused.error_code) == (503, "no_replica_ready")


async def test_a_fault_of_the_gateway_itself_is_a_500_in_the_same_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fault(self: Completion, send: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Completion, "_answer", fault)
    async with gateway_lab() as lab:
        caller = lab.caller(CHAT)
        await caller.call(lab.app)
        assert "secret detail" in caplog.text, "with its traceback, for whoever runs the lab"
        assert (caller.status, caller.error_code) == (500, "internal")
        assert b"secret" not in caller.got
        assert lab.ended == {("", "failed", "internal"): 1}


async def test_the_longest_answer_that_is_held_in_memory_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_ANSWER_BYTES", 100_000)
    async with gateway_lab() as lab:
        lab.engine.script = answers(WHOLE + b" " * 200_000)
        caller = await lab.post(CHAT)
        assert (caller.status, caller.error_code) == (502, "upstream_broke")
        assert "longer than 100000 bytes" in caller.json["error"]["message"]
        assert len(lab.engine.requests) == 1, "and not once more"
