"""A simulated engine that costs next to nothing, to be streamed from while something else is measured.

The simulated engine makes each chunk when it is due and stamps its write. This one prepares the event of a stream
once and writes the same bytes in every step, from one loop over all streams, which is several times as cheap. For
that it has no drafts, no stalls, no stamps, and records no steps.

Its steps are those of a batch, as an engine's are: all streams get their token at the same instant, and a request
that comes in the middle of a step joins with the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.config import ROUNDING_S, LaneConfig
from serving.core.lane import EngineFacts
from serving.engines.base import EngineTally, FinishedRequest
from serving.engines.simulated.metrics import SimulatedMetrics
from serving.engines.steps.log import StepLog

# A token. It is in no name, so that whoever counts these bytes counts tokens.
WORD = "syllable "
# A request whose prompt holds this gets its first token and then nothing until its client leaves, or `SILENCE_S`
# have passed: some gateways only notice that a client has left when they have something to send.
SILENCE = "say one word and keep the line open"
SILENCE_S = 150.0
# All events of an answer together stay below what uvicorn buffers of a connection (64 KiB), so that no write ever
# waits for a slow reader, and one loop can make all of them.
MAX_TOKENS = 256
DONE = b"data: [DONE]\n\n"
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Asked(msgspec.Struct):
    """What is read of a request."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: _StreamOptions | None = None


