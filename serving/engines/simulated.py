"""A simulated engine: the OpenAI API with known times, for tests and policy studies only.

It computes nothing. Its words are made up, its times follow `SimulatedProfile`, and every figure it gives
can therefore be predicted. Its version string and its answers say that it is simulated.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.config import LaneConfig, SimulatedProfile
from serving.core import metric_names as names
from serving.engines.base import EngineFacts, EngineTally, FinishedRequest

WORD = "simulated "  # one token
ROUNDING_S = 1e-6  # three steps of 10 ms are 30 ms, whatever floating point says
DEFAULT_MAX_TOKENS = 16


@dataclass(eq=False)
class _Sequence:
    request_id: str
    prompt_tokens: int
    max_tokens: int
    rng: random.Random
    made: int = 0
    started_at_s: float = 0.0
    first_token_due_s: float = 0.0
    chunks: asyncio.Queue[int | None] = field(
        default_factory=asyncio.Queue
    )  # tokens per chunk; None at the end

    def emit(self, tokens: int) -> None:
        tokens = min(tokens, self.max_tokens - self.made)
        self.made += tokens
        self.chunks.put_nowait(tokens)

    @property
    def is_done(self) -> bool:
        return self.made >= self.max_tokens


class SimulatedEngine:
    """Continuous batching over imaginary steps; see `SimulatedProfile` for the times."""

    def __init__(self, lane: LaneConfig, served_names: list[str], max_model_len: int) -> None:
        assert lane.simulated is not None, "config checks this"
        self._profile: SimulatedProfile = lane.simulated
        self._max_num_seqs = lane.max_num_seqs
        self._served_names = served_names
        self._max_model_len = max_model_len
        self._tally = EngineTally()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._work = asyncio.Event()
        self._serial = itertools.count()
        self._stepper: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry()
        self._drafts, self._draft_tokens, self._accepted = (
            Counter(name.removesuffix("_total"), "Simulated.", registry=self._registry)
            for name in (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_TOKENS)
        )

    @property
    def tally(self) -> EngineTally:
        return self._tally

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(name="simulated", version="simulated 1", device="none", dtype="none")

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    async def start(self) -> ASGIApp:
        self._stepper = asyncio.create_task(self._step_forever())
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._serve, methods=["POST"]),
                Route("/v1/completions", self._serve, methods=["POST"]),
                Route("/metrics", self._metrics),
            ]
        )

    def served_by(self, server: uvicorn.Server) -> None:
        pass

    def check(self) -> None:
        if self._stepper is not None and self._stepper.done():
            raise RuntimeError(f"the simulated engine's stepper ended: {self._stepper}")

    def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()

    # The engine

    async def _step_forever(self) -> None:
        due_at_s = time.monotonic()
        while True:
            self._schedule(due_at_s)
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due_at_s = time.monotonic()
                continue
            due_at_s += self._step_s(len(self._running))
            # Steps follow an absolute schedule, so late wake-ups do not add up.
            await asyncio.sleep(max(0.0, due_at_s - time.monotonic()))
            for sequence in list(self._running):
                self._step(sequence, due_at_s)

    def _step_s(self, batch: int) -> float:
        return (self._profile.step_ms + self._profile.step_ms_per_request * (batch - 1)) / 1000

    def _schedule(self, due_at_s: float) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.popleft()
            sequence.started_at_s = time.monotonic()
            # By the steps' own schedule, not by late wake-ups: the first token's step is then always the same one.
            sequence.first_token_due_s = due_at_s + self._profile.ttft_ms / 1000 - ROUNDING_S
            self._running.append(sequence)
        self._tally.load(len(self._running), len(self._waiting))

    def _step(self, sequence: _Sequence, due_at_s: float) -> None:
        if sequence.made == 0:
            if due_at_s < sequence.first_token_due_s:
                return
            sequence.emit(1)
        else:
            sequence.emit(1 + self._accepted_drafts(sequence.rng))
        if sequence.is_done:
            self._end(sequence)

    def _accepted_drafts(self, rng: random.Random) -> int:
        k = self._profile.num_speculative_tokens
        if k == 0:
            return 0
        accepted = 0
        while accepted < k and rng.random() < self._profile.acceptance_rate:
            accepted += 1
        self._drafts.inc()
        self._draft_tokens.inc(k)
        self._accepted.inc(accepted)
        return accepted

    def _end(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        sequence.chunks.put_nowait(None)
        ended_at_s = time.time()
        lasted_s = time.monotonic() - sequence.started_at_s
        self._tally.finish(
            [
                FinishedRequest(
                    request_id=sequence.request_id,
                    started_at_s=ended_at_s - lasted_s,
                    ended_at_s=ended_at_s,
                    prompt_tokens=sequence.prompt_tokens,
                    output_tokens=sequence.made,
                )
            ]
        )

    def _join(self, sequence: _Sequence) -> None:
        self._waiting.append(sequence)
        self._work.set()

    def _abort(self, sequence: _Sequence) -> None:
        for place in (self._running, self._waiting):
            if sequence in place:
                place.remove(sequence)
        self._tally.load(len(self._running), len(self._waiting))

    # Its HTTP side

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(generate_latest(self._registry))

    async def _serve(self, request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError as error:
            return _refused(400, f"the body is not JSON: {error}")
        is_chat = request.url.path.endswith("chat/completions")
        if fault := self._fault(body, is_chat):
            return _refused(*fault)
        prompt = json.dumps(body["messages"]) if is_chat else str(body["prompt"])
        prompt_tokens = len(prompt.split())
        sequence = _Sequence(
            request_id=request.headers.get("x-request-id", ""),
            prompt_tokens=prompt_tokens,
            max_tokens=_max_tokens(body),
            rng=random.Random(f"{self._profile.seed}-{next(self._serial)}"),
        )
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(self._events(sequence, is_chat, usage), media_type="text/event-stream")
        return await self._whole(sequence, is_chat, request)

    def _fault(self, body: Any, is_chat: bool) -> tuple[int, str] | None:
        if not isinstance(body, dict):
            return 400, f"the body must be a JSON object, got {type(body).__name__}"
        if body.get("model") not in self._served_names:
            return 404, f"The model `{body.get('model')}` does not exist."
        wanted = "messages" if is_chat else "prompt"
        if not isinstance(body.get(wanted), list if is_chat else str):
            return 400, f"`{wanted}` is missing or of the wrong type"
        if not isinstance(body.get("stream_options") or {}, dict):
            return 400, "`stream_options` must be an object"
        max_tokens = _max_tokens(body)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            return 400, f"max_tokens must be an integer of 1 or more, got {max_tokens!r}"
        if len(json.dumps(body[wanted]).split()) + max_tokens > self._max_model_len:
            return 400, f"This model's maximum context length is {self._max_model_len} tokens."
        return None

    async def _whole(self, sequence: _Sequence, is_chat: bool, request: Request) -> Response:
        gone = asyncio.create_task(_gone(request))
        self._join(sequence)
        try:
            while True:
                chunk = asyncio.create_task(sequence.chunks.get())
                await asyncio.wait({chunk, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    chunk.cancel()
                    return Response(status_code=499)
                if chunk.result() is None:
                    break
        finally:
            gone.cancel()
            self._abort(sequence)
        text = WORD * sequence.made
        choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return JSONResponse(
            self._envelope(sequence, is_chat, "")
            | {"choices": [{"index": 0, "finish_reason": "length"} | choice], "usage": _usage(sequence)}
        )

    async def _events(self, sequence: _Sequence, is_chat: bool, usage: bool) -> AsyncIterator[bytes]:
        envelope = self._envelope(sequence, is_chat, ".chunk")
        self._join(sequence)  # here and not before: a stream that nobody begins to read is never aborted
        try:
            if is_chat:
                opening: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}}
                yield _event(envelope | {"choices": [opening]})
            while (tokens := await sequence.chunks.get()) is not None:
                text = WORD * tokens
                choice = {"delta": {"content": text}} if is_chat else {"text": text}
                finish = "length" if sequence.is_done and sequence.chunks.qsize() == 1 else None
                yield _event(envelope | {"choices": [{"index": 0, "finish_reason": finish} | choice]})
            if usage:
                yield _event(envelope | {"choices": [], "usage": _usage(sequence)})
            yield b"data: [DONE]\n\n"
        finally:
            self._abort(sequence)

    def _envelope(self, sequence: _Sequence, is_chat: bool, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if is_chat else "text_completion"
        return {
            "id": sequence.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._served_names[0],
        }


def _max_tokens(body: dict[str, Any]) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS


def _refused(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


def _usage(sequence: _Sequence) -> dict[str, int]:
    total = sequence.prompt_tokens + sequence.made
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": sequence.made,
        "total_tokens": total,
    }


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
