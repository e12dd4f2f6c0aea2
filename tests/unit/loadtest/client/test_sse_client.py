from __future__ import annotations

import itertools
import select
import socket
import ssl
import threading
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from loadtest.client import noop_server
from loadtest.client.connection import StampedConnection
from loadtest.client.record import ClientReason, RequestLabel, RequestRecord
from loadtest.client.sse_client import ClientSettings, StreamingClient
from serving.core.latency import inter_chunk_latencies_s
from serving.core.request import Outcome
from serving.core.sse import StreamEvent, parse_event
from tests.unit.loadtest.fake_server import (
    DONE,
    END,
    OK_HEAD,
    Conversation,
    event,
    http_chunk,
    scripted_server,
    text_event,
    usage_event,
)

LABEL = RequestLabel("test-1", "batched", "copy", "batched/copy/1 user", 0)
BODY: dict[str, Any] = {"model": "m", "stream": True}
GAP_S = 0.03


def send(base_url: str, **settings: Any) -> RequestRecord:
    client = StreamingClient(ClientSettings(base_url, **settings))
    try:
        return client.send(LABEL, BODY, scheduled_at_s=time.perf_counter())
    finally:
        client.close()


def send_and_cancel(client: StreamingClient, started: threading.Event) -> RequestRecord:
    """A request that another thread cancels once it has started."""

    def cancel() -> None:
        assert started.wait(5)
        client.cancel(ClientReason.INTERRUPTED)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    record = client.send(LABEL, BODY, time.perf_counter())
    canceller.join(5)
    return record


def answer_whole(talk: Conversation) -> None:
    """A complete answer of two chunks and three tokens."""
    if talk.receive():
        talk.send(OK_HEAD)
        for part in (text_event("one"), text_event(" two three"), usage_event(5, 3), DONE):
            talk.send(http_chunk(part))
        talk.send(END)


def test_every_chunk_is_stamped_when_it_arrives() -> None:
    """Small events with known gaps: a reader that waits for a full buffer would see them in lumps."""

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD)
        for number in range(6):
            time.sleep(GAP_S)
            talk.send(http_chunk(text_event(f"w{number} ")))
        talk.send(http_chunk(usage_event(5, 6)) + http_chunk(DONE) + END)

    before_s = time.perf_counter()
    with scripted_server(script) as (url, talks):
        record = send(url)
    after_s = time.perf_counter()

    assert record.outcome is Outcome.COMPLETED
    assert record.text == "w0 w1 w2 w3 w4 w5 "
    assert (record.prompt_tokens, record.output_tokens, record.status) == (5, 6, 200)
    assert (record.served_by_lane, record.served_by_replica) == ("batched", "batched-1")
    assert len(record.chunk_at_s) == 6
    assert record.sent_at_s is not None
    assert record.first_byte_at_s is not None
    instants = [record.scheduled_at_s, record.sent_at_s, record.first_byte_at_s, *record.chunk_at_s]
    instants.append(record.finished_at_s)
    assert instants == sorted(instants)
    assert before_s <= instants[0]
    assert instants[-1] <= after_s
    # Same machine, same clock: no chunk is stamped before it was sent, and none long after.
    sent_s = talks[0].sent_at_s[1:7]
    for stamped_s, written_s in zip(record.chunk_at_s, sent_s, strict=True):
        assert 0 <= stamped_s - written_s < 0.5
    # A chunk may be stamped late, and then the next gap is short by as much; their sum cannot shrink.
    gaps_s = inter_chunk_latencies_s(record.timeline)
    assert sum(gaps_s) >= 5 * GAP_S - (record.chunk_at_s[0] - sent_s[0])
    assert sorted(gaps_s)[2] > GAP_S / 2  # not in lumps
    assert max(gaps_s) < 1.0


