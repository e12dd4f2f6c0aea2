"""A server that does nothing but send: what a client can read at most, it reads here.

    python -m loadtest.client.noop_server --port 8900 --tokens-per-s 20

It answers every chat completion with a stream of `max_tokens` equal words, at a given pace or as fast as
they are read, on 127.0.0.1 only.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TextIO

import click
import httptools

from serving.core.addresses import LOOPBACK

DEFAULT_MAX_TOKENS = 16
PROMPT_TOKENS = 8

STOP_TIMEOUT_S = 5
SLOT_S = 0.001
# As fast as it is read: so many events at a time, then other connections have their turn.
EVENTS_PER_TURN = 64

OK_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-tandem-lane: noop\r\n\r\n"
)
MODELS = json.dumps({"object": "list", "data": [{"id": "noop", "object": "model"}]}).encode()


def _event(choices: list[dict[str, Any]], output_tokens: int | None) -> bytes:
    """An event as vLLM writes it, in an HTTP chunk of its own."""
    payload: dict[str, Any] = {
        "id": "chatcmpl-00000000000000000000000000000000",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "noop",
        "choices": choices,
    }
    if output_tokens is not None:
        total = PROMPT_TOKENS + output_tokens
        payload["usage"] = {
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": total,
            "completion_tokens": output_tokens,
        }
    return _http_chunk(b"data: %s\n\n" % json.dumps(payload, separators=(",", ":")).encode())


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@cache
def _text_event(output_tokens: int | None) -> bytes:
    """One word; with the number of tokens so far where the client asks for usage in every chunk."""
    choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
    return _event([choice], output_tokens)


def _ending(output_tokens: int) -> bytes:
    return _event([], output_tokens) + _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Pace:
    """Gives each of its connections a turn once a period, to send one token.

    They are spread evenly over the period, in slots of about a millisecond that one task walks through: the
    server's work comes evenly, and a client's lateness is its own.
    """

    def __init__(self, tokens_per_s: float) -> None:
        num_slots = max(1, round(1 / tokens_per_s / SLOT_S))
        self._slot_s = 1 / tokens_per_s / num_slots
        self._slots: list[set[_Connection]] = [set() for _ in range(num_slots)]

    def add(self, connection: _Connection) -> None:
        min(self._slots, key=len).add(connection)

    def remove(self, connection: _Connection) -> None:
        for slot in self._slots:
            slot.discard(connection)

    async def run(self) -> None:
        started_at_s = time.perf_counter()
        number = 0
        while True:
            for connection in tuple(self._slots[number % len(self._slots)]):
                connection.send_token()
            number += 1
            if (wait_s := started_at_s + number * self._slot_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            elif number % len(self._slots) == 0:
                await asyncio.sleep(0)  # late for a whole round: requests must still be taken


class NoopServer:
    """What all connections share.

    Args:
        tokens_per_s: of each stream after its first token; 0 for as fast as the client reads.
        stamps: gets a line of JSON for each answer: `request_id`, and `sent_at_s` by `time.perf_counter`.
    """

    def __init__(self, tokens_per_s: float, stamps: TextIO | None = None) -> None:
        self.pace = _Pace(tokens_per_s) if tokens_per_s else None
        self.stamps = stamps

    async def serve(self, sock: socket.socket) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: _Connection(self), sock=sock) as server:
            if self.pace is None:
                await server.serve_forever()
            else:
                await self.pace.run()


@dataclass(slots=True)
class _Answer:
    """One stream under way."""

    request_id: str
    max_tokens: int
    counts_as_it_goes: bool
    sent_at_s: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One client's requests, one after another."""

    def __init__(self, server: NoopServer) -> None:
        self._pace = server.pace
        self._stamps = server.stamps
        self._answer: _Answer | None = None
        self._is_paused = False
        self._begin_request()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._end_answer(self._answer)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._pace is None:
            self._send_on()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._reply(b"400 Bad Request", {"error": {"message": f"not an HTTP request: {error}"}})
            self._transport.close()

    def send_token(self) -> None:
        """Send one token of the answer, with the ending after the last."""
        answer = self._answer
        if answer is None:
            return
        answer.sent_at_s.append(time.perf_counter())
        num_sent = len(answer.sent_at_s)
        data = _text_event(num_sent if answer.counts_as_it_goes else None)
        if num_sent < answer.max_tokens:
            self._transport.write(data)
        else:
            self._transport.write(data + _ending(num_sent))
            self._end_answer(answer)

    def _send_on(self) -> None:
        """Send on without a pace, until the client's side is full."""
        for _ in range(EVENTS_PER_TURN):
            if self._answer is None or self._is_paused:
                return
            self.send_token()
        asyncio.get_running_loop().call_soon(self._send_on)

    def _end_answer(self, answer: _Answer) -> None:
        """The answer is whole, or its client has left."""
        self._answer = None
        if self._pace is not None:
            self._pace.remove(self)
        if self._stamps is not None:
            row = {"request_id": answer.request_id, "sent_at_s": answer.sent_at_s}
            self._stamps.write(json.dumps(row) + "\n")
            self._stamps.flush()

    def _begin_request(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""
        self._request_id = ""

    # The parser calls these.

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, body, request_id = self._url, self._body, self._request_id
        if url == b"/v1/models":
            self._reply(b"200 OK", json.loads(MODELS))
        elif not url.endswith(b"/chat/completions"):
            self._reply(b"404 Not Found", {"error": {"message": f"no path {url!r}"}})
        else:
            self._chat(request_id, body)
        self._begin_request()

    def _chat(self, request_id: str, raw: bytes) -> None:
        try:
            body = json.loads(raw)
            max_tokens = int(body.get("max_tokens") or DEFAULT_MAX_TOKENS)
            counts = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        except (ValueError, TypeError, AttributeError) as error:
            self._reply(b"400 Bad Request", {"error": {"message": str(error)}})
            return
        self._answer = _Answer(request_id, max_tokens, counts)
        self._transport.write(OK_HEAD)
        if self._pace is None:
            self._send_on()
            return
        self.send_token()
        if self._answer is not None:
            self._pace.add(self)

    def _reply(self, status: bytes, payload: dict[str, Any]) -> None:
        data = json.dumps(payload).encode()
        self._transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(data), data)
        )


