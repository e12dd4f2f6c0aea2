"""A cheap client of many streams: one process, one uvloop, a raw protocol for each stream, a closed loop.

It is to hold 1,000 streams of 50 tokens a second beside everything else on one machine, so it looks at each
receive as little as it can; `MarkerReader` only counts bytes. It times its own event loop: a client that is late
itself says so.

All connections are opened before the first request is sent. Then all streams ask at once, or spread evenly over
`Load.spread_s`, and each asks again as soon as its answer has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from serving.core.sse import EventSplitter, EventTooLargeError, UsageNotes, parse_event

T = TypeVar("T")

DONE = b"[DONE]"
RETRY_S = 0.1  # after a failure, before the stream asks again
CONNECT_LIMIT_S = 15.0
FIRST_LIMIT_S = 20.0
CONNECTS_PER_S = 1000
LAG_STEP_S = 0.005
OK = 200


class Reader(Protocol):
    """Reads the body of one answer.

    Attributes:
        tokens: of the answer so far.
        is_done: the closing `[DONE]` was there.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def is_done(self) -> bool: ...

    def feed(self, data: bytes) -> int:
        """Events with text that end in `data`."""
        ...


class MarkerReader:
    """Counts the bytes that stand for a token in an engine's answers, wherever the network cut them."""

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._keep = max(len(marker), len(DONE)) - 1
        self._rest = b""
        self.tokens = 0
        self.is_done = False

    def feed(self, data: bytes) -> int:
        whole = self._rest + data
        end = whole.rfind(self._marker) + len(self._marker)
        found = whole.count(self._marker)
        if found == 0:
            end = 0
        self.tokens += found
        if DONE in whole:
            self.is_done = True
        # What is counted must not be counted again.
        self._rest = whole[max(end, len(whole) - self._keep) :]
        return found


class EventReader:
    """Reads each event, for engines whose tokens nobody knows; the tokens are those that the usage counts."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self._usage = UsageNotes()
        self._events = 0
        self.is_done = False

    @property
    def tokens(self) -> int:
        counted = self._usage.output_tokens
        return self._events if counted is None else counted

    def feed(self, data: bytes) -> int:
        found = 0
        for raw in self._splitter.feed(data):
            event = parse_event(raw)
            self._usage.take(event)
            self.is_done = self.is_done or event.is_done
            found += event.has_text
        self._events += found
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked, of whom, by how many at once.

    Attributes:
        urls: of servers, without a path; stream after stream gets the next.
        bodies: of the requests; request after request has the next.
        reader: makes the reader of one answer.
        answer_tokens: that a complete answer has.
        spread_s: over which the streams begin.
        connect_limit_s: how long connections are waited for, before the first request.
        first_limit_s: how long each stream's first token is waited for, before the warm-up.
        warm_up_s, window_s: of a measurement.
        headers: further lines of each request.
    """

    urls: Sequence[str]
    bodies: Sequence[bytes]
    reader: Callable[[], Reader]
    streams: int
    answer_tokens: int
    path: str = "/v1/chat/completions"
    spread_s: float = 0.0
    connect_limit_s: float = CONNECT_LIMIT_S
    first_limit_s: float = FIRST_LIMIT_S
    warm_up_s: float = 3.0
    window_s: float = 8.0
    headers: Sequence[str] = ()


@dataclass(slots=True)
class Counts:
    """What one measurement counted; times in seconds.

    Attributes:
        events: events with text that came within the window.
        lasted_s: the window, as it really was.
        ttft_s: of each answer whose first token came within the window, from its request's write to it.
        tpot_s: (last token - first token) / (tokens - 1) of each answer that ended within the window.
        answers: that ended within it, all tokens there.
        answer_events, answer_tokens: of these answers.
        failures: by kind, warm-up included.
        starved: streams that got no event within the window.
        client_share: this process's processor time / time.
        loop_lag_s: how late this process's event loop was, each 5 ms.
    """

    events: int = 0
    lasted_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    answers: int = 0
    answer_events: int = 0
    answer_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    starved: int = 0
    client_share: float = 0.0
    loop_lag_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """By the events within the window, an event having as many tokens as those of whole answers have."""
        per_event = self.answer_tokens / self.answer_events if self.answer_events else 1.0
        return self.events * per_event / self.lasted_s if self.lasted_s else 0.0


