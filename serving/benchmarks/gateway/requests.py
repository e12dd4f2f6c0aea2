"""What the client asks, and what it reads of an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence

from serving.benchmarks.client import Load, MarkerReader
from serving.engines.simulated.prepared import SILENCE, WORD

MODEL = "prepared"
ANSWER_TOKENS = 100
STEP_MS = 20.0
PROMPT = "Tell a story about a tandem."
# Without its blank: a gateway that writes events anew may cut or quote it otherwise.
MARKER = WORD.strip().encode()


def _reader() -> MarkerReader:
    return MarkerReader(MARKER)


def body(prompt: str, answer_tokens: int) -> bytes:
    """A streamed chat completion."""
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": answer_tokens,
        "stream": True,
    }
    return json.dumps(asked).encode()


def speaking(urls: Sequence[str], streams: int, warm_up_s: float, window_s: float, spread_s: float) -> Load:
    """Streams of `ANSWER_TOKENS` each."""
    return Load(
        urls,
        [body(PROMPT, ANSWER_TOKENS)],
        _reader,
        streams,
        ANSWER_TOKENS,
        spread_s=spread_s,
        warm_up_s=warm_up_s,
        window_s=window_s,
    )


def first_tokens(urls: Sequence[str], warm_up_s: float, window_s: float) -> Load:
    """One stream that asks for a single token again and again: many times to first token, nothing beside."""
    return Load(urls, [body(PROMPT, 1)], _reader, 1, 1, warm_up_s=warm_up_s, window_s=window_s)


def silent(urls: Sequence[str], streams: int) -> Load:
    """Streams that get one token each and then nothing, begun over a few seconds."""
    return Load(urls, [body(SILENCE, ANSWER_TOKENS)], _reader, streams, ANSWER_TOKENS, spread_s=streams / 200)