def test_a_lumpy_server_gives_lumpy_stamps() -> None:
    """The counterpart: the test above would notice events that arrive together."""

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD)
        time.sleep(GAP_S)
        talk.send(b"".join(http_chunk(text_event(f"w{n}")) for n in range(6)))
        talk.send(http_chunk(usage_event(5, 6)) + http_chunk(DONE) + END)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert sorted(inter_chunk_latencies_s(record.timeline))[2] < GAP_S / 2


def test_events_cut_anywhere_are_put_together() -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        stream = text_event("häß") + b": keep-alive\n\n" + text_event("lich") + usage_event(5, 2) + DONE
        talk.send(OK_HEAD)
        for start in range(0, len(stream), 7):
            talk.send(http_chunk(stream[start : start + 7]))
        talk.send(END)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.text, len(record.chunk_at_s)) == (Outcome.COMPLETED, "häßlich", 2)


def test_one_connection_serves_several_requests() -> None:
    def script(talk: Conversation) -> None:
        for _ in range(3):
            answer_whole(talk)

    with scripted_server(script) as (url, talks):
        client = StreamingClient(ClientSettings(url))
        records = [client.send(LABEL, BODY, time.perf_counter()) for _ in range(3)]
        client.close()
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 3
    assert [record.num_reconnects for record in records] == [0, 0, 0]
    assert len(talks) == 1
    assert b"x-request-id: test-1" in talks[0].requests[0]


def test_a_stale_connection_is_replaced_and_counted() -> None:
    closed = threading.Event()

    def close_after_answer(talk: Conversation) -> None:
        answer_whole(talk)
        talk.sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    with scripted_server(close_after_answer, answer_whole) as (url, talks):
        client = StreamingClient(ClientSettings(url))
        first = client.send(LABEL, BODY, time.perf_counter())
        assert closed.wait(5)
        second = client.send(LABEL, BODY, time.perf_counter())
        client.close()
    assert (first.outcome, first.num_reconnects) == (Outcome.COMPLETED, 0)
    assert (second.outcome, second.num_reconnects) == (Outcome.COMPLETED, 1)
    assert [len(talk.requests) for talk in talks] == [1, 1]


def test_a_request_that_was_sent_is_never_sent_again() -> None:
    """The server took the second request on the same connection and hung up: it may have worked on it."""

    def script(talk: Conversation) -> None:
        answer_whole(talk)
        talk.receive()

    with scripted_server(script) as (url, talks):
        client = StreamingClient(ClientSettings(url))
        client.send(LABEL, BODY, time.perf_counter())
        record = client.send(LABEL, BODY, time.perf_counter())
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.CUT_OFF)
    assert record.num_reconnects == 0
    assert len(talks[0].requests) == 2


@pytest.mark.parametrize(
    ("stream", "reason", "chunks"),
    [
        pytest.param(http_chunk(text_event("a")), ClientReason.CUT_OFF, 1, id="connection cut"),
        pytest.param(http_chunk(text_event("a")) + END, ClientReason.CUT_OFF, 1, id="ended without DONE"),
        pytest.param(http_chunk(text_event("a"))[:-9], ClientReason.CUT_OFF, 0, id="cut inside a chunk"),
        pytest.param(
            http_chunk(text_event("a")) + http_chunk(event({"error": {"message": "engine died"}})) + END,
            ClientReason.ERROR_EVENT, 1, id="error event",
        ),
        pytest.param(
            http_chunk(text_event("a")) + http_chunk(DONE) + END, ClientReason.NO_USAGE, 1, id="no usage"
        ),
        pytest.param(http_chunk(usage_event(5, 3)) + http_chunk(DONE) + END, ClientReason.NO_TEXT, 0, id="no text"),
        pytest.param(http_chunk(b"data: {\n\n") + END, ClientReason.ERROR_EVENT, 0, id="not JSON"),
        pytest.param(http_chunk(event({"choices": [None]})) + END, ClientReason.ERROR_EVENT, 0, id="odd choices"),
        pytest.param(http_chunk(event({"usage": 3})) + END, ClientReason.ERROR_EVENT, 0, id="odd usage"),
        pytest.param(b"no chunk size\r\n", ClientReason.BAD_STREAM, 0, id="not chunked"),
    ],
)  # fmt: skip
def test_half_a_stream_is_a_failure(stream: bytes, reason: ClientReason, chunks: int) -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + stream)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.reason) == (Outcome.FAILED, reason)
    assert record.error
    assert len(record.chunk_at_s) == chunks
    assert record.finished_at_s >= record.scheduled_at_s