class _Stream(asyncio.Protocol):
    """One user: a connection that is kept, and one request after another on it."""

    def __init__(self, crowd: Crowd, url: str) -> None:
        parts = urlsplit(url)
        self._crowd = crowd
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._head = _head(crowd.load, parts.netloc)
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: Reader | None = None  # of the answer that is awaited
        self._events = 0
        self._has_failed = False
        self._asked_at_s = self._first_at_s = self._last_at_s = 0.0
        self.total_events = 0
        self.marked_events = 0

    async def connect(self) -> None:
        """Open the connection; a refusal is a failure, and tried again."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self, self._host, self._port)
        except OSError as error:
            self._crowd.failed(f"no connection: {type(error).__name__}")
            self._connect_later()

    def _connect_later(self) -> None:
        if not self._crowd.is_over:
            asyncio.get_running_loop().call_later(RETRY_S, self._crowd.connect, self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not by isinstance: uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        if self._crowd.is_over:
            self._transport.abort()
        elif self._crowd.has_begun:
            self.ask()

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    def ask(self) -> None:
        """Send the next request."""
        if self._transport is None or self._reader is not None or self._crowd.is_over:
            return
        body = self._crowd.next_body()
        self._reader = self._crowd.load.reader()
        self._events = 0
        self._asked_at_s = time.perf_counter()
        self._transport.write(self._head + b"content-length: %d\r\n\r\n" % len(body) + body)

    def close(self) -> None:
        """End it, whatever it waits for."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._broken(f"not HTTP: {error}"[:80])

    def on_body(self, body: bytes) -> None:
        """httptools: a part of the answer."""
        reader = self._reader
        if reader is None:
            return
        try:
            found = reader.feed(body)
        except EventTooLargeError as error:
            self._broken(str(error)[:80])
            return
        if found:
            now_s = time.perf_counter()
            if not self._events:
                self._first_at_s = now_s
                self._crowd.first_token(now_s - self._asked_at_s)
            self._last_at_s = now_s
            self._events += found
            self.total_events += found
            self._crowd.counts.events += found

    def on_message_complete(self) -> None:
        """httptools: the answer ends."""
        assert self._parser is not None
        self._has_failed = not self._ended()
        if not self._has_failed and self._parser.should_keep_alive():
            self.ask()
        elif self._transport is not None:
            self._transport.close()

    def _ended(self) -> bool:
        """Judge the answer that ended; whether it is whole."""
        reader, self._reader = self._reader, None
        if reader is None or self._parser is None:
            return False
        wanted = self._crowd.load.answer_tokens
        if (status := self._parser.get_status_code()) != OK:
            self._crowd.failed(f"status {status}")
        elif not reader.is_done:
            self._crowd.failed("ended without [DONE]")
        elif reader.tokens != wanted:
            self._crowd.failed("not all tokens")
        else:
            self._crowd.answered(self._events, reader.tokens, self._last_at_s - self._first_at_s)
            return True
        return False

    def _broken(self, why: str) -> None:
        self._crowd.failed(why)
        self._has_failed, self._reader = True, None
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reader is not None:
            # An answer without a length ends with its connection.
            if self._reader.is_done:
                self._has_failed = not self._ended()
            else:
                self._has_failed = True
                self._crowd.failed("connection closed early")
        self._reader = self._transport = None
        if self._has_failed:
            self._connect_later()
        elif not self._crowd.is_over:
            self._crowd.connect(self)


