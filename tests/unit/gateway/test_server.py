"""The gateway's own socket: what a client may do to it, byte by byte, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serving.config import GatewayConfig
from serving.gateway import http_protocol
from serving.gateway.api_keys import ApiKeys
from serving.gateway.http_protocol import MAX_HEAD_BYTES, Door
from serving.gateway.server import GatewayServer, listen
from serving.gateway.upstream import MAX_KEPT_BYTES, UpstreamAnswer
from tests.unit.gateway.fake_engine import DONE, Exchange, answers, plays, stays_silent, text
from tests.unit.gateway.gateway_lab import MODEL, GatewayLab, OwnServer, Way, gateway_lab
from tests.unit.scheduler.control_plane import until

pytestmark = [pytest.mark.anyio, pytest.mark.only_way(Way.SOCKET)]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
STREAM = CHAT | {"stream": True}
WHOLE = json.dumps({"choices": [{"message": {"content": "hi"}}]}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nhost: lab\r\n\r\n"


def request(body: Any, *lines: bytes) -> bytes:
    raw = json.dumps(body).encode()
    head = [b"POST /v1/chat/completions HTTP/1.1", b"host: lab", b"content-length: %d" % len(raw), *lines]
    return b"\r\n".join([*head, b"", b""]) + raw


class Connection:
    """A client that writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, end: bytes) -> bytes:
        return await self._reader.readuntil(end)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer, which says its length."""
        head = await self.until(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        return int(head.split()[1]), await self._reader.readexactly(int(length[1]))

    async def read(self, num_bytes: int) -> bytes:
        return await self._reader.readexactly(num_bytes)

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(10):
            return await self._reader.read()


@contextlib.asynccontextmanager
async def connected(server: Any) -> AsyncIterator[Connection]:
    assert isinstance(server, OwnServer)
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def code_of(answer: bytes) -> tuple[int, str]:
    """Status and code of an error that is one in the shape of the OpenAI API, and nothing behind it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    said = json.loads(body)
    assert set(said) == {"error"}
    assert b"connection: close" in head
    return int(head.split()[1]), said["error"]["code"]


# Heads


async def test_a_head_that_does_not_end_is_a_408() -> None:
    async with gateway_lab(header_timeout_s=0.05) as lab, connected(lab.app) as client:
        client.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        assert code_of(await client.rest()) == (408, "upload_timeout")
        assert lab.ended == {("", "rejected", "upload_timeout"): 1}


async def test_a_head_that_comes_drop_by_drop_has_no_longer() -> None:
    async with gateway_lab(header_timeout_s=0.1) as lab, connected(lab.app) as client:

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    client.write(b"x")
                    await client.writer.drain()
                    await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):  # a drop behind the end is answered with a reset
            assert code_of(await client.rest()) == (408, "upload_timeout")
        dripping.cancel()
        assert lab.ended == {("", "rejected", "upload_timeout"): 1}


async def test_a_further_head_that_does_not_end_is_a_408() -> None:
    async with gateway_lab(header_timeout_s=0.05) as lab, connected(lab.app) as client:
        client.write(HEALTH)
        assert (await client.answer())[0] == 200
        client.write(HEALTH[:-1])
        assert code_of(await client.rest()) == (408, "upload_timeout")