def finish_event(*choices: int, reason: str | None = "stop") -> bytes:
    return event({"choices": [{"index": one, "delta": {}, "finish_reason": reason} for one in choices]})


ANSWER = http_chunk(text_event("a"))
USAGE = http_chunk(usage_event(5, 3))


@pytest.mark.parametrize(
    ("stream", "is_whole"),
    [
        pytest.param(ANSWER + http_chunk(finish_event(0)) + USAGE + END, True, id="whole"),
        pytest.param(ANSWER + http_chunk(finish_event(0)) + END, False, id="no usage"),
        pytest.param(ANSWER + http_chunk(finish_event(0, reason=None)) + USAGE + END, False, id="no reason"),
        pytest.param(ANSWER + http_chunk(finish_event(0)) + USAGE, False, id="no end of the body"),
        pytest.param(
            ANSWER + http_chunk(finish_event(0)) + USAGE + http_chunk(b"data: {") + END, False, id="half an event"
        ),
        pytest.param(
            http_chunk(text_event('"finish_reason": "stop"')) + USAGE + END, False, id="the text says it"
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("needs_done", [False, True])
def test_a_stream_that_is_whole_without_done_is_done(stream: bytes, is_whole: bool, needs_done: bool) -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + stream)

    with scripted_server(script) as (url, _):
        client = StreamingClient(ClientSettings(url, needs_done=needs_done))
        record = client.send(LABEL, BODY, 0.0)
        client.close()
    is_completed = is_whole and not needs_done
    assert (record.is_completed, record.reason) == (
        is_completed,
        None if is_completed else ClientReason.CUT_OFF,
    )
    assert record.finished_at_s >= record.chunk_at_s[-1]


def test_each_of_several_choices_must_have_ended() -> None:
    def script(talk: Conversation) -> None:
        for finished in ((0,), (0, 1)):
            talk.receive()
            talk.send(OK_HEAD + ANSWER + http_chunk(finish_event(*finished)) + USAGE + END)

    def again(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + ANSWER + http_chunk(finish_event(0, 1)) + USAGE + END)

    with scripted_server(script, again) as (url, _):
        client = StreamingClient(ClientSettings(url))
        records = [client.send(LABEL, BODY | {"n": 2}, 0.0) for _ in range(2)]
        client.close()
    assert [record.is_completed for record in records] == [False, True]


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_empty_answer_is_complete_and_has_no_ttft(tokens: int) -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        stream = http_chunk(finish_event(0)) + http_chunk(usage_event(5, tokens)) + http_chunk(DONE) + END
        talk.send(OK_HEAD + stream)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.is_completed, record.output_tokens, record.text) == (True, tokens, "")
    assert record.timeline.first_token_at_s is None


@pytest.mark.parametrize(
    ("head", "body", "outcome", "reason", "message"),
    [
        (b"429 Too Many\r\nx-tandem-reason: queue_full", b'{"error": {"message": "64 of 64 waiting"}}',
         Outcome.REJECTED, "queue_full", "64 of 64 waiting"),
        (b"404 Not Found", b'{"error": {"message": "no model"}}', Outcome.REJECTED, "http_404", "no model"),
        (b"503 Unavailable\r\nx-tandem-reason: draining", b"{}", Outcome.FAILED, "draining", "{}"),
        (b"500 Oops", b"<h1>Oops</h1>", Outcome.FAILED, "http_500", "<h1>Oops</h1>"),
        (b"500 Oops", b'["odd"]', Outcome.FAILED, "http_500", "['odd']"),
    ],
)  # fmt: skip
def test_refusals_keep_their_reason(
    head: bytes, body: bytes, outcome: Outcome, reason: str, message: str
) -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (head, len(body), body))

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.reason, record.error) == (outcome, reason, message)
    assert record.status == int(head[:3])


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    record = send(f"http://127.0.0.1:{port}")
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.CONNECT)
    assert record.error is not None
    assert "refused" in record.error
    assert record.sent_at_s is None