class Crowd:
    """All streams of one measurement, and what they count."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.counts = Counts()
        self.has_begun = self.is_over = self._is_window = False
        self._bodies = itertools.cycle(load.bodies)
        self._streams = [_Stream(self, load.urls[n % len(load.urls)]) for n in range(load.streams)]
        self._connecting: set[asyncio.Task[None]] = set()

    def next_body(self) -> bytes:
        return next(self._bodies)

    def connect(self, stream: _Stream) -> None:
        """Open a stream's connection; it asks by itself once the crowd has begun."""
        task = asyncio.create_task(stream.connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def begin(self) -> None:
        """Open all connections, then let all streams ask."""
        for number, stream in enumerate(self._streams, start=1):
            self.connect(stream)
            if number % 50 == 0:
                await asyncio.sleep(50 / CONNECTS_PER_S)
        give_up_at_s = time.perf_counter() + self.load.connect_limit_s
        while not all(stream.is_connected for stream in self._streams):
            if time.perf_counter() > give_up_at_s:
                break  # those that are missing go on trying
            await asyncio.sleep(0.01)
        self.has_begun = True
        loop = asyncio.get_running_loop()
        for number, stream in enumerate(self._streams):
            loop.call_later(self.load.spread_s * number / len(self._streams), stream.ask)

    def open_window(self) -> None:
        self._is_window = True
        self.counts.events = 0
        for stream in self._streams:
            stream.marked_events = stream.total_events

    def close_window(self) -> None:
        self._is_window = False
        self.counts.starved = sum(stream.total_events == stream.marked_events for stream in self._streams)

    @property
    def num_speaking(self) -> int:
        """Streams that have had a token."""
        return sum(stream.total_events > 0 for stream in self._streams)

    async def all_speak(self, limit_s: float) -> None:
        """Wait until each stream has had a token, but no longer than that."""
        give_up_at_s = time.perf_counter() + limit_s
        while self.num_speaking < len(self._streams):
            if time.perf_counter() > give_up_at_s:
                break
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        """Close all connections."""
        self.is_over = True
        for stream in self._streams:
            stream.close()
        if self._connecting:
            await asyncio.wait(self._connecting)
        await asyncio.sleep(0)

    def first_token(self, after_s: float) -> None:
        if self._is_window:
            self.counts.ttft_s.append(after_s)

    def answered(self, events: int, tokens: int, lasted_s: float) -> None:
        if not self._is_window:
            return
        counts = self.counts
        counts.answers += 1
        counts.answer_events += events
        counts.answer_tokens += tokens
        if tokens > 1:
            counts.tpot_s.append(lasted_s / (tokens - 1))

    def failed(self, kind: str) -> None:
        if not self.is_over:
            self.counts.failures[kind] += 1


def measure(load: Load, at_edge: Callable[[], None] = lambda: None) -> Counts:
    """Offer a load and count what comes within its window.

    Args:
        at_edge: called as the window begins and as it ends; it should take no more than a few milliseconds.
    """
    return uvloop.run(_measure(load, at_edge))


async def _measure(load: Load, at_edge: Callable[[], None]) -> Counts:
    crowd = Crowd(load)
    counts = crowd.counts
    await crowd.begin()
    await crowd.all_speak(load.first_limit_s)
    await asyncio.sleep(load.warm_up_s)
    lag = asyncio.create_task(_note_lag(counts.loop_lag_s))
    at_edge()
    crowd.open_window()
    began_s, cpu_began_s = time.perf_counter(), time.process_time()
    await asyncio.sleep(load.window_s)
    crowd.close_window()
    counts.lasted_s = time.perf_counter() - began_s
    counts.client_share = (time.process_time() - cpu_began_s) / counts.lasted_s
    events = counts.events
    at_edge()
    lag.cancel()
    await crowd.end()
    counts.events = events
    return counts


async def _note_lag(lags_s: list[float]) -> None:
    due_at_s = time.perf_counter()
    while True:
        due_at_s += LAG_STEP_S
        await asyncio.sleep(max(0.0, due_at_s - time.perf_counter()))
        now_s = time.perf_counter()
        lags_s.append(max(0.0, now_s - due_at_s))
        due_at_s = max(due_at_s, now_s - LAG_STEP_S)


def hold(load: Load, limit_s: float, while_held: Callable[[], T], settle_s: float = 2.0) -> tuple[int, T]:
    """Open all streams, wait until each has had a token (at most `limit_s`) and a while longer, and look.

    Returns:
        How many streams had had a token, and what `while_held` gave.
    """
    return uvloop.run(_hold(load, limit_s, while_held, settle_s))


async def _hold(load: Load, limit_s: float, while_held: Callable[[], T], settle_s: float) -> tuple[int, T]:
    crowd = Crowd(load)
    await crowd.begin()
    await crowd.all_speak(limit_s)
    await asyncio.sleep(settle_s)
    held = crowd.num_speaking, while_held()
    await crowd.end()
    return held


def _head(load: Load, host: str) -> bytes:
    lines = [
        f"POST {load.path} HTTP/1.1",
        f"host: {host}",
        "content-type: application/json",
        "accept: text/event-stream",
        *load.headers,
    ]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")
