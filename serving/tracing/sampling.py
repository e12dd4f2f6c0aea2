"""Which requests belong to a sampled share: every process that knows a request chooses alike."""

from __future__ import annotations

import re
from functools import lru_cache
from zlib import crc32

# What the gateway adds to a client's id to make it unique. Engine and second attempts put more around it.
_UNIQUE_PART = re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{12}(?![0-9a-zA-Z])")
_HASHES = 2**32


@lru_cache(maxsize=4096)  # an engine asks for each request of each step
def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request is among them; a greater share holds all that a smaller one does.

    Args:
        request_id: the gateway's id, or one that contains it, such as the engine's own.
        share: of all requests, above 0 and at most 1.
    """
    return crc32(unique_part(request_id).encode()) < share * _HASHES


def unique_part(request_id: str) -> str:
    """What is the same in all ids of a request: the gateway's, a second attempt's, the engine's own."""
    parts = _UNIQUE_PART.findall(request_id)
    # The last one: the client may have put anything before it. An id without one did not come through a gateway.
    return str(parts[-1]) if parts else request_id