@dataclass(eq=False, slots=True)
class _Answer:
    """One answer on its way.

    Attributes:
        send: writes to its connection; None for an answer that is sent as a whole at its end.
        event: the bytes of a token, those of every token but the last.
        tail: the bytes that follow the last token.
        is_silent: it ends with its client, after the first token.
        ended: set when it has all its tokens.
    """

    request_id: str
    num_tokens: int
    send: Send | None
    opening: bytes
    event: bytes
    tail: bytes
    is_silent: bool
    made: int = 0
    started_at_s: float = 0.0
    due_at_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class PreparedEngine:
    """Answers of prepared bytes, on the schedule of a `SimulatedProfile`."""

    def __init__(self, lane: LaneConfig, served_names: list[str]) -> None:
        assert lane.simulated is not None, "config checks this"
        self._step_s = lane.simulated.step_ms / 1000
        self._ttft_s = lane.simulated.ttft_ms / 1000
        self._max_num_seqs = lane.max_num_seqs
        self._served_names = served_names
        self._metrics = SimulatedMetrics(lane.max_num_seqs * MAX_TOKENS, 0)
        self._tally = EngineTally()
        self._step_log = StepLog()
        self._waiting: deque[_Answer] = deque()
        self._running: set[_Answer] = set()
        self._silent: set[_Answer] = (
            set()
        )  # no longer in the batch: an engine with nothing to say takes no steps
        self._work = asyncio.Event()
        self._serial = itertools.count()
        self._stepper: asyncio.Task[None] | None = None

    @property
    def tally(self) -> EngineTally:
        return self._tally

    @property
    def step_log(self) -> StepLog:
        return self._step_log

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts("simulated", "simulated 1, prepared", has_model=False, device="none", dtype="none")

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    async def start(self) -> ASGIApp:
        self._stepper = asyncio.create_task(self._step_forever())
        return self._app

    def served_by(self, server: uvicorn.Server) -> None:
        pass

    def check(self) -> None:
        if self._stepper is not None and self._stepper.done():
            raise RuntimeError(f"the simulated engine's stepper ended: {self._stepper}")

    def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
        self._step_log.close()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        match scope["path"]:
            case "/v1/chat/completions" | "/v1/completions":
                await self._complete(scope, receive, send)
            case "/v1/models":
                models = [
                    {"id": name, "object": "model", "owned_by": "simulated"} for name in self._served_names
                ]
                await JSONResponse({"object": "list", "data": models})(scope, receive, send)
            case "/metrics":
                await PlainTextResponse(generate_latest(self.registry))(scope, receive, send)
            case "/health":
                self.check()
                await Response()(scope, receive, send)
            case _:
                await Response(status_code=404)(scope, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except msgspec.MsgspecError as error:
            return await _refused(400, f"the body cannot be read: {error}")(scope, receive, send)
        num_tokens = asked.max_completion_tokens or asked.max_tokens or 16
        if asked.model not in self._served_names:
            return await _refused(404, f"The model `{asked.model}` does not exist.")(scope, receive, send)
        if not 1 <= num_tokens <= MAX_TOKENS:
            text = f"max_tokens must be in 1..{MAX_TOKENS}, got {num_tokens}"
            return await _refused(400, text)(scope, receive, send)
        answer = self._answer(scope, asked, num_tokens, SILENCE.encode() in body, send)
        if asked.stream:
            await send(dict(START))
        self._waiting.append(answer)
        self._work.set()
        try:
            await _ended_or_left(answer, receive)
        finally:
            self._leave(answer)
        if asked.stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif answer.ended.is_set():
            whole = JSONResponse(
                _whole(answer, self._served_names[0], scope["path"].endswith("chat/completions"))
            )
            await whole(scope, receive, send)
        return None

    def _answer(self, scope: Scope, asked: _Asked, num_tokens: int, is_silent: bool, send: Send) -> _Answer:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode(
            "latin-1"
        )
        request_id = given or f"prepared-{next(self._serial)}"
        is_chat = scope["path"].endswith("chat/completions")
        envelope = {
            "id": request_id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._served_names[0],
        }

        def event(finish: str | None, text: str, **role: str) -> bytes:
            said = {"delta": {**role, "content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
            return b"data: " + json.dumps(envelope | {"choices": [choice]}).encode() + b"\n\n"

        usage = b""
        if asked.stream_options is not None and asked.stream_options.include_usage:
            said = json.dumps(envelope | {"choices": [], "usage": _usage(num_tokens)})
            usage = b"data: " + said.encode() + b"\n\n"
        return _Answer(
            request_id,
            num_tokens,
            send if asked.stream else None,
            # As vLLM does: an event without text, with the first token and not when the request comes in.
            opening=event(None, "", role="assistant") if is_chat else b"",
            event=event(None, WORD),
            tail=event("length", WORD) + usage + DONE,
            is_silent=is_silent,
        )

    def _leave(self, answer: _Answer) -> None:
        self._running.discard(answer)
        self._silent.discard(answer)
        if answer in self._waiting:
            self._waiting.remove(answer)
        self._note_load()

    def _note_load(self) -> None:
        self._tally.load(len(self._running) + len(self._silent), len(self._waiting))

    async def _step_forever(self) -> None:
        due_at_s = time.monotonic()
        while True:
            # Whole steps are not made up for: an engine that was held up goes on at its pace and not in a burst.
            due_at_s = max(due_at_s, time.monotonic() - self._step_s)
            self._schedule(due_at_s)
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due_at_s = time.monotonic()
                continue
            due_at_s += self._step_s  # an absolute schedule: late wake-ups do not add up
            await asyncio.sleep(max(0.0, due_at_s - time.monotonic()))
            batch = [answer for answer in self._running if answer.due_at_s <= due_at_s]
            for answer in batch:
                await self._emit(answer)  # never waits: see MAX_TOKENS
            self._metrics.stepped(len(batch), len(batch))
            running = len(self._running) + len(self._silent)
            self._tally.step(running, len(self._waiting), ended_at_s=time.monotonic())

    def _schedule(self, due_at_s: float) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            answer = self._waiting.popleft()
            answer.started_at_s = time.time()
            answer.due_at_s = due_at_s + self._ttft_s - ROUNDING_S
            self._running.add(answer)
        self._note_load()

    async def _emit(self, answer: _Answer) -> None:
        answer.made += 1
        is_last = answer.made == answer.num_tokens and not answer.is_silent
        body = answer.tail if is_last else answer.event
        if answer.made == 1:
            body = answer.opening + body
            if answer.is_silent:
                self._running.discard(answer)
                self._silent.add(answer)
                asyncio.get_running_loop().call_later(SILENCE_S, answer.ended.set)
        if answer.send is not None:
            await answer.send({"type": "http.response.body", "body": body, "more_body": True})
        if is_last:
            self._running.discard(answer)
            ended_at_s = time.time()
            finished = FinishedRequest(answer.request_id, answer.started_at_s, ended_at_s, 1, answer.made)
            self._tally.finish([finished])
            answer.ended.set()


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _ended_or_left(answer: _Answer, receive: Receive) -> None:
    """Wait until the answer has all its tokens, or its client is gone."""
    gone: asyncio.Task[MutableMapping[str, Any]] = asyncio.ensure_future(receive())
    ended = asyncio.ensure_future(answer.ended.wait())
    try:
        await asyncio.wait((gone, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        ended.cancel()


def _whole(answer: _Answer, model: str, is_chat: bool) -> dict[str, Any]:
    text = WORD * answer.made
    said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {
        "id": answer.request_id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "finish_reason": "length", **said}],
        "usage": _usage(answer.made),
    }


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}


def _refused(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
