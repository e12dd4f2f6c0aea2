"""The client of many streams counts what was sent, says what went wrong, and judges no answer whole that is not."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from serving.benchmarks.client import Counts, EventReader, Load, MarkerReader, hold, measure

MARK = b"syllable"
TOKEN = b'data: {"choices": [{"index": 0, "delta": {"content": "syllable "}}]}\n\n'
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunked(*bodies: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies) + END


WHOLE = chunked(ROLE, TOKEN, TOKEN, TOKEN, DONE)


class Answering(asyncio.Protocol):
    """Gives the same bytes to each request, and may close the connection after them."""

    def __init__(self, answer: bytes, closes: bool, open_ones: set[asyncio.Transport]) -> None:
        self._answer, self._closes, self._open_ones = answer, closes, open_ones

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open_ones.add(transport)

    def data_received(self, data: bytes) -> None:
        # A request is small enough to come in one piece.
        self._transport.write(self._answer)
        if self._closes:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open_ones.discard(self._transport)


@contextlib.contextmanager
def server(answer: bytes, *, closes: bool = False) -> Iterator[str]:
    """A server on the loopback, in a thread of its own."""
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()
    url: queue.Queue[str] = queue.Queue()

    async def serve() -> None:
        open_ones: set[asyncio.Transport] = set()
        serving = await loop.create_server(lambda: Answering(answer, closes, open_ones), "127.0.0.1", 0)
        host, port = serving.sockets[0].getsockname()
        url.put(f"http://{host}:{port}")
        await stopped.wait()
        for _ in range(20):
            await asyncio.sleep(0)  # the client is gone; what it left in the backlog becomes connections
        serving.close()
        for transport in open_ones:
            transport.abort()
        while open_ones:  # noqa: ASYNC110
            await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield url.get(timeout=20)
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()


def load(url: str, *, streams: int = 4, tokens: int = 3, window_s: float = 0.3) -> Load:
    return Load(
        [url],
        [b"{}"],
        lambda: MarkerReader(MARK),
        streams,
        tokens,
        first_limit_s=1,
        warm_up_s=0.05,
        window_s=window_s,
    )


def measured(answer: bytes, **options: bool) -> Counts:
    with server(answer, **options) as url:
        return measure(load(url))


def test_whole_answers_are_counted_token_by_token() -> None:
    counts = measured(WHOLE)
    assert not counts.failures
    assert counts.starved == 0
    assert counts.answers > 0
    assert (counts.answer_events, counts.answer_tokens) == (3 * counts.answers, 3 * counts.answers)
    # Of an answer at either edge of the window, some tokens are within it.
    assert abs(counts.events - counts.answer_events) <= 3 * 4
    assert counts.tokens_per_s == pytest.approx(counts.events / counts.lasted_s)
    assert len(counts.ttft_s) > 0
    assert min(counts.ttft_s) > 0


def test_wherever_the_network_cuts_an_answer_its_tokens_are_the_same() -> None:
    text = ROLE + 3 * TOKEN + DONE
    counts = measured(chunked(*(text[n : n + 7] for n in range(0, len(text), 7))))
    assert not counts.failures
    assert counts.answer_tokens == 3 * counts.answers > 0


def test_a_connection_closed_after_a_whole_answer_is_no_failure() -> None:
    counts = measured(WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1), closes=True)
    assert not counts.failures
    assert counts.answers > 4


def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    head = HEAD.replace(b"transfer-encoding: chunked", b"connection: close")
    counts = measured(head + ROLE + 3 * TOKEN + DONE, closes=True)
    assert not counts.failures
    assert counts.answers > 4


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (chunked(ROLE, TOKEN, TOKEN, DONE), "not all tokens"),
        (chunked(ROLE, TOKEN, TOKEN, TOKEN), "ended without [DONE]"),
        (WHOLE.replace(b"200 OK", b"503 No"), "status 503"),
        (WHOLE[: len(WHOLE) // 2], "connection closed early"),
        (b"no HTTP at all\r\n\r\n", "not HTTP"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(answer: bytes, why: str) -> None:
    counts = measured(answer, closes=True)
    assert counts.answers == 0
    assert [kind for kind in counts.failures if kind.startswith(why)], counts.failures
    assert len(counts.failures) == 1


def test_nobody_there_is_a_failure_and_the_streams_are_starved() -> None:
    with server(WHOLE) as url:
        pass
    counts = measure(
        Load(
            [url],
            [b"{}"],
            EventReader,
            3,
            3,
            connect_limit_s=0.1,
            first_limit_s=0.1,
            warm_up_s=0,
            window_s=0.3,
        )
    )
    assert [kind for kind in counts.failures if kind.startswith("no connection")]
    assert counts.starved == 3


def test_a_stream_that_says_nothing_within_the_window_is_starved() -> None:
    with server(HEAD + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN)) as url:
        counts = measure(load(url, streams=2))
    assert (counts.starved, counts.events, counts.answers) == (2, 0, 0)


def test_silent_streams_are_held_while_one_looks() -> None:
    with server(HEAD + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN)) as url:
        assert hold(load(url, streams=5), 10, lambda: "seen", settle_s=0) == (5, "seen")


def test_streams_are_spread_over_the_servers() -> None:
    with server(WHOLE) as good, server(WHOLE.replace(b"200 OK", b"500 No")) as bad:
        counts = measure(replace(load(good), urls=[good, bad]))
    assert counts.failures["status 500"] > 0
    assert counts.answers > 0


def test_a_marker_is_counted_once_wherever_it_is_cut() -> None:
    text = TOKEN + TOKEN + DONE
    for cut in range(len(text)):
        reader = MarkerReader(MARK)
        assert reader.feed(text[:cut]) + reader.feed(text[cut:]) == 2
        assert (reader.tokens, reader.is_done) == (2, True)
    reader = MarkerReader(MARK)
    assert sum(reader.feed(text[n : n + 1]) for n in range(len(text))) == 2
    assert reader.is_done


def test_events_with_text_are_counted_and_tokens_are_those_of_the_usage() -> None:
    reader = EventReader()
    assert [reader.feed(part) for part in (ROLE, TOKEN, TOKEN, USAGE, DONE)] == [0, 1, 1, 0, 0]
    assert (reader.tokens, reader.is_done) == (3, True)


def test_an_event_of_several_tokens_counts_as_many() -> None:
    counts = Counts(events=10, lasted_s=2, answers=2, answer_events=4, answer_tokens=6)
    assert counts.tokens_per_s == 10 * 1.5 / 2
