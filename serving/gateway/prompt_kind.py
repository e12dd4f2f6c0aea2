"""What kind of text a request's prompt is, from a bounded part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from serving.core.speculation.text_kind import TextKind, features_of

MAX_CHARS = 4_096  # half from the beginning, half from the end, where tasks stand; about 0.3 ms
MAX_PARTS = 256  # from each end: a conversation of very many small parts is not read to its middle


def prompt_kind(body: Mapping[str, Any]) -> TextKind:
    """Of a chat's messages together, or of a completion's prompt; token ids have no text, and are open."""
    prompt = body.get("messages") if "messages" in body else body.get("prompt")
    parts = prompt if isinstance(prompt, list) else [prompt]
    half = MAX_CHARS // 2
    beginning = _joined(texts_of(islice(parts, MAX_PARTS)), half + 1)
    if len(beginning) <= half and len(parts) <= MAX_PARTS:
        return features_of(beginning).kind
    return features_of(f"{beginning[:half]}\n{_ending(parts, half)}").kind


def _joined(texts: Iterable[str], most: int) -> str:
    kept: list[str] = []
    left = most
    for text in texts:
        kept.append(text[:left])
        left -= len(kept[-1]) + 1
        if left <= 0:
            break
    return "\n".join(kept)


def _ending(parts: list[Any], most: int) -> str:
    """The same from the end; a text that does not fit is cut at its beginning."""
    kept: list[str] = []
    left = most
    for part in islice(reversed(parts), MAX_PARTS):
        for text in reversed(list(texts_of([part]))):
            if left <= 0:
                return "\n".join(reversed(kept))
            kept.append(text[-left:])
            left -= len(kept[-1]) + 1
    return "\n".join(reversed(kept))


def texts_of(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            content = part.get("content")
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                for piece in content[:MAX_PARTS]:
                    text = piece.get("text") if isinstance(piece, dict) else None
                    if isinstance(text, str):
                        yield text
