"""Errors as the OpenAI API shapes them."""

from __future__ import annotations

import json
from typing import Any

from serving.core.errors import ERROR_SHAPES, Reason


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
    return headers


def error_event(reason: Reason, message: str) -> bytes:
    """An error inside a stream that has begun; OpenAI clients raise it."""
    return b"data: " + json.dumps(error_object(reason, message)).encode() + b"\n\n"
