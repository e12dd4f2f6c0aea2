"""The gateway's HTTP application: routes and nothing else."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serving import __version__
from serving.config import GatewayConfig, LabConfig
from serving.core.errors import ERROR_SHAPES, MAX_SHOWN_CHARS, Reason, RefusedError
from serving.core.processor_time import group_niceness, niceness
from serving.core.request import Outcome
from serving.gateway.api_keys import ApiKeys
from serving.gateway.completion import Completion, Services
from serving.gateway.errors import error_response
from serving.gateway.gate import Gate
from serving.gateway.named_answers import CLIENT_REQUEST_ID, REQUEST_ID, REQUEST_ID_HEADER, NamedAnswers
from serving.gateway.openai_request import model_names, route, unknown_model

DISTINCT_BYTES = 6
COMPLETIONS = {"/v1/chat/completions": True, "/v1/completions": False}  # path, and whether it is a chat's
READ = ["GET", "HEAD"]
# What a page of another origin may read of an answer.
EXPOSED_HEADERS = ("x-request-id", "retry-after", "x-tandem-lane", "x-tandem-replica", "x-tandem-reason")
PREFLIGHT_MAX_AGE_S = 600
NO_KEYS = ApiKeys()
AskScheduler = Callable[[str], Awaitable[Any]]


def build_gateway_app(
    config: LabConfig, services: Services, ask_scheduler: AskScheduler, keys: ApiKeys = NO_KEYS
) -> ASGIApp:
    """The application.

    Args:
        ask_scheduler: gets a path of the scheduler's own HTTP interface as JSON.
        keys: what opens it.
    """
    app: ASGIApp = _Routes(config, services, build_pages(config, ask_scheduler))
    app = Gate(app, keys, services.metrics.refused)
    if origins := config.gateway.cors_allowed_origins:
        # Outside of the gate: a browser asks for leave without a key, and must be able to read a refusal.
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=[*READ, "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_MAX_AGE_S,
        )
    return NamedAnswers(app)


class _Routes:
    """A completion goes straight to its work, everything else to the pages."""

    def __init__(self, config: LabConfig, services: Services, pages: ASGIApp) -> None:
        self._config = config
        self._services = services
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_chat = COMPLETIONS.get(scope.get("path", ""))
        if is_chat is None:
            await self._pages(scope, receive, send)
        elif scope["method"] != "POST":
            await error_response(_not_allowed(scope))(scope, receive, send)
        else:
            answer = await self._complete(scope, receive, is_chat=is_chat)
            await answer(scope, receive, send)

    async def _complete(self, scope: Scope, receive: Receive, *, is_chat: bool) -> ASGIApp:
        """What answers it: a completion that is to be run, or why there is none."""
        arrived_at_s = time.monotonic()
        services, config = self._services, self._config
        client_id: str = scope["state"][CLIENT_REQUEST_ID]
        # Two requests may carry the same id at once; scheduler and engine need to tell them apart.
        request_id = f"{client_id}-{secrets.token_hex(DISTINCT_BYTES)}"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            _check_request_id(headers)
            raw = await _body(Request(scope, receive), config.gateway)
            routed = route(raw, headers, request_id=request_id, is_chat=is_chat, config=config)
        except RefusedError as refusal:
            services.metrics.refused(refusal.reason)
            return error_response(refusal)
        except ClientDisconnect:
            services.metrics.ended("", Outcome.CANCELLED, Reason.CLIENT_CLOSED)
            return Response(
                status_code=ERROR_SHAPES[Reason.CLIENT_CLOSED].status
            )  # nobody is there to read it
        return Completion(
            services,
            routed,
            path=scope["path"],
            client_request_id=client_id,
            arrived_at_s=arrived_at_s,
            headers=headers,
        )


def build_pages(config: LabConfig, ask_scheduler: AskScheduler) -> FastAPI:
    """All that is no completion: the models, the lab's state, its health."""
    # No pages of FastAPI's own, and no redirects to whatever host the client names.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    started_at = int(time.time())

    @app.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        path = request.scope["path"][:MAX_SHOWN_CHARS]
        return error_response(RefusedError(Reason.NOT_FOUND, f"no such path: {path}"))

    @app.exception_handler(405)
    async def wrong_method(request: Request, _: Exception) -> Response:
        return error_response(_not_allowed(request.scope))

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> Response:
        # Starlette raises the error again after this answer, so the server logs where it came from.
        return error_response(RefusedError(Reason.INTERNAL, f"the gateway failed: {type(error).__name__}"))

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

    @app.api_route("/-/healthz", methods=READ)
    async def healthz() -> PlainTextResponse:
        return PlainTextResponse("success")  # what KubeRay asks of the port of a Serve application

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


def _not_allowed(scope: Scope) -> RefusedError:
    return RefusedError(Reason.METHOD_NOT_ALLOWED, f"{scope['method']} is not allowed on {scope['path']}")


def _check_request_id(headers: Mapping[str, str]) -> None:
    given = headers.get(REQUEST_ID_HEADER)
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise RefusedError(
            Reason.BAD_REQUEST, f"x-request-id must be 1 to 128 printable ASCII characters, got {len(given)}"
        )


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
