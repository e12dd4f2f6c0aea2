"""Recordings over HTTP: bounds, one at a time, given once; and what the simulated engine's steps say."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import msgspec
import pytest

from serving.config import LaneConfig, SimulatedProfile
from serving.core.lane import Strategy
from serving.engines.engine_page import with_engine_page
from serving.engines.simulated.engine import SimulatedEngine
from serving.engines.steps import recorder as step_recorder
from serving.engines.steps.recorder import ReplicaLabels, StepRecorder
from serving.metrics import names
from serving.tracing.events import Phase, StepEvent, TracedReplica
from serving.tracing.sampling import is_sampled
from tests.unit.gateway.gateway_lab import Caller

pytestmark = pytest.mark.anyio
LABELS = ReplicaLabels("l-1", "l", "batched", "simulated")


@dataclass
class Scene:
    engine: SimulatedEngine
    app: Any

    async def post(self, path: str, body: bytes = b"", **options: Any) -> Caller:
        caller = Caller(path, body, **options)
        await caller.call(self.app)
        return caller

    async def complete(self, prompt_tokens: int, max_tokens: int, name: str) -> None:
        body = {"model": "sim", "prompt": "x " * prompt_tokens, "max_tokens": max_tokens}
        raw = msgspec.json.encode(body)
        answer = await self.post("/v1/completions", raw, headers={"x-request-id": name})
        assert answer.status == 200

    async def start(self, query: str = "seconds=100") -> int:
        answer = await self.post(f"/tandem/trace/start?{query}")
        assert answer.status == 200, answer.got
        recording: int = answer.json["recording"]
        return recording

    async def stop(self, recording: int) -> tuple[TracedReplica, list[StepEvent]]:
        answer = await self.post(f"/tandem/trace/stop?recording={recording}")
        assert answer.status == 200, answer.got
        first, *rest = answer.got.splitlines()
        events = [msgspec.json.decode(line, type=StepEvent) for line in rest]
        return msgspec.json.decode(first, type=TracedReplica), events

    def drafts(self) -> Counter[str]:
        """By the engine's own counters."""
        value = self.engine.registry.get_sample_value
        return Counter(
            drafted=int(value(names.VLLM_DRAFT_TOKENS) or 0),
            accepted=int(value(names.VLLM_ACCEPTED_TOKENS) or 0),
        )


@contextlib.asynccontextmanager
async def scene(**profile: Any) -> AsyncIterator[Scene]:
    settings = SimulatedProfile(**{"ttft_ms": 3, "step_ms": 1} | profile)
    lane = LaneConfig(
        name="l", strategy=Strategy.BATCHED, engine="simulated", max_num_seqs=4, simulated=settings
    )
    engine = SimulatedEngine(lane, ["sim"], max_model_len=1000)
    app = with_engine_page(await engine.start(), engine.tally, StepRecorder(engine.step_log, LABELS))
    try:
        yield Scene(engine, app)
        engine.check()
    finally:
        engine.close()


async def test_a_recording_holds_the_steps_of_its_time() -> None:
    async with scene(acceptance_rate=0.6, num_speculative_tokens=4) as one:
        await one.complete(9, 20, "before")
        before = one.drafts()
        recording = await one.start()
        await asyncio.gather(one.complete(5, 30, "a"), one.complete(8, 12, "b"))
        after = one.drafts()
        replica, events = await one.stop(recording)
        await one.complete(9, 20, "after")
    assert replica == TracedReplica("l-1", "l", "batched", "simulated", len(events), 0)
    assert {event.request_id for event in events} == {"a", "b"}
    for name, prompt_tokens, output_tokens in (("a", 5, 30), ("b", 8, 12)):
        own = [event for event in events if event.request_id == name]
        prefill = [event for event in own if event.phase is Phase.PREFILL]
        assert own[: len(prefill)] == prefill, "the prompt comes first"
        assert sum(event.scheduled_tokens for event in prefill) == prompt_tokens
        assert sum(event.emitted_tokens for event in own) == output_tokens
        assert [event.emitted_tokens for event in prefill[:-1]] == [0] * (len(prefill) - 1)
        for event in own[len(prefill) :]:
            assert event.drafted_tokens == 4
            assert event.scheduled_tokens == 5
            assert 1 <= event.emitted_tokens <= event.accepted_tokens + 1 <= 5
    steps = [next(rows) for _, rows in groupby(events, key=lambda event: event.step)]
    for earlier, later in pairwise(steps):
        assert earlier.started_ns < earlier.ended_ns <= later.started_ns
    drafts = Counter(drafted=sum(event.drafted_tokens for event in events))
    drafts["accepted"] = sum(event.accepted_tokens for event in events)
    assert drafts == after - before
    assert 0 < drafts["accepted"] < drafts["drafted"]