async def test_a_connection_that_never_says_a_word_is_closed() -> None:
    async with gateway_lab(header_timeout_s=0.05) as lab, connected(lab.app) as client:
        assert await client.rest() == b""
        assert lab.ended == {}


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "behind another"])
async def test_a_flood_of_headers_is_a_431_long_before_its_end(is_first: bool) -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        if not is_first:
            client.write(HEALTH)
            assert (await client.answer())[0] == 200
        client.write(b"GET /health HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for number in range(MAX_HEAD_BYTES):  # ten times the bound
                client.write(b"x-%05d: x\r\n" % number)
                if number % 100 == 0:
                    await client.writer.drain()
        with contextlib.suppress(ConnectionError):  # what it still sends is answered with a reset
            assert code_of(await client.rest()) == (431, "headers_too_large")
        assert lab.ended == {("", "rejected", "headers_too_large"): 1}


async def test_a_flood_in_a_pipelined_head_is_bounded_too() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        client.write(HEALTH + b"GET /health HTTP/1.1\r\n" + b"a" * 100)
        for _ in range(10):
            client.write(b"x-a: " + b"b" * (MAX_HEAD_BYTES // 8) + b"\r\n")
            await asyncio.sleep(0.001)
        with contextlib.suppress(ConnectionError):
            await client.rest()
        assert lab.ended == {("", "rejected", "headers_too_large"): 1}


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01\x02\x00\x01", b"NONSENSE /v1/models HTTP/1.1\r\nhost: lab\r\n\r\n", b"\r\n\r\n{}"]
)
async def test_what_is_not_http_is_a_400_at_once(said: bytes) -> None:
    async with gateway_lab(header_timeout_s=60) as lab, connected(lab.app) as client:
        client.write(said)
        assert code_of(await client.rest()) == (400, "bad_request")


async def test_a_head_in_two_pieces_is_a_head() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        for cut in range(1, len(HEALTH)):
            client.write(HEALTH[:cut])
            await client.writer.drain()
            await asyncio.sleep(0)
            client.write(HEALTH[cut:])
            assert (await client.answer())[0] == 200, cut


async def test_two_requests_at_once_are_answered_one_after_the_other() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = answers(WHOLE)
        client.write(request(CHAT) + HEALTH + request(CHAT))
        assert [await client.answer() for _ in range(3)] == [
            (200, WHOLE),
            (200, b'{"status":"ok"}'),
            (200, WHOLE),
        ]


# Connections


async def test_a_connection_too_many_is_a_503_and_takes_nothing_from_the_others() -> None:
    async with gateway_lab(max_connections=1) as lab, connected(lab.app) as first:
        first.write(HEALTH)
        assert (await first.answer())[0] == 200
        async with connected(lab.app) as second:
            second.write(HEALTH)
            answer = await second.rest()
            assert code_of(answer) == (503, "too_many_connections")
            assert b"retry-after: 1" in answer
            assert b"gateway.max_connections" in answer
        first.write(HEALTH)
        assert (await first.answer())[0] == 200
        assert lab.ended == {("", "rejected", "too_many_connections"): 1}
        await until(lambda: len(_server(lab).connections) == 1)
        async with connected(lab.app) as third:
            third.write(b"")
            await until(lambda: len(_server(lab).connections) == 2)


def _server(lab: GatewayLab) -> OwnServer:
    assert isinstance(lab.app, OwnServer)
    return lab.app


# Upgrades


@pytest.mark.parametrize(
    "lines",
    [
        (b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAAQAAP__"),
        (b"Connection: upgrade", b"Upgrade : websocket", b"sec-websocket-key: x"),
    ],
    ids=["h2c", "websocket"],
)
@pytest.mark.parametrize("cut", [0, 10, -10])
async def test_an_upgrade_that_nobody_wants_loses_no_body(lines: tuple[bytes, ...], cut: int) -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = answers(WHOLE)
        said = request(CHAT, *lines)
        client.write(said[:cut])
        await asyncio.sleep(0.01)
        client.write(said[cut:])
        assert await client.answer() == (200, WHOLE)
        (exchange,) = lab.engine.requests
        assert json.loads(exchange.body) == CHAT
        client.write(HEALTH)
        assert (await client.answer())[0] == 200, "the connection serves on"


# A client that takes its time


def _endless(num_events: int) -> Any:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for _ in range(num_events):
            await exchange.send(text("x" * 1000))
            script.num_sent += 1  # type: ignore[attr-defined]
        await exchange.send(DONE)
        await exchange.end_stream()

    script.num_sent = 0  # type: ignore[attr-defined]
    return script


async def test_a_client_that_reads_nothing_makes_the_engine_wait_and_loses_nothing() -> None:
    num_events = 30_000  # 30 MB: more than the sockets' own buffers take
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = script = _endless(num_events)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.write(request(STREAM, b"connection: close"))
        sent = -1
        while sent != script.num_sent or not sent:  # until the engine is at a stand
            sent = script.num_sent
            await asyncio.sleep(0.3)
        assert sent < num_events
        assert max(len(connection) for connection in _kept_bytes(lab)) < 400_000
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.rest()
        assert answer.count(b"data: ") == num_events + 1
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert lab.ended == {("batched", "completed", ""): 1}


def _kept_bytes(lab: GatewayLab) -> list[bytes]:
    sizes = [connection.transport.get_write_buffer_size() for connection in _server(lab).connections]
    return [b"x" * size for size in sizes]


async def test_a_client_that_takes_nothing_for_too_long_gives_its_place_back() -> None:
    async with gateway_lab(client_stall_timeout_s=0.1) as lab, connected(lab.app) as client:
        lab.engine.script = _endless(20_000)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.write(request(STREAM))
        await until(lambda: lab.ended == {("batched", "cancelled", "client_stalled"): 1})
        await until(lambda: lab.plane.counts == (0, 0))
        await until(lambda: lab.engine.num_open == 0)


async def test_a_client_that_takes_long_and_goes_on_is_not_cut_off() -> None:
    async with gateway_lab(client_stall_timeout_s=2, idle_timeout_s=0.2) as lab, connected(lab.app) as client:
        lab.engine.script = _endless(20_000)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.write(request(STREAM, b"connection: close"))
        await asyncio.sleep(0.6)  # longer than the engine may be silent, who is made to wait and is not
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.rest()).count(b"data: ") == 20_001


# Leaving


@contextlib.asynccontextmanager
async def second_server(lab: GatewayLab, *, drain_timeout_s: float = 10) -> AsyncIterator[GatewayServer]:
    """Another gateway on the port of the lab's."""
    host, port = _server(lab).address
    listener = listen(host, port)
    door = Door(100, 5, 5, lab.metrics.refused)
    server = GatewayServer(_server(lab).application, listener, door, drain_timeout_s=drain_timeout_s)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


async def test_one_of_two_that_leaves_loses_no_request() -> None:
    async with gateway_lab(scheduler={"max_waiting_requests": 1000}) as lab:
        lab.engine.script = answers(WHOLE)
        statuses: list[int] = []
        num_half_made: list[int] = []

        async def keep_asking() -> None:
            while not is_over:
                async with connected(lab.app) as client:
                    client.write(request(CHAT))
                    try:
                        statuses.append((await client.answer())[0])
                    except ConnectionResetError:
                        # The kernel drops a connection that is half made when its listener leaves, unless
                        # net.ipv4.tcp_migrate_req is 1; no request of it has reached anybody.
                        num_half_made.append(1)

        is_over = False
        asking = [asyncio.create_task(keep_asking()) for _ in range(10)]
        for _ in range(3):
            async with second_server(lab):
                before = len(statuses)
                await until(lambda: len(statuses) > before + 20)  # noqa: B023
        is_over = True
        await asyncio.gather(*asking)
        assert set(statuses) == {200}
        assert len(num_half_made) < 10


async def test_what_the_kernel_had_accepted_is_answered_after_the_port_was_left() -> None:
    async with gateway_lab() as lab, second_server(lab) as server:
        address = _server(lab).address
        # No turn of the event loop between the connections and the leaving: nobody has accepted them.
        sockets = [socket.create_connection(address) for _ in range(40)]
        leaving = asyncio.create_task(server.shutdown())  # its first step comes before what the sockets bring
        clients = [Connection(*await asyncio.open_connection(sock=opened)) for opened in sockets]
        for client in clients:
            client.write(HEALTH)
        for client in clients:
            assert (await client.answer())[0] == 200
            client.writer.close()
        await leaving


async def test_a_stream_that_runs_ends_whole_and_the_next_answer_of_its_connection_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "IDLE_GRACE_S", 0.2)
    goes_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a"))
        await goes_on.wait()
        await exchange.send(text("b") + DONE)
        await exchange.end_stream()

    async with gateway_lab() as lab, connected(lab.app) as client, connected(lab.app) as idle:
        lab.engine.script = script
        idle.write(HEALTH)
        assert (await idle.answer())[0] == 200
        client.write(request(STREAM))
        await client.until(text("a"))
        _server(lab).leave()
        await asyncio.sleep(0.05)
        # A request on a connection that was open is served, and is its last.
        idle.write(HEALTH)
        last = await idle.rest()
        assert last.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in last
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*_server(lab).address)
        goes_on.set()
        await client.until(DONE + b"\r\n0\r\n\r\n")
        # Its head came before the gateway left: the client could not know, and asks again at once.
        client.write(HEALTH)
        assert b"connection: close" in await client.rest()


