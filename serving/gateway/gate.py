"""What a request needs before it is read: bounded headers, and a key where keys are set."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from serving.core.errors import Reason, RefusedError
from serving.gateway.api_keys import ApiKeys
from serving.gateway.errors import error_response

# Far above what clients send: browsers and OpenAI's client stay below 20 headers and 4 KiB.
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32_768  # names, values, path and query together
# A load balancer's probe has no key, and learns nothing but that somebody answers, and serves.
FREE_PATHS = frozenset({"/health", "/ready", "/-/healthz"})


class Gate:
    """ASGI middleware that refuses what may not come in; every path but those of probes needs a key.

    Args:
        count_refusal: hears of each.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, count_refusal: Callable[[Reason], None]) -> None:
        self._app = app
        self._keys = keys
        self._count_refusal = count_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            self._count_refusal(refusal.reason)
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RefusedError | None:
        headers = scope["headers"]
        num_bytes = len(scope["path"]) + len(scope["query_string"])
        num_bytes += sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            return RefusedError(
                Reason.HEADERS_TOO_LARGE,
                f"{len(headers)} headers of {num_bytes} bytes, path and query included; "
                f"at most {MAX_HEADERS} and {MAX_HEADER_BYTES}",
            )
        if not self._keys.are_needed or scope["path"] in FREE_PATHS:
            return None
        shown = [value for name, value in headers if name == b"authorization"]
        if len(shown) == 1 and self._keys.accept(shown[0]):
            return None
        fault = "is not one of this lab's" if shown else "is missing"
        return RefusedError(
            Reason.INVALID_API_KEY, f"the API key {fault}; send the header `Authorization: Bearer KEY`"
        )