async def test_a_stall_is_no_step_of_the_request() -> None:
    async with scene(stall_after_tokens=2, stall_ms=20) as one:
        recording = await one.start()
        await one.complete(2, 4, "a")
        _, events = await one.stop(recording)
    decoding = [event for event in events if event.phase is Phase.DECODE]
    assert [event.emitted_tokens for event in decoding] == [1, 1, 1]
    assert decoding[1].started_ns - decoding[0].ended_ns > 15_000_000


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("", "seconds=None must be a number"),
        ("seconds=soon", "seconds='soon' must be a number"),
        ("seconds=0", "seconds=0 must be above 0 and at most 3600"),
        ("seconds=nan", "seconds=nan must be above 0"),
        ("seconds=3601", "seconds=3601 must be above 0 and at most 3600"),
        ("seconds=1&share=0", "share=0.0 must be above 0 and at most 1"),
        ("seconds=1&share=1.1", "share=1.1 must be above 0 and at most 1"),
        ("seconds=1&share=nan", "share=nan must be above 0 and at most 1"),
        ("seconds=1&share=half", "share='half' must be a number"),
        ("seconds=5&max_events=0", "max_events=0 must be 1 to 1000000"),
        ("seconds=5&max_events=1000001", "max_events=1000001 must be 1 to 1000000"),
        ("seconds=5&max_events=inf", "max_events='inf' must be a number"),
    ],
)
async def test_a_bound_is_named_and_nothing_is_recorded(query: str, named: str) -> None:
    async with scene() as one:
        answer = await one.post(f"/tandem/trace/start?{query}")
        assert answer.status == 400
        assert named in answer.json["error"]
        await one.start()  # nothing goes on


async def test_there_is_one_recording_at_a_time_and_it_is_given_once() -> None:
    async with scene() as one:
        first = await one.start()
        answer = await one.post("/tandem/trace/start?seconds=1")
        assert (answer.status, f"recording {first}" in answer.json["error"]) == (409, True)
        await one.stop(first)
        again = await one.post(f"/tandem/trace/stop?recording={first}")
        assert (again.status, "was fetched" in again.json["error"]) == (409, True)
        second = await one.start()
        assert second != first
        assert (await one.post(f"/tandem/trace/stop?recording={first}")).status == 409, "not somebody else's"


async def test_events_beyond_the_bound_are_counted() -> None:
    async with scene(ttft_ms=0) as one:
        recording = await one.start("seconds=100&max_events=5")
        await one.complete(1, 12, "a")
        replica, events = await one.stop(recording)
    assert (len(events), replica.events, replica.lost_events) == (5, 5, 7)


async def test_of_a_share_whole_requests_are_recorded() -> None:
    ids = [f"{number:012x}" for number in range(20)]
    async with scene() as one:
        recording = await one.start("seconds=100&share=0.5")
        await asyncio.gather(*(one.complete(2, 3, name) for name in ids))
        _, events = await one.stop(recording)
    made = Counter[str]()
    for event in events:
        made[event.request_id] += event.emitted_tokens
    assert made == {name: 3 for name in ids if is_sampled(name, 0.5)}


async def test_a_recording_that_nobody_ends_ends_by_itself() -> None:
    async with scene() as one:
        recording = await one.start("seconds=0.02")
        await one.complete(1, 60, "a")  # 60 steps of 1 ms
        _, events = await one.stop(recording)
    assert 0 < sum(event.emitted_tokens for event in events) < 60


async def test_a_recording_that_nobody_fetches_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_recorder, "FETCH_GRACE_S", 0.01)
    async with scene() as one:
        await one.start("seconds=0.01")
        await one.complete(1, 60, "a")
        await one.start()


async def test_a_caller_that_leaves_before_its_answer_makes_room() -> None:
    async with scene() as one:
        recording = await one.start()
        caller = Caller(f"/tandem/trace/stop?recording={recording}", b"", is_cut_off=True)
        with pytest.raises(ConnectionResetError):
            await caller.call(one.app)
        await one.start()


@pytest.mark.parametrize(
    ("path", "method"), [("/tandem/trace/start", "GET"), ("/tandem/trace/other", "POST")]
)
async def test_there_is_nothing_else(path: str, method: str) -> None:
    async with scene() as one:
        assert (await one.post(path, method=method)).status in (404, 405)
