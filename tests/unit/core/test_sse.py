"""Event streams, wherever the network cuts them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.sse import (
    EventSplitter,
    EventTooLargeError,
    StreamEvent,
    UsageNotes,
    parse_answer,
    parse_event,
)

LF = [b"data: one\n\n", b": keep-alive\n\n", b"event: x\ndata: two\ndata: three\n\n", b"data: [DONE]\n\n"]
CRLF = [event.replace(b"\n", b"\r\n") for event in LF]
MIXED = [LF[0], CRLF[1], CRLF[2], LF[3], b"data: four\n\r\n", b"data: five\r\n\n"]


def split(chunks: list[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    return [event for chunk in chunks for event in splitter.feed(chunk)], splitter.rest


@pytest.mark.parametrize("events", [LF, CRLF, MIXED], ids=["lf", "crlf", "mixed"])
def test_two_chunks_cut_at_every_byte(events: list[bytes]) -> None:
    stream = b"".join(events)
    for cut in range(len(stream) + 1):
        assert split([stream[:cut], stream[cut:]]) == (events, b""), f"cut at byte {cut}"


@pytest.mark.parametrize("events", [LF, CRLF, MIXED], ids=["lf", "crlf", "mixed"])
def test_one_byte_at_a_time(events: list[bytes]) -> None:
    stream = b"".join(events)
    assert split([stream[i : i + 1] for i in range(len(stream))]) == (events, b"")


@given(st.lists(st.sampled_from([*LF, *CRLF]), max_size=8), st.lists(st.integers(0, 300), max_size=12))
def test_any_cuts_of_any_events(events: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(events)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[a:b] for a, b in zip(edges, [*edges[1:], len(stream)], strict=True)]
    assert split(chunks) == (events, b"")


def test_an_event_is_given_as_soon_as_it_is_whole() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.feed(b"\ndata: 2") == [b"data: 1\n\n"]
    assert splitter.rest == b"data: 2"


def test_an_endless_event_is_refused_at_the_bound_and_names_it() -> None:
    splitter = EventSplitter(max_event_bytes=10)
    assert splitter.feed(b"data: 4567") == []
    with pytest.raises(EventTooLargeError, match=r"11 bytes .*max_event_bytes=10"):
        splitter.feed(b"8")


def test_many_events_in_one_chunk_may_exceed_the_bound_of_one() -> None:
    splitter = EventSplitter(max_event_bytes=10)
    assert len(splitter.feed(b"data: 1\n\n" * 5)) == 5


def chunk(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (chunk(delta={"content": "hi"}), "hi"),
        (chunk(text="hi"), "hi"),
        (chunk(message={"role": "assistant", "content": "hi"}), "hi"),
        (chunk(delta={"reasoning_content": "hm"}), "hm"),
        (chunk(delta={"reasoning": "hm"}), "hm"),
        (chunk(delta={"tool_calls": [{"function": {"arguments": "{}"}}]}), "{}"),
        (chunk(delta={"role": "assistant", "content": ""}), ""),
        (chunk(delta={"content": None}), ""),
        (chunk(delta={}, finish_reason="stop"), ""),
    ],
)
def test_text_of_an_event(event: bytes, text: str) -> None:
    said = parse_event(event)
    assert (said.text, said.has_text, said.error) == (text, bool(text), None)


def event(*choices: dict[str, object], tokens: int | None = None) -> StreamEvent:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 3, "completion_tokens": tokens}}
    return parse_event(b"data: " + json.dumps({"choices": choices} | usage).encode() + b"\n\n")


def test_each_part_of_an_event_names_its_choice() -> None:
    assert event({"index": 2, "delta": {"content": "a"}}).parts == ((2, "a"),)
    assert event({"index": 1, "text": ""}).parts == ((1, ""),)
    several = event({"index": 3, "text": "a"}, {"index": 0, "text": ""}, {"index": 1, "text": "b"})
    assert several.parts == ((3, "a"), (0, ""), (1, "b"))
    assert (several.text, several.has_text) == ("ab", True)


@pytest.mark.parametrize("choice", [{}, {"index": None}, {"index": "1"}, {"index": [1]}])
def test_a_choice_without_an_index_is_the_first(choice: dict[str, object]) -> None:
    assert event(choice | {"text": "a"}).parts == ((0, "a"),)


def test_usage_so_far_is_of_each_choice_and_usage_alone_of_all() -> None:
    usage = UsageNotes()
    assert (usage.prompt_tokens, usage.output_tokens) == (None, None)
    counts = []
    for index, tokens in ((0, 1), (1, 2), (0, 2), (1, 3), (1, None)):
        usage.take(event({"index": index, "text": "a"}, tokens=tokens))
        counts.append(usage.output_tokens)
    assert counts == [1, 3, 4, 5, 5]
    usage.take(event(tokens=6))
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 6)


def test_usage_beside_several_choices_is_of_all() -> None:
    usage = UsageNotes()
    usage.take(event({"index": 0, "text": "a"}, {"index": 1, "text": "b"}, tokens=7))
    assert usage.output_tokens == 7


@pytest.mark.parametrize("event", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data:  [DONE] \n\n"])
def test_done(event: bytes) -> None:
    assert parse_event(event) == StreamEvent(is_done=True)


@pytest.mark.parametrize(
    "event", [b": ping\n\n", b"\n\n", b"event: ping\n\n", b"id: 1\r\n\r\n", b"data:\n\n"]
)
def test_comments_and_keep_alives_say_nothing(event: bytes) -> None:
    assert parse_event(event) == StreamEvent()


def test_data_over_several_lines_is_one_object() -> None:
    assert parse_event(b'data: {"choices":\r\ndata: [{"text": "x"}]}\r\n\r\n').text == "x"


def test_usage_so_far_beside_text_is_text_and_usage() -> None:
    """As vLLM's `continuous_usage_stats` puts it: an event with text is never taken for the usage event."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    payload = {"choices": [{"delta": {"content": "x"}}], "usage": usage}
    said = parse_event(b"data: " + json.dumps(payload).encode() + b"\n\n")
    assert said == StreamEvent(parts=((0, "x"),), prompt_tokens=3, output_tokens=4)
    assert said.has_text


