"""The gateway's quick reader of token events, held to the one that reads everything."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core import sse
from serving.gateway import stream
from serving.gateway.stream import StreamNotes

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", " a", "\n", '"', "\\", 'say "x"', "日本", "\u2028", "}", '"}', "[DONE]", "data: ", "\x7f"]
    ),
)


def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": "c-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": choices,
        **more,
    }


def choice(delta: dict[str, Any], index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


TEXT = TEXTS.map(lambda text: chunk([choice({"content": text})]))
PAYLOADS = st.one_of(
    TEXT,
    TEXT,
    TEXT,
    st.builds(lambda text, index: chunk([choice({"content": text}, index)]), TEXTS, st.integers(0, 2)),
    st.builds(lambda a, b: chunk([choice({"content": a}, 0), choice({"content": b}, 1)]), TEXTS, TEXTS),
    st.builds(lambda a, b: chunk([choice({"content": a, "reasoning": b})]), TEXTS, TEXTS),
    TEXTS.map(lambda text: chunk([choice({"tool_calls": [{"index": 0, "function": {"arguments": text}}]})])),
    TEXTS.map(lambda text: chunk([{"index": 0, "text": text, "finish_reason": None}])),
    TEXTS.map(lambda text: chunk([choice({"content": text}, finish="stop")])),
    st.builds(
        lambda text, n: chunk([choice({"content": text})], usage={"completion_tokens": n}),
        TEXTS,
        st.integers(0, 9),
    ),
    st.integers(0, 9).map(lambda n: chunk([], usage={"prompt_tokens": 3, "completion_tokens": n})),
    st.sampled_from([{"error": {"message": "broken"}}, {"choices": None}, {}]),
)
# What a string's inside may be on the wire, valid or not, in events that are alike in all else.
HEAD, TAIL = b'data: {"choices": [{"index": 0, "delta": {"content": "', b'"}, "finish_reason": null}]}\n\n'
RAW = st.lists(
    st.sampled_from(
        [
            b"a",
            b" ",
            b'"',
            b"\\",
            b"\\n",
            b'\\"',
            b"\\u00e9",
            b"\xc3\xa9",
            b"\xff",
            b"\x01",
            b"\x7f",
            b'"}, "x": "',
        ]
    ),
    max_size=4,
).map(lambda parts: HEAD + b"".join(parts) + TAIL)
EVENTS = st.one_of(
    RAW,
    st.just(HEAD + b"a" + TAIL),
    RAW,
    RAW,
    st.builds(
        lambda payload, ascii_only, compact, end: (
            b"data: "
            + json.dumps(
                payload, ensure_ascii=ascii_only, separators=(",", ":") if compact else None
            ).encode()
            + end
        ),
        PAYLOADS,
        st.booleans(),
        st.booleans(),
        st.sampled_from([b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n"]),
    ),
    st.sampled_from(
        [b"data: [DONE]\n\n", b": ping\n\n", b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n']
    ),
)


def read(data: bytes, cuts: list[int], *, is_quick: bool, strips: bool) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "WORTH_LEARNING", 1 if is_quick else 10**9)
        notes = StreamNotes(strip_usage=strips)
        places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        passed = [notes.feed(data[a:b], float(at)) for at, (a, b) in enumerate(itertools.pairwise(places))]
    usage = notes.usage.prompt_tokens, notes.usage.output_tokens
    return passed, notes.chunk_at_s, notes.chunk_choice, usage, notes.has_ended, notes.error


@settings(max_examples=1500)
@given(st.lists(EVENTS, max_size=25), st.lists(st.integers(0, 10_000), max_size=6), st.booleans())
def test_both_readers_say_the_same_of_any_stream(events: list[bytes], cuts: list[int], strips: bool) -> None:
    data = b"".join(events)
    quick = read(data, cuts, is_quick=True, strips=strips)
    assert quick == read(data, cuts, is_quick=False, strips=strips)


def test_the_quick_reader_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of plain tokens is read by its bytes once its shape is known, and only then."""
    read_in_full: list[bytes] = []

    def parse(event: bytes) -> sse.StreamEvent:
        read_in_full.append(event)
        return sse.parse_event(event)

    monkeypatch.setattr(stream, "parse_event", parse)
    notes = StreamNotes(strip_usage=True)
    for number in range(100):
        event = b"data: " + json.dumps(chunk([choice({"content": f" word{number}"})])).encode() + b"\n\n"
        assert notes.feed(event, 0.0) == event
    assert len(read_in_full) == stream.WORTH_LEARNING
    assert len(notes.chunk_at_s) == 100
