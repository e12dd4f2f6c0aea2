"""The simulated engine's HTTP side: OpenAI's protocol, each write stamped."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from serving.engines.base import SentStream, SentWrite
from serving.engines.simulated.batch import SimulatedAnswer, SimulatedBatch

WORD = "simulated "  # one token
DONE = b"data: [DONE]\n\n"
DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 128  # of each prompt


@dataclass(frozen=True, slots=True)
class _UsageAsked:
    """What `stream_options` asks for, as vLLM reads it: no continuous usage without the usage at the end."""

    at_end: bool
    in_each_chunk: bool

    @classmethod
    def of(cls, body: dict[str, Any]) -> _UsageAsked:
        options = body.get("stream_options") or {}
        at_end = bool(options.get("include_usage"))
        return cls(at_end, at_end and bool(options.get("continuous_usage_stats")))


class SimulatedApi:
    """Routes, and what they answer.

    Args:
        served_names: the model names it answers to; the first is the one it gives itself.
        check: raises when the engine is no longer at work.
        max_model_len: tokens, prompt and answer together.
        killed_by: a prompt with this in it kills the engine; None: none does.
    """

    def __init__(
        self,
        batch: SimulatedBatch,
        check: Callable[[], None],
        served_names: list[str],
        max_model_len: int,
        killed_by: str | None = None,
    ) -> None:
        self._batch = batch
        self._check = check
        self._served_names = served_names
        self._max_model_len = max_model_len
        self._killed_by = killed_by

    def app(self) -> ASGIApp:
        """The application of the API."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(generate_latest(self._batch.metrics.registry))

    async def _health(self, _: Request) -> Response:
        self._check()
        return Response()

    async def _models(self, _: Request) -> Response:
        shown = {"object": "model", "owned_by": "simulated", "max_model_len": self._max_model_len}
        return JSONResponse({"object": "list", "data": [{"id": name} | shown for name in self._served_names]})

    async def _complete(self, request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError as error:
            return _refused(400, f"the body is not JSON: {error}")
        received_monotonic_ns = time.monotonic_ns()
        is_chat = request.url.path.endswith("chat/completions")
        if fault := self._fault(body, is_chat):
            return _refused(*fault)
        prompts = [_num_words(prompt) for prompt in _prompts(body, is_chat)]
        request_id = request.headers.get("x-request-id")
        kills = self._killed_by is not None and self._killed_by in str(_prompts(body, is_chat))
        answer = self._batch.answer(request_id, prompts, _num_choices(body), _max_tokens(body), kills=kills)
        if not body.get("stream"):
            return await self._whole(answer, is_chat, request)
        sent = SentStream(answer.request_id, sum(prompts), received_monotonic_ns)
        events = self._events(answer, is_chat, _UsageAsked.of(body), sent)
        return StreamingResponse(events, media_type="text/event-stream")

    def _fault(self, body: Any, is_chat: bool) -> tuple[int, str] | None:
        if not isinstance(body, dict):
            return 400, f"the body must be a JSON object, got {type(body).__name__}"
        if body.get("model") not in self._served_names:
            return 404, f"The model `{body.get('model')}` does not exist."
        wanted = "messages" if is_chat else "prompt"
        prompts = _prompts(body, is_chat)
        if not prompts or not all(isinstance(prompt, list if is_chat else str) for prompt in prompts):
            return 400, _wrong_prompt(body.get(wanted), is_chat)
        if not isinstance(body.get("stream_options") or {}, dict):
            return 400, "`stream_options` must be an object"
        max_tokens = _max_tokens(body)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            return 400, f"max_tokens must be an integer of 1 or more, got {max_tokens!r}"
        num_choices = _num_choices(body)
        if not isinstance(num_choices, int) or not 1 <= num_choices <= MAX_CHOICES:
            return 400, f"n must be an integer in 1..{MAX_CHOICES}, got {num_choices!r}"
        if max(map(_num_words, prompts)) + max_tokens > self._max_model_len:
            return 400, f"This model's maximum context length is {self._max_model_len} tokens."
        return None

    async def _whole(self, answer: SimulatedAnswer, is_chat: bool, request: Request) -> Response:
        gone = asyncio.create_task(_gone(request))
        self._batch.join(answer)
        try:
            num_running = len(answer.choices)
            while num_running:
                chunk = asyncio.create_task(answer.chunks.get())
                await asyncio.wait({chunk, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    chunk.cancel()
                    return Response(status_code=499)
                num_running -= chunk.result().is_last
        finally:
            gone.cancel()
            self._batch.abort(answer)
        choices = []
        for one in answer.choices:
            text = WORD * one.made
            said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            choices.append({"index": one.choice, "finish_reason": "length"} | said)
        made = sum(one.made for one in answer.choices)
        parts = {"choices": choices, "usage": _usage(sum(answer.prompts), made)}
        return JSONResponse(self._envelope(answer, is_chat, "") | parts)

    async def _events(
        self, answer: SimulatedAnswer, is_chat: bool, asked: _UsageAsked, sent: SentStream
    ) -> AsyncIterator[bytes]:
        envelope = self._envelope(answer, is_chat, ".chunk")
        self._batch.join(answer)  # here and not before: a stream that nobody begins to read is never aborted
        self._batch.tally.sent.append(sent)
        made = [0] * len(answer.choices)

        def event(number: int, finish: str | None = None, **said: Any) -> bytes:
            """One of one choice; as with vLLM, its usage so far is of that choice alone."""
            choice = {"index": number, "finish_reason": finish} | said
            prompt_tokens = answer.choices[number].prompt_tokens
            usage = {"usage": _usage(prompt_tokens, made[number])} if asked.in_each_chunk else {}
            return _event(envelope | {"choices": [choice]} | usage)

        try:
            num_running = len(made)
            while num_running:
                chunk = await answer.chunks.get()
                if is_chat and not any(made):
                    # As vLLM does: events without text, with the first token and not when the request comes in.
                    for number in range(len(made)):
                        yield event(number, delta={"role": "assistant", "content": ""})
                made[chunk.choice] += chunk.tokens
                num_running -= chunk.is_last
                text = WORD * chunk.tokens
                said = {"delta": {"content": text}} if is_chat else {"text": text}
                payload = event(chunk.choice, "length" if chunk.is_last else None, **said)
                # The server writes what is yielded before it asks for more: the stamps lie around its write.
                unix_ns, before_ns = time.time_ns(), time.monotonic_ns()
                yield payload
                written_ns = time.monotonic_ns()
                sent.chunks.append(SentWrite(chunk.tokens, unix_ns, before_ns, written_ns, chunk.choice))
            if asked.at_end:
                yield _event(envelope | {"choices": [], "usage": _usage(sum(answer.prompts), sum(made))})
            unix_ns, before_ns = time.time_ns(), time.monotonic_ns()
            yield DONE
            sent.done = SentWrite(0, unix_ns, before_ns, time.monotonic_ns())
        finally:
            self._batch.abort(answer)

    def _envelope(self, answer: SimulatedAnswer, is_chat: bool, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if is_chat else "text_completion"
        return {
            "id": answer.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._served_names[0],
        }


def _prompts(body: dict[str, Any], is_chat: bool) -> list[Any]:
    """What is to be completed: one conversation, one text, or each text of a list."""
    if is_chat:
        return [body.get("messages")]
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, list) else [prompt]


def _wrong_prompt(given: Any, is_chat: bool) -> str:
    """What is wrong, without the client's text."""
    if is_chat:
        return f"messages must be a list of messages, got {type(given).__name__}"
    has_ids = isinstance(given, list) and any(isinstance(part, int | list) for part in given)
    got = "token ids" if has_ids else "an empty list" if given == [] else type(given).__name__
    if isinstance(given, list) and given and not has_ids:
        got = "a list with other things in it"
    return (
        f"prompt must be a text or a list of texts, got {got}; the simulated engine has no tokenizer and takes no "
        "token ids, vLLM's lanes do"
    )


def _num_choices(body: dict[str, Any]) -> Any:
    return 1 if body.get("n") is None else body["n"]


def _max_tokens(body: dict[str, Any]) -> Any:
    return body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS


def _num_words(part: Any) -> int:
    """The words of a prompt, or of the contents of messages and of their text parts: what stands for its tokens."""
    if isinstance(part, str):
        return len(part.split())
    if isinstance(part, list):
        return sum(map(_num_words, part))
    return _num_words(part.get("content") or part.get("text")) if isinstance(part, dict) else 0


def _refused(status: int, message: str) -> Response:
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


def _usage(prompt_tokens: int, made: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
    }


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