def listen(port: int) -> socket.socket:
    """A socket on the loopback that several processes may share; port 0 for a free one."""
    # The protocol is named because asyncio switches Nagle's algorithm off only where it is.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((LOOPBACK, port))
    sock.listen(4096)
    return sock


async def _run(server: NoopServer, sock: socket.socket, stops_with_stdin: bool) -> None:
    task = asyncio.ensure_future(server.serve(sock))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    if stops_with_stdin:
        loop.add_reader(sys.stdin.fileno(), task.cancel)
    click.echo(f"http://{LOOPBACK}:{sock.getsockname()[1]}")
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _command(port: int, tokens_per_s: float) -> Sequence[str]:
    options = ("--port", str(port), "--tokens-per-s", str(tokens_per_s), "--stop-with-stdin")
    return (sys.executable, "-m", "loadtest.client.noop_server", *options)


def start(tokens_per_s: float, processes: int = 1) -> tuple[subprocess.Popen[str], str]:
    """Start a server on a free port, and return it with its base URL; closing its stdin ends it.

    Raises:
        RuntimeError: it did not start.
    """
    command = (*_command(0, tokens_per_s), "--processes", str(processes))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    if not url:
        stop(process)
        raise RuntimeError(f"the no-op server ended with exit code {process.returncode} before it listened")
    return process, url


def stop(process: subprocess.Popen[str]) -> None:
    """End a server that `start` started."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, help=__doc__)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0 for a free one.")
@click.option(
    "--tokens-per-s",
    type=click.FloatRange(0, 10_000),
    default=20,
    show_default=True,
    help="Of each stream; 0: as fast as it is read.",
)
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--stamps", type=click.File("w"), help="File for the instant of each token sent (one process).")
@click.option("--stop-with-stdin", is_flag=True, help="End when standard input does.")
def main(
    port: int, tokens_per_s: float, processes: int, stamps: TextIO | None, stop_with_stdin: bool
) -> None:
    if stamps is not None and processes > 1:
        raise click.UsageError("--stamps needs --processes 1")
    sock = listen(port)
    command = _command(sock.getsockname()[1], tokens_per_s)
    others = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes - 1)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()  # it listens
        asyncio.run(_run(NoopServer(tokens_per_s, stamps), sock, stop_with_stdin))
    finally:
        for other in others:
            stop(other)


if __name__ == "__main__":
    main(prog_name="python -m loadtest.client.noop_server")
