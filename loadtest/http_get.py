"""Reads one address over HTTP, directly, and says in words what went wrong."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping

READ_TIMEOUT_S = 10

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
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with _OPENER.open(request, timeout=READ_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise GetError(f"{url}: answered {error.code} {error.reason}", error.code) from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise GetError(f"{url}: cannot be reached: {reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise GetError(f"{url}: cannot be read: {getattr(error, 'strerror', None) or repr(error)}") from None
