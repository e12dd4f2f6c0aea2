"""Hashes of a prompt's leading blocks, so that requests with the same beginning can meet on one replica."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

BLOCK_BYTES = 512  # about 128 tokens of English: one block of vLLM's CPU prefix cache
MAX_BLOCKS = 32
MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES


def prefix_blocks(body: Mapping[str, Any]) -> tuple[int, ...]:
    """One hash per whole leading block, each covering all before it; at most `MAX_BLOCKS`.

    The text is the prompt as the client wrote it, not as the engine tokenises it: equal text has equal tokens.
    """
    data = _beginning(body.get("messages") if "messages" in body else body.get("prompt"))
    digest = hashlib.blake2b(digest_size=7)  # 56 bits: few collisions, short messages
    blocks = []
    for start in range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest.update(data[start : start + BLOCK_BYTES])
        blocks.append(int.from_bytes(digest.copy().digest(), "big"))
    return tuple(blocks)


def _beginning(prompt: Any) -> bytes:
    """What of it can be hashed; a long conversation is not written out to its end."""
    if isinstance(prompt, str):
        # JSON may hold half a surrogate pair; whether that is a prompt is for the engine to say.
        return prompt[:MAX_BYTES].encode(errors="surrogatepass")[:MAX_BYTES]
    data = bytearray()
    for part in prompt if isinstance(prompt, list) else [prompt]:
        data += msgspec.json.encode(part, order="sorted")
        if len(data) >= MAX_BYTES:
            break
    return bytes(data[:MAX_BYTES])
