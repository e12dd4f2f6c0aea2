"""What is noted of a stream, and what of it reaches the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving.core.errors import Reason
from serving.core.sse import EventTooLargeError, parse_event
from serving.gateway.errors import error_event, error_headers, error_object
from serving.gateway.stream import StreamNotes


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


ROLE = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
TEXT = event({"choices": [{"delta": {"content": "hi"}}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
DONE = b"data: [DONE]\n\n"
STREAM = ROLE + b": ping\n\n" + TEXT + TEXT + USAGE + DONE


@pytest.mark.parametrize("strips", [True, False])
def test_the_client_gets_every_byte_but_the_usage_it_did_not_ask_for(strips: bool) -> None:
    notes = StreamNotes(strip_usage=strips)
    got = b"".join(notes.feed(STREAM[i : i + 1], i) for i in range(len(STREAM)))
    assert got == (STREAM.replace(USAGE, b"") if strips else STREAM)
    assert (notes.usage.prompt_tokens, notes.usage.output_tokens, notes.has_ended, notes.error) == (
        3,
        5,
        True,
        None,
    )


def test_usage_beside_text_is_never_dropped() -> None:
    both = event({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    notes = StreamNotes(strip_usage=True)
    assert notes.feed(both, 0) == both
    assert notes.usage.output_tokens == 1


def test_usage_so_far_in_every_chunk_is_passed_on_and_the_last_counts() -> None:
    def text_and_usage(tokens: int) -> bytes:
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        return event({"choices": [{"delta": {"content": "x"}}], "usage": usage})

    notes = StreamNotes(strip_usage=False)
    stream = [text_and_usage(1), text_and_usage(4), USAGE, DONE]
    assert b"".join(notes.feed(data, at_s) for at_s, data in enumerate(stream)) == b"".join(stream)
    assert (notes.chunk_at_s, notes.usage.output_tokens) == ([0, 1], 5)


def test_instants_are_those_of_events_with_text() -> None:
    notes = StreamNotes(strip_usage=False)
    for now_s, data in enumerate([ROLE, b": ping\n\n", TEXT, TEXT[:9], TEXT[9:], USAGE, DONE]):
        notes.feed(data, now_s)
    assert notes.chunk_at_s == [2, 4], "an event counts when it is whole"


def test_each_chunk_is_of_a_choice_and_an_event_of_several_is_a_chunk_of_each() -> None:
    def of(*choices: tuple[int, str]) -> bytes:
        return event({"choices": [{"index": index, "delta": {"content": text}} for index, text in choices]})

    notes = StreamNotes(strip_usage=False)
    stream = [
        of((0, "")),
        of((1, "")),
        of((0, "a")),
        of((1, "b")),
        of((1, "c"), (2, ""), (0, "d")),
        USAGE,
        DONE,
    ]
    for now_s, data in enumerate(stream):
        notes.feed(data, now_s)
    assert (notes.chunk_at_s, notes.chunk_choice) == ([2, 3, 4, 4], [0, 1, 1, 0])


def test_half_an_event_is_held_back() -> None:
    notes = StreamNotes(strip_usage=False)
    assert notes.feed(TEXT[:-1], 0) == b""
    assert not notes.chunk_at_s
    assert notes.feed(TEXT[-1:], 1) == TEXT


def test_a_stream_without_done_has_not_ended() -> None:
    notes = StreamNotes(strip_usage=False)
    notes.feed(TEXT + USAGE + DONE[:-1], 0)
    assert not notes.has_ended


def test_the_first_error_inside_a_stream_is_noted_and_nothing_after_it_is_passed_on() -> None:
    notes = StreamNotes(strip_usage=True)
    first, second = event({"error": {"message": "first"}}), event({"error": {"message": "second"}})
    assert notes.feed(TEXT + first + second + TEXT, 0) == TEXT
    assert notes.feed(DONE, 0) == b""
    assert notes.error == "first"


def test_an_endless_event_is_refused() -> None:
    notes = StreamNotes(strip_usage=False)
    for _ in range(4):
        assert notes.feed(b"x" * 1024 * 1024, 0) == b""
    with pytest.raises(EventTooLargeError, match="max_event_bytes"):
        notes.feed(b"x", 0)


@pytest.mark.parametrize("reason", Reason)
def test_every_error_has_the_shape_openai_clients_read(reason: Reason) -> None:
    error = error_object(reason, 'why: "that"')["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["code"]) == ('why: "that"', reason.value)
    assert parse_event(error_event(reason, 'why: "that"')).error == 'why: "that"'


def test_error_headers() -> None:
    assert error_headers(Reason.INTERNAL) == {"x-tandem-reason": "internal"}
    assert error_headers(Reason.QUEUE_FULL, 7)["retry-after"] == "7"


def finish(index: int = 0, reason: str | None = "stop") -> bytes:
    return event({"choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": reason}]})


@pytest.mark.parametrize(
    ("stream", "has_ended"),
    [
        ([finish(), USAGE], True),
        ([finish()], False),  # without usage it may have been cut off behind it
        ([finish(reason=None), USAGE], False),
        ([finish(0), finish(1, None), USAGE], False),
        ([finish(0), finish(1, None), finish(1), USAGE], True),
        ([USAGE], False),
        ([DONE], True),
    ],
)
def test_a_stream_without_done_is_whole_when_all_of_it_says_so(stream: list[bytes], has_ended: bool) -> None:
    notes = StreamNotes(strip_usage=False)
    for data in stream:
        notes.feed(data, 0)
    assert notes.has_ended is has_ended
