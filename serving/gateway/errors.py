"""Errors as the OpenAI API shapes them."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse, Response

from serving.core.errors import ERROR_SHAPES, Reason, RefusedError
from serving.core.sse import parse_answer

# How vLLM 0.32 words it, in `renderers/params.py` and `v1/engine/input_processor.py`.
TOO_LONG_PHRASES = ("maximum context length", "maximum model length")
# Refused before the body was read: what else comes of it belongs to no request.
UNREAD = frozenset(
    {
        Reason.INVALID_API_KEY,
        Reason.HEADERS_TOO_LARGE,
        Reason.REQUEST_TOO_LARGE,
        Reason.UPLOAD_TIMEOUT,
        Reason.TOO_MANY_CONNECTIONS,
    }
)


def error_object(reason: Reason, message: str) -> dict[str, Any]:
    """The body of an error: `code` is the machine-readable reason."""
    return {
        "error": {"message": message, "type": ERROR_SHAPES[reason].type, "param": None, "code": str(reason)}
    }


def error_headers(reason: Reason, retry_after_s: float | None = None) -> dict[str, str]:
    """Headers of an error response."""
    headers = {"x-tandem-reason": str(reason)}
    if retry_after_s is not None:
        headers["retry-after"] = f"{retry_after_s:.0f}"
    if reason in UNREAD:
        headers["connection"] = "close"
    if reason is Reason.INVALID_API_KEY:
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(refusal: RefusedError) -> Response:
    """The whole answer to a request that is refused."""
    return JSONResponse(
        error_object(refusal.reason, str(refusal)),
        status_code=ERROR_SHAPES[refusal.reason].status,
        headers=error_headers(refusal.reason, refusal.retry_after_s),
    )


def error_event(reason: Reason, message: str) -> bytes:
    """An error inside a stream that has begun; OpenAI clients raise it."""
    return b"data: " + json.dumps(error_object(reason, message)).encode() + b"\n\n"


def refusal_reason(body: bytes) -> Reason:
    """Why an engine refused a request with a 4xx, by the message in its answer."""
    said = parse_answer(body).error or ""
    is_too_long = any(phrase in said for phrase in TOO_LONG_PHRASES)
    return Reason.REQUEST_TOO_LONG if is_too_long else Reason.BAD_REQUEST
