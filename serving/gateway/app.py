"""The gateway's HTTP application: routes and nothing else.

`x-request-id` is put on every response by Ray Serve's proxy: the client's own, or one that the proxy made.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from serving import __version__
from serving.config import GatewayConfig, LabConfig
from serving.core.errors import ERROR_SHAPES, MAX_SHOWN_CHARS, Reason, RefusedError
from serving.core.processor_time import group_niceness, niceness
from serving.core.request import Outcome
from serving.gateway.api_keys import ApiKeys
from serving.gateway.completion import Completion, Services
from serving.gateway.errors import error_response
from serving.gateway.gate import Gate
from serving.gateway.openai_request import model_names, route, unknown_model

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
DISTINCT_BYTES = 6
READ = ["GET", "HEAD"]
# What a page of another origin may read of an answer.
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-tandem-lane", "x-tandem-replica", "x-tandem-reason")
PREFLIGHT_MAX_AGE_S = 600
NO_KEYS = ApiKeys()
AskScheduler = Callable[[str], Awaitable[Any]]


def build_gateway_app(
    config: LabConfig, services: Services, ask_scheduler: AskScheduler, keys: ApiKeys = NO_KEYS
) -> FastAPI:
    """The application.

    Args:
        ask_scheduler: gets a path of the scheduler's own HTTP interface as JSON.
        keys: what opens it.
    """
    # No pages of FastAPI's own, and no redirects to whatever host the client names.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.add_middleware(Gate, keys=keys, count_refusal=services.metrics.refused)
    if origins := config.gateway.cors_allowed_origins:
        # Outside of the gate: a browser asks for leave without a key, and must be able to read a refusal.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=[*READ, "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_MAX_AGE_S,
        )
    started_at = int(time.time())

    async def complete(request: Request, *, is_chat: bool) -> Any:
        arrived_at_s = time.monotonic()
        try:
            client_id = _client_request_id(request) or uuid.uuid4().hex
            # Two requests may carry the same id at once; scheduler and engine need to tell them apart.
            request_id = f"{client_id}-{secrets.token_hex(DISTINCT_BYTES)}"
            raw = await _body(request, config.gateway)
            routed = route(raw, request.headers, request_id=request_id, is_chat=is_chat, config=config)
        except RefusedError as refusal:
            services.metrics.refused(refusal.reason)
            return error_response(refusal)
        except ClientDisconnect:
            services.metrics.ended("", Outcome.CANCELLED, Reason.CLIENT_CLOSED)
            return Response(
                status_code=ERROR_SHAPES[Reason.CLIENT_CLOSED].status
            )  # nobody is there to read it
        # An ASGI response, run by whom it is returned to: Starlette calls it with the connection.
        return Completion(
            services,
            routed,
            path=_path(request),
            client_request_id=client_id,
            arrived_at_s=arrived_at_s,
            headers=request.headers,
        )

    async def chat_completions(request: Request) -> Any:
        return await complete(request, is_chat=True)

    async def completions(request: Request) -> Any:
        return await complete(request, is_chat=False)

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        return error_response(
            RefusedError(Reason.NOT_FOUND, f"no such path: {_path(request)[:MAX_SHOWN_CHARS]}")
        )

    @app.exception_handler(405)
    async def wrong_method(request: Request, _: Exception) -> Response:
        message = f"{request.method} is not allowed on {_path(request)}"
        return error_response(RefusedError(Reason.METHOD_NOT_ALLOWED, message))

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        # Starlette raises the error again after this answer, so the server logs where it came from.
        return error_response(RefusedError(Reason.INTERNAL, f"the gateway failed: {type(error).__name__}"))

    # Plain routes: the answer is an ASGI application, which FastAPI's own would try to serialise.
    app.add_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_route("/v1/completions", completions, methods=["POST"])

    def model(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started_at, "owned_by": "tandem"}

    @app.api_route("/v1/models", methods=READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in model_names(config)]}

    @app.api_route("/v1/models/{name:path}", methods=READ, response_model=None)
    async def one_model(name: str) -> dict[str, Any] | Response:
        return model(name) if name in model_names(config) else error_response(unknown_model(name, config))

    @app.api_route("/health", methods=READ)
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/ready", methods=READ, response_model=None)
    async def ready() -> dict[str, str] | Response:
        try:
            status = await ask_scheduler("/scheduler")
        except (aiohttp.ClientError, OSError, TimeoutError):
            return error_response(RefusedError(Reason.SCHEDULER_UNREACHABLE, "the scheduler does not answer"))
        if status["draining"]:
            return error_response(RefusedError(Reason.DRAINING, "the lab is shutting down"))
        if not any(lane["replicas"] for lane in status["lanes"]):
            return error_response(RefusedError(Reason.NO_REPLICA_READY, "no lane has a ready replica"))
        return {"status": "ready"}

    @app.api_route("/scheduler", methods=READ)
    async def scheduler() -> Any:
        return await ask_scheduler("/scheduler")

    @app.api_route("/targets", methods=READ)
    async def targets() -> Any:
        return await ask_scheduler("/targets")

    @app.api_route("/lab", methods=READ)
    async def lab() -> dict[str, Any]:
        replicas = await ask_scheduler("/replicas")
        return {
            "tandem_version": __version__,
            "config": config.model_dump(mode="json"),
            "replicas": replicas,
            # As they are, not as they were wished for: on a cluster of others they may not be had.
            "priorities": {"gateway_niceness": niceness(), "gateway_group_niceness": group_niceness()},
        }

    return app


def _path(request: Request) -> str:
    """The path as it was routed; `request.url` is put together with the client's `Host`."""
    path: str = request.scope["path"]
    return path


def _client_request_id(request: Request) -> str | None:
    given = request.headers.get("x-request-id")
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise RefusedError(
            Reason.BAD_REQUEST, f"x-request-id must be 1 to 128 printable ASCII characters, got {len(given)}"
        )
    return given


async def _body(request: Request, config: GatewayConfig) -> bytes:
    """The request's body, never more of it than the limit, and not for longer."""
    body = bytearray()
    try:
        async with asyncio.timeout(config.upload_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > config.max_body_bytes:
                    raise RefusedError(
                        Reason.REQUEST_TOO_LARGE,
                        f"the body exceeds {config.max_body_bytes} bytes (gateway.max_body_bytes)",
                    )
    except TimeoutError:
        raise RefusedError(
            Reason.UPLOAD_TIMEOUT,
            f"the body was not whole after {config.upload_timeout_s:g} s (gateway.upload_timeout_s)",
        ) from None
    return bytes(body)
