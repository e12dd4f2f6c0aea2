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
from serving.engines.simulated.batch import SimulatedBatch, SimulatedRequest

WORD = "simulated "  # one token
DONE = b"data: [DONE]\n\n"
DEFAULT_MAX_TOKENS = 16


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
    """

    def __init__(
        self,
        batch: SimulatedBatch,
        check: Callable[[], None],
        served_names: list[str],
        max_model_len: int,
    ) -> None:
        self._batch = batch
        self._check = check
        self._served_names = served_names
        self._max_model_len = max_model_len

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
        prompt_tokens = _num_words(body["messages"] if is_chat else body["prompt"])
        sequence = self._batch.request(request.headers.get("x-request-id"), prompt_tokens, _max_tokens(body))
        if not body.get("stream"):
            return await self._whole(sequence, is_chat, request)
        sent = SentStream(sequence.request_id, prompt_tokens, received_monotonic_ns)
        events = self._events(sequence, is_chat, _UsageAsked.of(body), sent)
        return StreamingResponse(events, media_type="text/event-stream")

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
        if _num_words(body[wanted]) + max_tokens > self._max_model_len:
            return 400, f"This model's maximum context length is {self._max_model_len} tokens."
        return None

    async def _whole(self, sequence: SimulatedRequest, is_chat: bool, request: Request) -> Response:
        gone = asyncio.create_task(_gone(request))
        self._batch.join(sequence)
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
            self._batch.abort(sequence)
        text = WORD * sequence.made
        choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return JSONResponse(
            self._envelope(sequence, is_chat, "")
            | {
                "choices": [{"index": 0, "finish_reason": "length"} | choice],
                "usage": _usage(sequence, sequence.made),
            }
        )

    async def _events(
        self, sequence: SimulatedRequest, is_chat: bool, asked: _UsageAsked, sent: SentStream
    ) -> AsyncIterator[bytes]:
        envelope = self._envelope(sequence, is_chat, ".chunk")
        self._batch.join(
            sequence
        )  # here and not before: a stream that nobody begins to read is never aborted
        self._batch.tally.sent.append(sent)
        made = 0

        def event(**parts: Any) -> bytes:
            usage = {"usage": _usage(sequence, made)} if asked.in_each_chunk else {}
            return _event(envelope | parts | usage)

        try:
            while (tokens := await sequence.chunks.get()) is not None:
                if is_chat and made == 0:
                    # As vLLM does: an event without text, with the first token and not when the request comes in.
                    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
                made += tokens
                text = WORD * tokens
                choice = {"delta": {"content": text}} if is_chat else {"text": text}
                finish = "length" if made >= sequence.max_tokens else None
                payload = event(choices=[{"index": 0, "finish_reason": finish} | choice])
                # The server writes what is yielded before it asks for more: the stamps lie around its write.
                unix_ns, before_ns = time.time_ns(), time.monotonic_ns()
                yield payload
                sent.chunks.append(SentWrite(tokens, unix_ns, before_ns, time.monotonic_ns()))
            if asked.at_end:
                yield _event(envelope | {"choices": [], "usage": _usage(sequence, made)})
            unix_ns, before_ns = time.time_ns(), time.monotonic_ns()
            yield DONE
            sent.done = SentWrite(0, unix_ns, before_ns, time.monotonic_ns())
        finally:
            self._batch.abort(sequence)

    def _envelope(self, sequence: SimulatedRequest, is_chat: bool, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" + suffix if is_chat else "text_completion"
        return {
            "id": sequence.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._served_names[0],
        }


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


def _usage(sequence: SimulatedRequest, made: int) -> dict[str, int]:
    return {
        "prompt_tokens": sequence.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": sequence.prompt_tokens + made,
    }


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
