"""A small server of the OpenAI API that is not ours, with the faults that such servers have."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

NATURAL_TOKENS = 3  # what it writes when nothing makes it write more


@dataclass
class StandInServer:
    """What it does, changed while it runs; and what it was asked.

    Attributes:
        key: without it in a request, all but its health is answered 401.
        keeps_min_tokens, keeps_ignore_eos, keeps_cache_salt: whether these options do anything.
        metrics: its page; None for a server without.
        health_status: of `/health`; 404 for a server without.
        certificate: file of its certificate and key; it then speaks https.
        hangs: answers nothing any more.
        refused: options that are answered 400.
        asked: bodies of completions, with their headers.
    """

    models: list[str] = field(default_factory=lambda: ["theirs/model-1"])
    key: str | None = None
    certificate: Path | None = None
    health_status: int = 200
    metrics: str | None = "# HELP x\nvllm:num_requests_running 7.0\n"
    hangs: bool = False
    gives_usage: bool = True
    keeps_min_tokens: bool = True
    keeps_ignore_eos: bool = True
    keeps_cache_salt: bool = True
    refused: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions")
    asked: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    cached: list[tuple[Any, ...]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://127.0.0.1:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        return context

    def app(self) -> web.Application:
        @web.middleware
        async def gate(request: web.Request, handler: Any) -> web.StreamResponse:
            if self.hangs:
                await asyncio.sleep(3600)
            shown = request.headers.get("authorization")
            if self.key is not None and request.path != "/health" and shown != f"Bearer {self.key}":
                return web.json_response({"error": {"message": f"not {shown}"}}, status=401)
            response: web.StreamResponse = await handler(request)
            return response

        app = web.Application(middlewares=[gate])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._list)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/{kind:.+}", self._complete)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _list(self, _: web.Request) -> web.Response:
        data = [
            {"id": name, "object": "model", "owned_by": "them", "max_model_len": 512} for name in self.models
        ]
        return web.json_response({"object": "list", "data": data})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.metrics is None else web.Response(text=self.metrics)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((body, headers))
        if request.path not in self.paths or body["model"] not in self.models:
            return web.json_response({"error": {"message": "no such path or model"}}, status=404)
        if refused := [option for option in self.refused if option in body]:
            return web.json_response({"error": {"message": f"unknown field {refused[0]}"}}, status=400)
        longest = body.get("max_tokens", 16)
        wanted = body.get("min_tokens", 0) if self.keeps_min_tokens else 0
        if self.keeps_ignore_eos and body.get("ignore_eos"):
            wanted = longest
        num_tokens = min(longest, max(NATURAL_TOKENS, wanted))
        usage: dict[str, Any] = {
            "prompt_tokens": 4,
            "completion_tokens": num_tokens,
            "total_tokens": 4 + num_tokens,
        }
        prompt = (body.get("messages"), body.get("prompt"), self.keeps_cache_salt and body.get("cache_salt"))
        usage["prompt_tokens_details"] = {"cached_tokens": 3 if prompt in self.cached else 0}
        self.cached.append(prompt)
        is_chat = "chat" in request.path
        if not body.get("stream"):
            text = "word " * num_tokens
            choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            choices = [{"index": 0, "finish_reason": "stop", **choice}]
            return web.json_response({"model": body["model"], "choices": choices, "usage": usage})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(num_tokens):
            piece: dict[str, Any] = {"delta": {"content": "word "}} if is_chat else {"text": "word "}
            end = "stop" if number == num_tokens - 1 else None
            choices = [{"index": 0, "finish_reason": end, **piece}]
            await response.write(_event({"model": body["model"], "choices": choices}))
        if self.gives_usage and (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event({"model": body["model"], "choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def serving(server: StandInServer) -> AsyncIterator[StandInServer]:
    """The server on a port, its last one if it has run before, until the block is left."""
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(
            runner, "127.0.0.1", server.port, reuse_address=True, ssl_context=server.tls()
        ).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def serving_in_thread(server: StandInServer) -> Iterator[StandInServer]:
    """The same, for tests without an event loop."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    leave = asyncio.Event()

    async def run() -> None:
        async with serving(server):
            started.set()
            await leave.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert started.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join()
        loop.close()