def test_one_event_of_a_megabyte_in_small_pieces() -> None:
    event = b'data: {"choices": [{"text": "%s"}]}\n\n' % (b"x" * 1_000_000)
    splitter = EventSplitter()
    found = [
        whole for start in range(0, len(event), 1400) for whole in splitter.feed(event[start : start + 1400])
    ]
    assert found == [event]
    assert len(parse_event(event).text) == 1_000_000


def test_usage_alone_and_usage_beside_text() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    alone = parse_answer(json.dumps({"choices": [], "usage": usage}).encode())
    assert (alone.is_usage_only, alone.prompt_tokens, alone.output_tokens) == (True, 3, 5)
    beside = parse_answer(json.dumps({"choices": [{"text": "x"}], "usage": usage}).encode())
    assert (beside.is_usage_only, beside.output_tokens) == (False, 5)
    null = parse_answer(b'{"choices": [], "usage": null}')
    assert (null.is_usage_only, null.output_tokens) == (False, None)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ({"error": "broken"}, "broken"),
    ],
)
def test_an_error_the_server_reports(payload: object, message: str) -> None:
    assert parse_event(b"data: " + json.dumps(payload).encode() + b"\n\n").error == message


@pytest.mark.parametrize(
    "data",
    [
        b"Internal Server Error",
        b"5",
        b"[1]",
        b'"text"',
        b"null",
        b'{"choices": [null]}',
        b'{"choices": 3}',
        b'{"choices": [{"delta": "x"}]}',
        b'{"usage": 7}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_what_is_no_completion_object_is_reported_and_never_raised(data: bytes) -> None:
    said = parse_answer(data)
    assert said.error is not None
    assert "not a completion object" in said.error
    assert len(said.error) < 500
    assert not said.has_text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "usage", "error", "tool_calls"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_read_without_raising(value: object) -> None:
    said = parse_event(b"data: " + json.dumps(value).encode() + b"\n\n")
    assert said.has_text == bool(said.text)