async def test_a_limit_of_less_than_a_second_leaves_streams_some_time() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(text("a"))
        await asyncio.sleep(0.3)
        await exchange.send(DONE)
        await exchange.end_stream()

    async with gateway_lab() as lab:
        lab.engine.script = script
        async with second_server(lab, drain_timeout_s=0.9) as server:
            await _server(lab).server.shutdown()
            async with connected(lab.app) as client:
                client.write(request(STREAM))
                await client.until(text("a"))
                server.should_exit = True
                assert (await client.rest()).endswith(DONE + b"\r\n0\r\n\r\n")


async def test_a_port_that_is_taken_is_told_with_its_setting() -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.raises(Exception, match=f"gateway.port={port}: Address already in use"):
        listen("127.0.0.1", port)
    taken.close()


async def test_a_stream_over_the_socket_is_the_engines_bytes_in_its_blocks() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = plays(text("a"), text("b") + text("c"), DONE)
        client.write(request(STREAM, b"connection: close"))
        answer = await client.rest()
        body = answer.partition(b"\r\n\r\n")[2]
        sizes = re.findall(rb"(?:^|\n)([0-9a-f]+)\r\n", body)
        assert sum(int(size, 16) for size in sizes) == len(text("a") + text("b") + text("c") + DONE)


# Old clients