def test_silence_ends_at_the_idle_timeout() -> None:
    go = threading.Event()

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + http_chunk(text_event("a")))
        assert go.wait(5)

    with scripted_server(script) as (url, _):
        record = send(url, idle_timeout_s=0.05)
        go.set()
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.IDLE_TIMEOUT)
    assert record.error == "no byte for 0.05 s (idle_timeout_s)"
    assert record.finished_at_s - record.chunk_at_s[0] >= 0.05


def test_an_answer_that_trickles_ends_at_the_request_timeout() -> None:
    go = threading.Event()

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD)
        while not go.wait(0.01):  # never silent for long
            talk.send(http_chunk(text_event("a")))

    with scripted_server(script) as (url, _):
        record = send(url, request_timeout_s=0.2)
        go.set()
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.REQUEST_TIMEOUT)
    assert record.error == "not whole after 0.2 s (request_timeout_s)"
    assert len(record.chunk_at_s) > 1


def test_silence_within_a_request_timeout_is_still_silence() -> None:
    go = threading.Event()

    def script(talk: Conversation) -> None:
        talk.receive()
        assert go.wait(5)

    with scripted_server(script) as (url, _):
        record = send(url, idle_timeout_s=0.05, request_timeout_s=60)
        go.set()
    assert record.reason == ClientReason.IDLE_TIMEOUT


def test_a_request_timeout_begins_anew_with_each_request_of_a_connection() -> None:
    def script(talk: Conversation) -> None:
        for _ in range(3):
            talk.receive()
            time.sleep(0.2)
            talk.send(
                OK_HEAD + http_chunk(text_event("a")) + http_chunk(usage_event(5, 1)) + http_chunk(DONE) + END
            )

    with scripted_server(script) as (url, _):
        client = StreamingClient(ClientSettings(url, request_timeout_s=0.5))
        records = [client.send(LABEL, BODY, 0.0) for _ in range(3)]
        client.close()
    assert [record.outcome for record in records] == [Outcome.COMPLETED] * 3
    assert [record.num_reconnects for record in records] == [0] * 3


def test_not_http_at_all() -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(b"hello\r\n\r\n")

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.BAD_STREAM)


def test_cancel_ends_a_request_in_flight_and_those_after_it() -> None:
    started, go = threading.Event(), threading.Event()

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + http_chunk(text_event("a")))
        started.set()
        assert go.wait(5)

    with scripted_server(script, lambda talk: None) as (url, talks):
        client = StreamingClient(ClientSettings(url))
        record = send_and_cancel(client, started)
        go.set()
        later = client.send(LABEL, BODY, time.perf_counter())
    assert (record.outcome, record.reason) == (Outcome.CANCELLED, ClientReason.INTERRUPTED)
    assert (later.outcome, later.sent_at_s) == (Outcome.CANCELLED, None)
    assert talks[1].requests == []


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1:1", "127.0.0.1:8000", "http://", "http://127.0.0.1:0", "http://h/?x=1"]
)
def test_an_address_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not of the form http://host:port"):
        ClientSettings(url)


def test_stamps_come_from_the_given_clock() -> None:
    """The same instants on a clock that began 1000 s earlier."""
    with scripted_server(answer_whole) as (url, _):
        client = StreamingClient(ClientSettings(url), clock=lambda: time.perf_counter() + 1000)
        before_s = time.perf_counter() + 1000
        record = client.send(LABEL, BODY, scheduled_at_s=before_s)
        client.close()
    assert record.dispatched_at_s is not None
    assert record.sent_at_s is not None
    assert record.first_byte_at_s is not None
    instants = [before_s, record.dispatched_at_s, record.sent_at_s, record.first_byte_at_s]
    instants += [*record.chunk_at_s, record.finished_at_s, time.perf_counter() + 1000]
    assert instants == sorted(instants)


