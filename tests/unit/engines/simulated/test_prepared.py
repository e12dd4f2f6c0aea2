"""The prepared engine says what a simulated one says, step by step, and takes no steps for who is silent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from starlette.types import ASGIApp

from serving.config import LaneConfig, SimulatedProfile
from serving.core.lane import Strategy
from serving.core.sse import EventSplitter, parse_answer, parse_event
from serving.engines.simulated import prepared
from serving.engines.simulated.prepared import MAX_TOKENS, SILENCE, WORD, PreparedEngine
from tests.unit.gateway.gateway_lab import Caller
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
PROMPT = {"model": "sim", "prompt": "hi", "max_tokens": 3}
SILENT = CHAT | {"messages": [{"role": "user", "content": SILENCE}], "stream": True}


@contextlib.asynccontextmanager
async def running(max_num_seqs: int = 4) -> AsyncIterator[tuple[PreparedEngine, ASGIApp]]:
    lane = LaneConfig(
        name="l",
        strategy=Strategy.BATCHED,
        engine="simulated",
        max_num_seqs=max_num_seqs,
        simulated=SimulatedProfile(prepared=True, ttft_ms=1, step_ms=1),
    )
    engine = PreparedEngine(lane, ["sim"])
    app = await engine.start()
    try:
        yield engine, app
        await until(lambda: (engine.tally.running, engine.tally.waiting) == (0, 0))
        engine.check()
    finally:
        engine.close()


def caller(body: dict[str, Any]) -> Caller:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return Caller(path, json.dumps(body).encode())


@pytest.mark.parametrize("body", [CHAT, PROMPT])
async def test_a_stream_has_its_tokens_one_by_one(body: dict[str, Any]) -> None:
    async with running() as (engine, app):
        asked = caller(body | {"stream": True})
        await asked.call(app)
        events = [parse_event(event) for event in EventSplitter().feed(asked.got)]
        assert [event.text for event in events if event.has_text] == [WORD] * 3
        assert events[-1].is_done
        assert [one.output_tokens for one in engine.tally.finished] == [3]


@pytest.mark.parametrize("body", [CHAT, PROMPT])
async def test_a_whole_answer(body: dict[str, Any]) -> None:
    async with running() as (_, app):
        asked = caller(body)
        await asked.call(app)
        said = parse_answer(asked.got)
        assert (said.text, said.output_tokens) == (WORD * 3, 3)


async def test_usage_comes_where_it_is_asked_for() -> None:
    async with running() as (_, app):
        asked = caller(CHAT | {"stream": True, "stream_options": {"include_usage": True}})
        await asked.call(app)
        events = [parse_event(event) for event in EventSplitter().feed(asked.got)]
        assert [event.output_tokens for event in events if event.is_usage_only] == [3]


async def test_requests_beyond_the_batch_wait_for_room() -> None:
    async with running(max_num_seqs=2) as (engine, app):
        asked = [caller(CHAT | {"stream": True}) for _ in range(5)]
        async with anyio.create_task_group() as tasks:
            for one in asked:
                tasks.start_soon(one.call, app)
        assert [one.got.count(WORD.encode()) for one in asked] == [3] * 5
        assert engine.tally.most_running == 2


async def test_a_silent_stream_has_one_token_and_the_engine_rests() -> None:
    async with running() as (engine, app):
        asked = caller(SILENT)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked.call, app)
            await until(lambda: WORD.encode() in asked.got)
            steps = engine.tally.num_all_steps
            other = caller(CHAT | {"stream": True})
            await other.call(app)
            assert engine.tally.num_all_steps - steps <= 4
            assert (asked.got.count(WORD.encode()), engine.tally.running) == (1, 1)
            tasks.cancel_scope.cancel()


async def test_a_silent_stream_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "SILENCE_S", 0.01)
    async with running() as (_, app):
        asked = caller(SILENT)
        with anyio.fail_after(20):
            await asked.call(app)
        assert asked.got.count(WORD.encode()) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (CHAT | {"model": "other"}, 404),
        (CHAT | {"max_tokens": MAX_TOKENS + 1}, 400),
        (CHAT | {"max_tokens": "many"}, 400),
    ],
)
async def test_mistakes_are_refused(body: Any, status: int) -> None:
    async with running() as (_, app):
        asked = Caller("/v1/chat/completions", body) if isinstance(body, bytes) else caller(body)
        await asked.call(app)
        assert asked.status == status


async def test_its_longest_answer_fits_the_buffer_of_a_connection() -> None:
    """Else a slow reader would hold up the loop that writes to all."""
    async with running() as (_, app):
        asked = caller(CHAT | {"max_tokens": MAX_TOKENS, "stream": True})
        await asked.call(app)
        assert len(asked.got) + 16 * MAX_TOKENS < 65_536