async def test_a_stream_for_a_client_of_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = plays(text("a"), text("b"), text("c"), DONE)
        client.write(request(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert body == text("a") + text("b") + text("c") + DONE
        assert lab.ended == {("batched", "completed", ""): 1}


async def test_an_error_in_a_stream_for_a_client_of_http_1_0_has_no_chunks_either() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = plays(text("a"))
        client.write(request(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        body = (await client.rest()).partition(b"\r\n\r\n")[2]
        assert body.startswith(text("a") + b'data: {"error":')
        assert body.endswith(b"}\n\n")


async def test_a_whole_answer_for_a_client_of_http_1_0_says_its_length() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = answers(WHOLE)
        client.write(request(CHAT).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert await client.answer() == (200, WHOLE)
        assert await client.rest() == b""


# Bytes that are no request


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "behind another"])
async def test_a_connection_that_says_nothing_but_line_ends_is_closed(is_first: bool) -> None:
    async with gateway_lab(header_timeout_s=0.05) as lab, connected(lab.app) as client:
        if not is_first:
            client.write(HEALTH)
            assert (await client.answer())[0] == 200
        client.write(b"\r\n")
        assert await client.rest() == b""
        assert lab.ended == {}


async def test_line_ends_between_requests_take_nothing_from_them() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        for _ in range(3):
            client.write(b"\r\n")
            await asyncio.sleep(0.01)
            client.write(HEALTH + b"\r\n")
            assert (await client.answer())[0] == 200


async def test_a_body_before_a_part_of_a_head_is_not_counted_as_one() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = answers(WHOLE)
        long = CHAT | {"messages": [{"role": "user", "content": "x" * 2 * MAX_HEAD_BYTES}]}
        client.write(request(long) + HEALTH[:10])
        assert (await client.answer())[0] == 200
        client.write(HEALTH[10:])
        assert (await client.answer())[0] == 200


async def test_a_pipelined_head_that_comes_drop_by_drop_has_no_longer() -> None:
    async with gateway_lab(header_timeout_s=0.1) as lab, connected(lab.app) as client:
        client.write(HEALTH + b"GET /")
        assert (await client.answer())[0] == 200

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    client.write(b"x")
                    await client.writer.drain()
                    await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert code_of(await client.rest()) == (408, "upload_timeout")
        dripping.cancel()
        assert lab.ended == {("", "rejected", "upload_timeout"): 1}


CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: lab\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_a_flood_behind_a_chunked_body_is_bounded_too() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        client.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(20):
                client.write(b"x: " + b"y" * (MAX_HEAD_BYTES // 8) + b"\r\n")
                await client.writer.drain()
                await asyncio.sleep(0.001)
        with contextlib.suppress(ConnectionError):
            await client.rest()
        await until(lambda: lab.ended == {("", "cancelled", "client_closed"): 1})


async def test_what_stands_behind_a_chunked_body_is_no_header() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = answers(WHOLE)
        raw = json.dumps(CHAT).encode()
        client.write(CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(raw), raw))
        await asyncio.sleep(0.01)
        (connection,) = _server(lab).connections
        num_headers = len(connection.headers)
        client.write(b"authorization: Bearer x\r\n\r\n")
        assert await client.answer() == (200, WHOLE)
        assert len(connection.headers) == num_headers


async def test_a_body_that_is_no_body_is_a_400_and_counts_once() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        client.write(CHUNKED + b"zz\r\n")
        assert code_of(await client.rest()) == (400, "bad_request")
        await until(lambda: lab.ended == {("", "cancelled", "client_closed"): 1})


@pytest.mark.parametrize("begun", [b"", b"x"])
async def test_a_body_that_never_comes_after_its_answer_holds_no_connection(begun: bytes) -> None:
    async with gateway_lab(header_timeout_s=0.05) as lab, connected(lab.app) as client:
        client.write(b"POST /nowhere HTTP/1.1\r\nhost: lab\r\ncontent-length: 1000\r\n\r\n" + begun)
        assert (await client.answer())[0] == 404
        client.write(b"x")
        assert await client.rest() == b"", "one request has one answer"
        assert lab.ended == {}


async def test_a_body_that_comes_after_its_answer_takes_nothing_from_the_next() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        client.write(b"POST /nowhere HTTP/1.1\r\nhost: lab\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.answer())[0] == 404
        client.write(b"x" * 1000 + HEALTH)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize("is_known", [True, False], ids=["too large", "without a key"])
async def test_who_is_refused_before_the_body_is_whole_gets_the_answer_all_the_same(is_known: bool) -> None:
    keys = ApiKeys() if is_known else ApiKeys(["x" * 20])
    async with gateway_lab(max_body_bytes=100_000, keys=keys) as lab:
        # As the OpenAI client does it: nothing is read before all is sent.
        url = "http://{}:{}/v1/chat/completions".format(*_server(lab).address)
        async with httpx.AsyncClient() as client:
            answer = await client.post(url, content=b"x" * 10_000_000)
        assert answer.status_code == (413 if is_known else 401)
        assert answer.headers["connection"] == "close"
        await until(lambda: not _server(lab).connections)


async def test_who_is_refused_and_goes_on_sending_is_left_after_a_while() -> None:
    keys = ApiKeys(["x" * 20])
    async with gateway_lab(keys=keys, header_timeout_s=0.05) as lab, connected(lab.app) as client:
        client.write(request(CHAT).replace(b"content-length: ", b"content-length: 9"))
        assert code_of(await client.rest()) == (401, "invalid_api_key")
        await until(lambda: not _server(lab).connections)
        assert lab.ended == {("", "rejected", "invalid_api_key"): 1}


async def test_a_flood_of_pipelined_requests_is_bounded() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        (connection,) = await _connections(lab)
        longest = 0
        with contextlib.suppress(ConnectionError):
            for _ in range(50):
                client.write(b"GET /nowhere HTTP/1.1\r\n\r\n" * 1000)
                await client.writer.drain()
                longest = max(longest, len(connection.pipeline))
                await asyncio.sleep(0)
        assert longest <= http_protocol.MAX_PIPELINED
        await until(lambda: not _server(lab).connections)


async def _connections(lab: GatewayLab) -> list[Any]:
    await until(lambda: bool(_server(lab).connections))
    return list(_server(lab).connections)


async def test_many_pipelined_requests_that_come_slowly_are_all_answered() -> None:
    num_requests = 3 * http_protocol.MAX_PIPELINED
    async with gateway_lab() as lab, connected(lab.app) as client:

        async def ask() -> None:
            for _ in range(num_requests):
                client.write(HEALTH)
                await client.writer.drain()
                await asyncio.sleep(0)

        asking = asyncio.create_task(ask())
        assert {(await client.answer())[0] for _ in range(num_requests)} == {200}
        await asking


async def test_a_client_that_leaves_with_a_request_behind_another_is_nobodys_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = stays_silent
        client.write(request(CHAT) + HEALTH)
        await until(lambda: lab.engine.num_open == 1)
        client.writer.transport.abort()
        await until(lambda: lab.ended == {("batched", "cancelled", "client_closed"): 1})
        await until(lambda: not _server(lab).tasks)
        assert [record.message for record in caplog.records if record.name == "uvicorn.error"] == []


async def test_a_connection_that_is_reset_leaves_no_timer() -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        client.write(HEALTH)
        assert (await client.answer())[0] == 200
        (connection,) = await _connections(lab)
        assert connection.timeout_keep_alive_task is not None
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        client.writer.transport.abort()
        await until(lambda: not _server(lab).connections)
        assert connection.timeout_keep_alive_task is None


async def test_a_client_that_takes_nothing_of_an_answer_holds_no_place_with_the_next() -> None:
    long = json.dumps({"choices": [{"message": {"content": "x" * 20_000_000}}]}).encode()
    async with gateway_lab(client_stall_timeout_s=0.1) as lab, connected(lab.app) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        lab.engine.script = answers(long)
        client.write(request(CHAT) + request(CHAT))
        await until(lambda: len(lab.engine.requests) == 2)
        await until(lambda: lab.plane.counts == (0, 0))
        await until(
            lambda: (
                lab.ended == {("batched", "completed", ""): 1, ("batched", "cancelled", "client_stalled"): 1}
            )
        )


@pytest.mark.parametrize("line", [b"x: y", b"connection: close"], ids=["kept", "closed"])
async def test_a_client_that_takes_nothing_of_a_whole_answer_is_left_after_a_while(
    line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "STALL_GRACE_S", 0.1)
    long = json.dumps({"choices": [{"message": {"content": "x" * 20_000_000}}]}).encode()
    async with gateway_lab(client_stall_timeout_s=0.1) as lab, connected(lab.app) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        lab.engine.script = answers(long)
        client.write(request(CHAT, line))
        await until(lambda: lab.ended == {("batched", "completed", ""): 1})
        await until(lambda: not _server(lab).connections)


async def test_a_client_that_is_slow_with_a_long_answer_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "STALL_GRACE_S", 0.0)
    long = json.dumps({"choices": [{"message": {"content": "x" * 20_000_000}}]}).encode()
    async with gateway_lab(client_stall_timeout_s=0.2) as lab, connected(lab.app) as client:
        lab.engine.script = answers(long)
        client.write(request(CHAT, b"connection: close"))
        got = len((await client.until(b"\r\n\r\n")).partition(b"\r\n\r\n")[2])
        while got < len(long):
            got += len(await client.read(min(1_000_000, len(long) - got)))
            await asyncio.sleep(0.05)
        assert got == len(long)


# The replica's side


async def test_a_replica_that_answers_what_nobody_asked_is_not_asked_again_on_that_connection() -> None:
    async def script(exchange: Exchange) -> None:
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        further = b'HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"of": '
        exchange.writer.write(answer % (len(WHOLE), WHOLE) + further)

    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = script
        for _ in range(3):
            client.write(request(CHAT))
            assert await client.answer() == (200, WHOLE)


class _Paused:
    """A connection to a replica, as far as its answer may pause it."""

    is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


async def test_what_was_kept_for_a_client_that_takes_no_more_does_not_let_the_replica_go_on() -> None:
    answer, connection = UpstreamAnswer("", GatewayConfig(), is_stream=True), _Paused()
    got: list[bytes] = []
    answer.begin(connection)  # type: ignore[arg-type]
    answer.take_head(200, "text/event-stream")
    answer.take_block(b"x" * (MAX_KEPT_BYTES + 1), is_last=False)
    assert connection.is_paused
    answer.pause()
    pouring = asyncio.create_task(answer.pour(lambda block, _: got.append(block)))
    await asyncio.sleep(0)
    assert sum(map(len, got)) == MAX_KEPT_BYTES + 1
    assert connection.is_paused
    answer.resume()
    assert not connection.is_paused
    answer.finish()
    await pouring


async def test_what_an_engine_says_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway_lab() as lab, connected(lab.app) as client:
        lab.engine.script = answers(b"no\nrequest 1 outcome=completed", 500)
        client.write(request(CHAT))
        assert (await client.answer())[0] == 502
        said = [record.getMessage() for record in caplog.records if "no" in record.getMessage()]
        assert said
        assert all("\n" not in line for line in said)