def test_a_refusal_says_when_to_come_back_and_is_not_tried_again() -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(
            b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\nx-tandem-reason: queue_full\r\n"
            b"content-length: 2\r\n\r\n{}"
        )

    with scripted_server(script) as (url, talks):
        record = send(url)
    assert (record.outcome, record.status, record.reason) == (Outcome.REJECTED, 429, "queue_full")
    assert record.retry_after_s == 7
    assert len(talks) == 1


def test_an_event_of_a_megabyte_is_one_chunk() -> None:
    long = "x" * 2**20

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + http_chunk(text_event(long)))
        talk.send(http_chunk(usage_event(5, 2)) + http_chunk(DONE) + END)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert record.outcome is Outcome.COMPLETED
    assert (len(record.text), len(record.chunk_at_s), record.output_tokens) == (2**20, 1, 2)


def test_crlf_comments_and_keep_alives_say_nothing() -> None:
    stream = b": hello\n\n" + text_event("one") + b":\n\n\n" + text_event(" two") + usage_event(5, 2) + DONE

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + http_chunk(stream.replace(b"\n", b"\r\n")) + END)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.text, len(record.chunk_at_s)) == (Outcome.COMPLETED, "one two", 2)


@pytest.mark.parametrize("length", [True, False], ids=["content-length", "until the connection ends"])
def test_bodies_that_are_not_chunked(length: bool) -> None:
    stream = text_event("one") + usage_event(5, 1) + DONE
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    head += b"content-length: %d\r\n" % len(stream) if length else b"connection: close\r\n"

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(head + b"\r\n" + stream)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.text, record.output_tokens) == (Outcome.COMPLETED, "one", 1)


def test_running_usage_tells_the_tokens_of_each_chunk() -> None:
    def counted(text: str, tokens: int) -> bytes:
        choice = {"index": 0, "delta": {"content": text}}
        return event({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})

    def script(talk: Conversation) -> None:
        talk.receive()
        parts = (counted("", 0), counted("one", 1), counted("", 3), counted(" two three four", 4))
        talk.send(OK_HEAD + b"".join(map(http_chunk, parts)))
        talk.send(http_chunk(usage_event(5, 4)) + http_chunk(DONE) + END)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert record.chunk_tokens == (1, 3)
    assert record.output_tokens == 4


def counted(tokens: int | None, **choices: str) -> bytes:
    """An event with text of these choices, `c0`, `c1` and so on, and with the tokens so far."""
    parts = [{"index": int(name[1:]), "delta": {"content": text}} for name, text in choices.items()]
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 5, "completion_tokens": tokens}}
    return event({"choices": parts} | usage)


def record_of(*events: bytes) -> RequestRecord:
    """What the client makes of a stream of these events."""

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + b"".join(map(http_chunk, events)) + END)

    with scripted_server(script) as (url, _):
        return send(url)


def test_chunks_of_several_choices_are_told_apart() -> None:
    """As vLLM streams `n`: an event for each choice, and usage so far of that choice alone."""
    record = record_of(
        *(counted(0, c0=""), counted(0, c1="")),
        *(counted(1, c0="a "), counted(2, c1="x y ")),
        *(counted(3, c1="z"), counted(2, c0="b")),
        *(counted(3, c0=""), usage_event(5, 6), DONE),
    )
    assert record.is_completed
    assert record.chunk_choice == record.timeline.chunk_choice == (0, 1, 1, 0)
    assert record.chunk_tokens == (1, 2, 1, 1)
    assert (record.text, record.output_tokens) == ("a bx y z", 6)


def test_an_answer_of_one_choice_names_none() -> None:
    record = record_of(counted(1, c0="a"), counted(2, c0="b"), usage_event(5, 2), DONE)
    assert (record.chunk_choice, record.chunk_tokens) == ((), (1, 1))


