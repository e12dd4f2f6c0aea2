"""Asks one address over HTTP, directly, and says in words what went wrong."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from serving.core.addresses import without_secrets

READ_TIMEOUT_S = 10.0
MAX_SAID_BYTES = 500
MAX_LINE_BYTES = 1024 * 1024
PIECE_BYTES = 64 * 1024

# Reached directly, as the load is: a proxy of the environment must not see one and miss the other.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class GetError(Exception):
    """It could not be read; the text names the address.

    Attributes:
        why: the text without the address.
        status: of the answer; None when there was none.
        said: how the answer to a post begins, when it is not a good one.
    """

    def __init__(self, url: str, why: str, status: int | None = None, said: str = "") -> None:
        super().__init__(f"{without_secrets(url)}: {why}")
        self.why = why
        self.status = status
        self.said = said


def get(url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = READ_TIMEOUT_S) -> bytes:
    """The body of an answer.

    Args:
        headers: for this address alone; a redirect does not take them along.
        timeout_s: of silence, and of the whole body.

    Raises:
        GetError: there is none, or it is not a good one.
    """
    try:
        return b"".join(_pieces(urllib.request.Request(url), headers, timeout_s))
    except urllib.error.HTTPError as error:
        with error:
            raise GetError(url, f"answered {error.code} {error.reason}", error.code) from None


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
    return b"".join(_posted(url, b"" if body is None else json.dumps(body).encode(), headers, timeout_s))


def post_lines(url: str, *, timeout_s: float = READ_TIMEOUT_S) -> Iterator[bytes]:
    """The lines of an answer to nothing, as they come: all of it may be more than memory should hold.

    Raises:
        GetError: as `post`, or a line is longer than `MAX_LINE_BYTES`.
    """
    rest = b""
    for piece in _posted(url, b"", None, timeout_s):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise GetError(url, f"cannot be read: a line has more than {MAX_LINE_BYTES} bytes")
    if rest:
        yield rest


def _posted(url: str, data: bytes, headers: Mapping[str, str] | None, timeout_s: float) -> Iterator[bytes]:
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        yield from _pieces(request, headers, timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(MAX_SAID_BYTES).decode(errors="replace")
        raise GetError(url, f"answered {error.code}: {said}", error.code, said) from None


def _pieces(
    request: urllib.request.Request, headers: Mapping[str, str] | None, timeout_s: float
) -> Iterator[bytes]:
    """The body as it comes.

    Raises:
        HTTPError: it is not a good one.
        GetError: there is none, or it breaks off, or takes longer than `timeout_s`.
    """
    url = request.full_url
    for name, value in (headers or {}).items():
        request.add_unredirected_header(name, value)  # a key is for the address that was named
    give_up_at_s = time.monotonic() + timeout_s
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            while piece := response.read1(PIECE_BYTES):
                if time.monotonic() > give_up_at_s:
                    raise TimeoutError(f"not whole within {timeout_s:g} s")
                yield piece
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise GetError(url, f"cannot be reached: {reason}") from None
    except (OSError, http.client.HTTPException) as error:
        said = getattr(error, "strerror", None) or repr(error)
        raise GetError(url, f"cannot be read: {said}") from None
