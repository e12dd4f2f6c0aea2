"""Asks one address over HTTP, directly, and says in words what went wrong."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

READ_TIMEOUT_S = 10.0
MAX_SAID_BYTES = 500

# Reached directly, as the load is: a proxy of the environment must not see one and miss the other.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class GetError(Exception):
    """It could not be read; the text names the address. `status` is set when something answered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def get(url: str, headers: Mapping[str, str] | None = None) -> bytes:
    """The body of an answer.

    Raises:
        GetError: there is none, or it is not a good one.
    """
    request = urllib.request.Request(url)
    for name, value in (headers or {}).items():
        request.add_unredirected_header(name, value)  # a key is for the address that was named
    try:
        return _answer(request, READ_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            raise GetError(f"{url}: answered {error.code} {error.reason}", error.code) from None


def post(
    url: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = READ_TIMEOUT_S,
) -> bytes:
    """The body of an answer to JSON, or to nothing.

    A server that does not read what it is sent may answer and close first, which loses the answer: to such a one
    send nothing.

    Raises:
        GetError: there is none, or it is not a good one; the text then says what the server said.
    """
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    for name, value in (headers or {}).items():
        request.add_unredirected_header(name, value)
    try:
        return _answer(request, timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(MAX_SAID_BYTES).decode(errors="replace")
        raise GetError(f"{url}: answered {error.code}: {said}", error.code) from None


def _answer(request: urllib.request.Request, timeout_s: float) -> bytes:
    """Raises: HTTPError: not a good one; GetError: none."""
    url = request.full_url
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return bytes(response.read())
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise GetError(f"{url}: cannot be reached: {reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise GetError(f"{url}: cannot be read: {getattr(error, 'strerror', None) or repr(error)}") from None