def test_an_event_of_several_choices_is_a_chunk_of_each_whose_tokens_are_not_told() -> None:
    record = record_of(counted(2, c0="a", c1="x"), counted(4, c0="b", c1="y"), usage_event(5, 4), DONE)
    assert (record.chunk_choice, len(record.chunk_at_s), record.chunk_tokens) == ((0, 1, 0, 1), 4, None)
    assert (record.text, record.output_tokens) == ("abxy", 4)


def test_a_server_that_counts_all_choices_as_one_does_not_tell_the_tokens_of_a_chunk() -> None:
    events = (counted(1, c0="a"), counted(2, c1="x"), counted(3, c0="b"), counted(4, c1="y"))
    record = record_of(*events, usage_event(5, 4), DONE)
    assert (record.chunk_choice, record.chunk_tokens, record.output_tokens) == ((0, 1, 0, 1), None, 4)


def test_a_stream_cut_off_counts_the_tokens_of_each_choice() -> None:
    record = record_of(counted(3, c0="a b c"), counted(2, c1="x y"))
    assert (record.reason, record.output_tokens) == (ClientReason.CUT_OFF, 5)


def test_an_api_key_is_sent_and_appears_nowhere() -> None:
    def script(talk: Conversation) -> None:
        request = talk.receive()
        assert b"authorization: Bearer sesame-1234" in bytes(request or b"")
        talk.send(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 21\r\n\r\nbad key: sesame-1234.")

    with scripted_server(script) as (url, _):
        settings = ClientSettings(url, api_key="sesame-1234")
        client = StreamingClient(settings)
        record = client.send(LABEL, BODY, scheduled_at_s=0.0)
        client.close()
    assert record.error == "bad key: [api_key]."
    assert "sesame" not in repr(record) + repr(settings)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"2.5", 2.5), (b"-3", 0), (b"Wed, 21 Oct 2015 07:28:00 GMT", 0), (b"soon", None), (b"nan", None)],
)
def test_retry_after_comes_in_many_forms(value: bytes, seconds: float | None) -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(b"HTTP/1.1 503 Busy\r\nretry-after: %s\r\ncontent-length: 0\r\n\r\n" % value)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.retry_after_s) == (Outcome.FAILED, seconds)


def test_an_answer_that_comes_byte_by_byte() -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        stream = text_event("häß") + b": keep-alive\r\n\r\n" + text_event("lich") + usage_event(5, 2) + DONE
        answer = OK_HEAD + http_chunk(stream[:50]) + http_chunk(stream[50:]) + END
        for start in range(len(answer)):
            talk.send(answer[start : start + 1])

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.text, len(record.chunk_at_s)) == (Outcome.COMPLETED, "häßlich", 2)


def test_two_events_in_one_packet_are_two_chunks_of_one_instant() -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD)
        talk.send(http_chunk(text_event("one") + text_event(" two")))
        talk.send(http_chunk(usage_event(5, 2) + DONE) + END)

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.text) == (Outcome.COMPLETED, "one two")
    assert inter_chunk_latencies_s(record.timeline) == (0,)


@pytest.mark.usefixtures("kernel_stamps")
def test_a_client_that_reads_late_still_knows_the_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second receive lies in the kernel for 50 ms; by the reader's clock, gaps would be 30 and 130 ms."""
    late_s, gap_s = 0.05, 0.08
    receive = StampedConnection.receive
    late = itertools.cycle([False, True])

    def receive_late(connection: StampedConnection) -> bytes:
        select.select([connection.socket], [], [], 5)
        if next(late):
            time.sleep(late_s)
        return receive(connection)

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD)
        for number in range(5):
            time.sleep(gap_s)
            talk.send(http_chunk(text_event(f"w{number} ")))
        time.sleep(gap_s)
        talk.send(http_chunk(usage_event(5, 5) + DONE) + END)

    monkeypatch.setattr(StampedConnection, "receive", receive_late)
    with scripted_server(script) as (url, talks):
        record = send(url)
    assert record.outcome is Outcome.COMPLETED
    assert record.stamped_by == "kernel"
    assert record.read_lag_s is not None
    assert record.read_lag_s >= late_s
    sent_s = talks[0].sent_at_s[1:6]
    for stamped_s, written_s in zip(record.chunk_at_s, sent_s, strict=True):
        assert 0 <= stamped_s - written_s < late_s / 2


