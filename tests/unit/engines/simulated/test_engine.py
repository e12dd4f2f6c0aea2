"""The simulated engine says and counts what its profile predicts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.config import LaneConfig, SimulatedProfile
from serving.core.engine_paths import SENT_PATH
from serving.core.lane import Strategy
from serving.core.sse import EventSplitter, parse_answer, parse_event
from serving.engines.base import KEEP_FINISHED, KEEP_SENT, EngineTally, FinishedRequest, SentStream
from serving.engines.engine_page import with_engine_page
from serving.engines.metrics import ReplicaCollector
from serving.engines.simulated.api import WORD
from serving.engines.simulated.engine import SimulatedEngine
from serving.engines.steps.recorder import ReplicaLabels, StepRecorder
from serving.metrics import names
from tests.unit.gateway.gateway_lab import Caller
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio

PROMPT = {"model": "sim", "prompt": "one two three"}
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Running:
    engine: SimulatedEngine
    app: ASGIApp

    def caller(self, body: Any, **options: Any) -> Caller:
        is_chat = isinstance(body, dict) and "messages" in body
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Caller("/v1/chat/completions" if is_chat else "/v1/completions", raw, **options)

    async def post(self, body: Any, **options: Any) -> Caller:
        caller = self.caller(body, **options)
        await caller.call(self.app)
        return caller

    async def tokens_by_chunk(self, **fields: Any) -> list[int]:
        """Tokens in each chunk with text of a stream."""
        caller = await self.post(PROMPT | {"stream": True} | fields)
        said = [parse_event(event) for event in EventSplitter().feed(caller.got)]
        assert said[-1].is_done
        return [event.text.count(WORD) for event in said if event.has_text]

    @property
    def load(self) -> tuple[int, int]:
        return self.engine.tally.running, self.engine.tally.waiting

    def counter(self, name: str) -> float | None:
        return self.engine.registry.get_sample_value(name)


@contextlib.asynccontextmanager
async def simulated(*, max_num_seqs: int = 4, **profile: Any) -> AsyncIterator[Running]:
    """An engine of 1 ms steps; at rest again when the block is left."""
    settings = SimulatedProfile(**{"ttft_ms": 0, "step_ms": 1} | profile)
    lane = LaneConfig(
        name="l",
        strategy=Strategy.BATCHED,
        engine="simulated",
        max_num_seqs=max_num_seqs,
        simulated=settings,
    )
    engine = SimulatedEngine(lane, ["sim", "sim:l"], max_model_len=100)
    running = Running(engine, await engine.start())
    try:
        yield running
        await until(lambda: running.load == (0, 0))
        engine.check()
    finally:
        engine.close()


# What it says


@pytest.mark.parametrize("body", [PROMPT, CHAT])
async def test_a_whole_answer(body: dict[str, Any]) -> None:
    async with simulated() as running:
        caller = await running.post(body | {"max_tokens": 5})
        assert caller.status == 200
        said = parse_answer(caller.got)
        assert (said.text, said.output_tokens, said.error) == (WORD * 5, 5, None)
        assert caller.json["choices"][0]["finish_reason"] == "length"


async def test_usage_counts_the_prompts_words() -> None:
    async with simulated() as running:
        usage = (await running.post(PROMPT)).json["usage"]
        assert usage == {"prompt_tokens": 3, "completion_tokens": 16, "total_tokens": 19}


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_a_chat_stream(wants_usage: bool) -> None:
    async with simulated() as running:
        body = CHAT | {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": wants_usage}}
        caller = await running.post(body)
        events = EventSplitter().feed(caller.got)
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
        assert events[-1] == b"data: [DONE]\n\n"
        usage = [chunk["usage"] for chunk in chunks if "usage" in chunk]
        assert [one["completion_tokens"] for one in usage] == ([3] if wants_usage else [])
        opening, *rest = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert opening["delta"] == {"role": "assistant", "content": ""}
        assert [choice["delta"]["content"] for choice in rest] == [WORD] * 3
        assert [choice["finish_reason"] for choice in rest] == [None, None, "length"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (PROMPT | {"model": "other"}, 404),
        ({"model": "sim"}, 400),
        ({"model": "sim", "prompt": 5}, 400),
        ({"model": "sim", "messages": "hi"}, 400),
        (PROMPT | {"max_tokens": "many"}, 400),
        (PROMPT | {"max_tokens": 5, "max_completion_tokens": "many"}, 400),
        (PROMPT | {"max_tokens": -1}, 400),
        (PROMPT | {"stream": True, "stream_options": "yes"}, 400),
        (PROMPT | {"max_tokens": 98}, 400),
        ({"model": "sim", "prompt": []}, 400),
        (PROMPT | {"prompt": ["a", 5]}, 400),
        (PROMPT | {"prompt": ["a", "a b c d"], "max_tokens": 97}, 400),
        (PROMPT | {"n": 0}, 400),
        (PROMPT | {"n": 129}, 400),
        (PROMPT | {"n": "many"}, 400),
    ],
)
async def test_mistakes_are_refused_in_openais_shape(body: Any, status: int) -> None:
    async with simulated() as running:
        caller = await running.post(body)
        assert caller.status == status
        assert caller.json["error"]["code"] == status


async def test_the_longest_that_fits_is_served() -> None:
    async with simulated(acceptance_rate=1, num_speculative_tokens=16) as running:
        assert sum(await running.tokens_by_chunk(max_tokens=97)) == 97


@pytest.mark.parametrize("body", [PROMPT, CHAT])
async def test_usage_in_each_chunk_counts_as_it_goes(body: dict[str, Any]) -> None:
    async with simulated(tokens_per_chunk=2) as running:
        options = {"include_usage": True, "continuous_usage_stats": True}
        caller = await running.post(body | {"max_tokens": 5, "stream": True, "stream_options": options})
        said = [parse_event(event) for event in EventSplitter().feed(caller.got)]
        assert [event.output_tokens for event in said if event.has_text] == [2, 4, 5]
        assert [event.output_tokens for event in said if event.is_usage_only] == [5]


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        ([1, 2], "token ids"),
        ([[1], [2, 3]], "token ids"),
        ([], "an empty list"),
        (None, "NoneType"),
        ([{"SECRET": 1}], "a list with other things in it"),
    ],
)
async def test_a_prompt_that_is_not_taken_is_told_what_is(prompt: Any, got: str) -> None:
    async with simulated() as running:
        caller = await running.post(PROMPT | {"prompt": prompt})
    assert caller.status == 400
    said = caller.json["error"]["message"]
    assert (
        f"prompt must be a text or a list of texts, got {got}; the simulated engine has no tokenizer" in said
    )
    assert "takes no token ids" in said
    assert "SECRET" not in said


@pytest.mark.parametrize(
    ("body", "prompt_tokens"),
    [(CHAT | {"n": 3}, [1, 1, 1]), (PROMPT | {"prompt": ["a", "a b", "a b c"]}, [1, 2, 3])],
    ids=["n", "prompts"],
)
async def test_several_choices_are_streamed_side_by_side(
    body: dict[str, Any], prompt_tokens: list[int]
) -> None:
    """As vLLM does: an event for each choice and step, its usage so far that of the choice, at the end of all."""
    async with simulated() as running:
        options = {"include_usage": True, "continuous_usage_stats": True}
        caller = await running.post(body | {"max_tokens": 2, "stream": True, "stream_options": options})
        events = EventSplitter().feed(caller.got)
        said = [parse_event(event) for event in events if WORD.encode() in event]
        assert [event.parts for event in said] == [((number, WORD),) for number in (0, 1, 2) * 2]
        assert [event.output_tokens for event in said] == [1, 1, 1, 2, 2, 2]
        assert [event.prompt_tokens for event in said] == prompt_tokens * 2
        ends = [json.loads(event.removeprefix(b"data: "))["choices"] for event in events[-5:-2]]
        assert [choice["finish_reason"] for (choice,) in ends] == ["length"] * 3
        usage = parse_event(events[-2])
        assert (usage.is_usage_only, usage.output_tokens) == (True, 6)
        assert usage.prompt_tokens == (1 if "n" in body else 6)


@pytest.mark.parametrize("body", [CHAT | {"n": 4}, PROMPT | {"prompt": ["a", "b"], "n": 2}])
async def test_a_whole_answer_of_several_choices(body: dict[str, Any]) -> None:
    async with simulated(max_num_seqs=3) as running:
        caller = await running.post(body | {"max_tokens": 5}, headers={"x-request-id": "mine"})
        assert [choice["index"] for choice in caller.json["choices"]] == [0, 1, 2, 3]
        assert parse_answer(caller.got).parts == tuple((number, WORD * 5) for number in range(4))
        assert caller.json["usage"]["completion_tokens"] == 20
        assert running.engine.tally.most_running == 3, "each takes a place in the batch"
        assert all("mine" in one.request_id for one in running.engine.tally.finished)


async def test_leaving_an_answer_of_several_choices_stops_all_of_them() -> None:
    async with simulated(max_num_seqs=2, step_ms=5) as running:
        caller = running.caller(PROMPT | {"max_tokens": 90, "stream": True, "n": 3})
        task = asyncio.create_task(caller.call(running.app))
        await until(lambda: running.load == (2, 1))
        caller.gone.set()
        await task
        await until(lambda: running.load == (0, 0))
        assert not running.engine.tally.finished


async def test_continuous_usage_alone_asks_for_nothing() -> None:
    async with simulated() as running:
        caller = await running.post(
            CHAT | {"stream": True, "stream_options": {"continuous_usage_stats": True}}
        )
        assert b"usage" not in caller.got


async def test_a_chats_prompt_is_the_words_of_its_contents() -> None:
    async with simulated() as running:
        parts = [{"type": "text", "text": "three more words"}]
        messages = [{"role": "system", "content": "two words"}, {"role": "user", "content": parts}]
        caller = await running.post({"model": "sim", "messages": messages})
        assert caller.json["usage"]["prompt_tokens"] == 5


async def test_what_load_tools_probe() -> None:
    async with simulated() as running:
        models, health = Caller("/v1/models", b"", "GET"), Caller("/health", b"", "GET")
        await models.call(running.app)
        await health.call(running.app)
        assert [model["id"] for model in models.json["data"]] == ["sim", "sim:l"]
        assert health.status == 200


# What it sent


async def sent(running: Running, query: str = "") -> list[dict[str, Any]]:
    caller = Caller(f"{SENT_PATH}{query}", b"", "GET")
    recorder = StepRecorder(running.engine.step_log, ReplicaLabels("r", "l", "batched", "simulated"))
    await caller.call(with_engine_page(running.app, running.engine.tally, recorder))
    return [dict(stream) for stream in json.loads(caller.got)]


async def test_each_write_is_stamped_with_its_tokens() -> None:
    async with simulated(tokens_per_chunk=2) as running:
        before_ns, before_unix_ns = time.monotonic_ns(), time.time_ns()
        await running.post(CHAT | {"max_tokens": 5, "stream": True}, headers={"x-request-id": "mine"})
        after_ns, after_unix_ns = time.monotonic_ns(), time.time_ns()
        (stream,) = await sent(running)
        assert (stream["request_id"], stream["prompt_tokens"]) == ("mine", 1)
        assert [chunk["tokens"] for chunk in stream["chunks"]] == [2, 2, 1]
        writes = [*stream["chunks"], stream["done"]]
        instants = [write[key] for write in writes for key in ("sent_monotonic_ns", "written_monotonic_ns")]
        whole = [before_ns, stream["received_monotonic_ns"], *instants, after_ns]
        assert whole == sorted(whole)
        assert all(before_unix_ns <= write["sent_unix_ns"] <= after_unix_ns for write in writes)


async def test_a_write_is_stamped_with_its_choice() -> None:
    async with simulated() as running:
        await running.post(CHAT | {"max_tokens": 2, "stream": True, "n": 2})
        (stream,) = await sent(running)
        assert [chunk["choice"] for chunk in stream["chunks"]] == [0, 1, 0, 1]


async def test_a_write_is_stamped_around_the_servers_send() -> None:
    """The instants lie on either side of what the ASGI server does with the bytes."""
    async with simulated() as running:
        sends: list[tuple[int, int]] = []

        async def served_slowly(scope: Scope, receive: Receive, send: Send) -> None:
            async def slow_send(message: Any) -> None:
                begun_ns = time.monotonic_ns()
                await asyncio.sleep(0.002)
                await send(message)
                if WORD.encode() in message.get("body", b""):
                    sends.append((begun_ns, time.monotonic_ns()))

            await running.app(scope, receive, slow_send)

        await running.caller(CHAT | {"max_tokens": 3, "stream": True}).call(served_slowly)
        (stream,) = await sent(running)
        stamps = [(chunk["sent_monotonic_ns"], chunk["written_monotonic_ns"]) for chunk in stream["chunks"]]
        assert len(sends) == len(stamps) == 3
        assert all(
            before <= begun and ended <= after
            for (before, after), (begun, ended) in zip(stamps, sends, strict=True)
        )


async def test_one_stream_is_found_by_its_id_and_only_the_last_are_kept() -> None:
    async with simulated() as running:
        for number in range(3):
            await running.post(
                CHAT | {"max_tokens": 1, "stream": True}, headers={"x-request-id": f"n{number}"}
            )
        assert [one["request_id"] for one in await sent(running, "?request_id=n1")] == ["n1"]
        assert await sent(running, "?request_id=other") == []
        running.engine.tally.sent.extend(SentStream(str(n), 1, 0) for n in range(KEEP_SENT - 1))
        assert [one["request_id"] for one in await sent(running)][:2] == ["n2", "0"]


async def test_a_whole_answer_and_an_unfinished_stream_are_not_shown_as_sent() -> None:
    async with simulated(step_ms=5) as running:
        await running.post(PROMPT)
        caller = running.caller(PROMPT | {"max_tokens": 90, "stream": True})
        task = asyncio.create_task(caller.call(running.app))
        await until(lambda: WORD.strip().encode() in caller.got)
        caller.gone.set()
        await task
        (stream,) = await sent(running)
        assert stream["done"] is None
        assert 1 <= len(stream["chunks"]) < 90


# Chunks of several tokens, and stalls


async def test_every_chunk_but_the_last_holds_as_many_tokens_as_were_asked_for() -> None:
    async with simulated(tokens_per_chunk=4) as running:
        assert await running.tokens_by_chunk(max_tokens=10) == [4, 4, 2]
        assert running.counter(names.VLLM_NUM_DRAFTS) == 0


async def test_a_stream_stalls_once_after_the_tokens_named() -> None:
    async with simulated(tokens_per_chunk=2, stall_after_tokens=3, stall_ms=60) as running:
        await running.post(PROMPT | {"max_tokens": 8, "stream": True})
        (stream,) = await sent(running)
        instants = [chunk["sent_monotonic_ns"] / 1e6 for chunk in stream["chunks"]]
        gaps_ms = [b - a for a, b in pairwise(instants)]
        assert len(gaps_ms) == 3
        assert gaps_ms[1] == max(gaps_ms)
        assert gaps_ms[1] > 50  # and not 60: the chunk before it may have been late


# Drafts


async def test_every_draft_accepted_gives_k_and_one_tokens_a_step() -> None:
    async with simulated(acceptance_rate=1, num_speculative_tokens=4) as running:
        assert await running.tokens_by_chunk(max_tokens=11) == [1, 5, 5]
        assert running.counter(names.VLLM_NUM_DRAFTS) == 2
        assert running.counter(names.VLLM_DRAFT_TOKENS) == 8
        assert running.counter(names.VLLM_ACCEPTED_TOKENS) == 8


async def test_no_draft_accepted_gives_one_token_a_step() -> None:
    async with simulated(acceptance_rate=0, num_speculative_tokens=4) as running:
        assert await running.tokens_by_chunk(max_tokens=4) == [1, 1, 1, 1]
        assert running.counter(names.VLLM_DRAFT_TOKENS) == 12
        assert running.counter(names.VLLM_ACCEPTED_TOKENS) == 0


async def test_without_speculation_nothing_is_drafted() -> None:
    async with simulated(acceptance_rate=1) as running:
        assert await running.tokens_by_chunk(max_tokens=3) == [1, 1, 1]
        assert running.counter(names.VLLM_NUM_DRAFTS) == 0


async def test_an_answer_ends_at_its_limit_within_a_draft() -> None:
    async with simulated(acceptance_rate=1, num_speculative_tokens=4) as running:
        assert await running.tokens_by_chunk(max_tokens=8) == [1, 5, 2]


async def test_acceptance_repeats_with_the_seed() -> None:
    async def chunks(seed: int) -> list[int]:
        async with simulated(acceptance_rate=0.5, num_speculative_tokens=4, seed=seed) as running:
            return await running.tokens_by_chunk(max_tokens=60)

    assert await chunks(1) == await chunks(1)
    assert await chunks(1) != await chunks(2)


# Batch and time; lower bounds only, for the machine may be slow but never fast


async def test_one_at_a_time_means_in_order_and_never_overlapping() -> None:
    async with simulated(max_num_seqs=1) as running:
        await asyncio.gather(
            *(running.post(PROMPT | {"max_tokens": 3}, headers={"x-request-id": name}) for name in "abcd")
        )
        finished = list(running.engine.tally.finished)
        assert [one.request_id for one in finished] == list("abcd")
        assert all(earlier.ended_at_s <= later.started_at_s for earlier, later in pairwise(finished))
        assert running.engine.tally.most_running == 1


async def test_a_batch_is_filled_and_not_overfilled() -> None:
    async with simulated(max_num_seqs=2) as running:
        await asyncio.gather(*(running.post(PROMPT | {"max_tokens": 3}) for _ in range(5)))
        assert running.engine.tally.most_running == 2
        assert len(running.engine.tally.finished) == 5


async def test_times_are_those_of_the_profile() -> None:
    async with simulated(ttft_ms=20, step_ms=5, step_ms_per_request=3) as running:
        await asyncio.gather(*(running.post(PROMPT | {"max_tokens": 4}) for _ in range(2)))
        for one in running.engine.tally.finished:
            # Steps of two requests take 5 + 3 ms: the third is the first at 20 ms or later, then three more.
            assert one.ended_at_s - one.started_at_s >= 6 * 0.008 - 0.001


# Clients that leave


async def test_leaving_a_stream_stops_its_generation() -> None:
    async with simulated(step_ms=5) as running:
        caller = running.caller(PROMPT | {"max_tokens": 90, "stream": True})
        task = asyncio.create_task(caller.call(running.app))
        await until(lambda: WORD.strip().encode() in caller.got)
        caller.gone.set()
        await task
        await until(lambda: running.load == (0, 0))
        assert not running.engine.tally.finished


async def test_leaving_a_whole_answer_stops_its_generation() -> None:
    async with simulated(step_ms=5) as running:
        caller = running.caller(PROMPT | {"max_tokens": 90})
        task = asyncio.create_task(caller.call(running.app))
        await until(lambda: running.load == (1, 0))
        caller.gone.set()
        await task
        assert running.load == (0, 0)
        assert not running.engine.tally.finished


async def test_leaving_the_engines_queue_lets_the_others_run() -> None:
    async with simulated(max_num_seqs=1, step_ms=2) as running:
        first, leaves, last = (
            running.caller(PROMPT | {"max_tokens": 20, "stream": True}, headers={"x-request-id": name})
            for name in ("first", "leaves", "last")
        )
        tasks = [asyncio.create_task(caller.call(running.app)) for caller in (first, leaves, last)]
        await until(lambda: running.load == (1, 2))
        leaves.gone.set()
        await asyncio.gather(*tasks)
        assert [one.request_id for one in running.engine.tally.finished] == ["first", "last"]


async def test_a_stream_that_nobody_begins_to_read_is_never_generated() -> None:
    async with simulated(step_ms=5) as running:
        caller = running.caller(PROMPT | {"max_tokens": 90, "stream": True})
        caller.gone.set()
        await caller.call(running.app)
        await until(lambda: running.load == (0, 0))
        # One more request, start to end: were the first still there, it would share the steps.
        await running.post(PROMPT | {"max_tokens": 2})
        assert running.engine.tally.most_running <= 1
        assert len(running.engine.tally.finished) == 1


async def test_a_closed_engine_is_not_healthy() -> None:
    async with simulated() as running:
        pass
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="stepper ended"):
        running.engine.check()


# Tally and metrics


def test_the_tally_remembers_the_most_and_the_last() -> None:
    tally = EngineTally()
    tally.load(3, 5)
    tally.load(1, 0)
    tally.finish(FinishedRequest(str(number), 0, 1, 2, 3) for number in range(KEEP_FINISHED + 1))
    said = tally.as_json()
    assert (said["running"], said["waiting"], said["most_running"]) == (1, 0, 3)
    assert len(said["finished"]) == KEEP_FINISHED
    assert said["finished"][0]["request_id"] == "1"


async def test_a_replica_exports_its_engines_counts_and_its_memory() -> None:
    async with simulated() as running:
        collector = ReplicaCollector("l", "r", running.engine.tally)
        running.engine.registry.register(collector)
        await collector.refresh_memory()
        running.engine.tally.load(2, 3)
        caller = Caller("/metrics", b"", "GET")
        await caller.call(running.app)
        text = caller.got.decode()
        running.engine.tally.load(0, 0)
    assert 'tandem_engine_running_requests{lane="l",replica="r"} 2.0' in text
    assert 'tandem_engine_waiting_requests{lane="l",replica="r"} 3.0' in text
    (memory,) = [line for line in text.splitlines() if line.startswith("tandem_replica_memory_bytes{")]
    assert float(memory.split(" ")[1]) > 10 * 1024**2