def test_a_server_process_that_is_killed_in_mid_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    server, url = noop_server.start(tokens_per_s=500)
    num_events = itertools.count(1)

    def parse_and_kill(data: bytes) -> StreamEvent:
        if next(num_events) == 5:
            server.kill()
        return parse_event(data)

    monkeypatch.setattr("loadtest.client.sse_client.parse_event", parse_and_kill)
    client = StreamingClient(ClientSettings(url))
    record = client.send(LABEL, BODY | {"max_tokens": 1_000_000}, time.perf_counter())
    noop_server.stop(server)
    after = client.send(LABEL, BODY, time.perf_counter())
    client.close()
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.CUT_OFF)
    assert len(record.chunk_at_s) >= 5
    assert record.output_tokens is None
    assert (after.outcome, after.reason) == (Outcome.FAILED, ClientReason.CONNECT)


def test_what_follows_an_answer_unasked_is_not_taken_for_the_next() -> None:
    def answer(text: str) -> bytes:
        parts = (text_event(text), usage_event(5, 1), DONE)
        return OK_HEAD + b"".join(map(http_chunk, parts)) + END

    def send_two(talk: Conversation) -> None:
        talk.receive()
        talk.send(answer("mine") + answer("nobody's"))
        talk.receive()

    def send_one(talk: Conversation) -> None:
        talk.receive()
        talk.send(answer("mine too"))

    with scripted_server(send_two, send_one) as (url, talks):
        client = StreamingClient(ClientSettings(url))
        texts = [client.send(LABEL, BODY, time.perf_counter()).text for _ in range(2)]
        client.close()
    assert texts == ["mine", "mine too"]
    assert [len(talk.requests) for talk in talks] == [1, 1]


def test_a_head_without_end_is_refused_at_its_bound() -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000)
        talk.receive()

    with scripted_server(script) as (url, _):
        record = send(url)
    assert (record.outcome, record.reason) == (Outcome.FAILED, ClientReason.BAD_STREAM)
    assert record.error is not None
    assert "MAX_HEAD_BYTES" in record.error


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and its own certificate for 127.0.0.1, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_tls_with_a_trusted_certificate(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    def script(talk: Conversation) -> None:
        for _ in range(2):
            answer_whole(talk)

    with scripted_server(script, tls=server_context(certificate)) as (url, talks):
        client = StreamingClient(ClientSettings(url))
        records = [client.send(LABEL, BODY, time.perf_counter()) for _ in range(2)]
        client.close()
    assert [(record.error, record.text, record.num_reconnects) for record in records] == [
        (None, "one two three", 0)
    ] * 2
    assert (records[0].stamped_by, records[0].read_lag_s) == ("process", None)
    assert len(talks) == 1


def test_tls_with_a_certificate_that_nobody_vouches_for(certificate: Path) -> None:
    with scripted_server(answer_whole, tls=server_context(certificate)) as (url, talks):
        record = send(url)
    assert (record.outcome, record.reason, record.sent_at_s) == (Outcome.FAILED, ClientReason.CONNECT, None)
    assert record.error is not None
    assert "certificate" in record.error
    assert talks == []


def test_cancel_wakes_a_reader_over_tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    started, go = threading.Event(), threading.Event()

    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(OK_HEAD + http_chunk(text_event("a")))
        started.set()
        assert go.wait(5)

    with scripted_server(script, tls=server_context(certificate)) as (url, _):
        client = StreamingClient(ClientSettings(url))
        record = send_and_cancel(client, started)
        go.set()
    assert (record.outcome, record.reason) == (Outcome.CANCELLED, ClientReason.INTERRUPTED)
