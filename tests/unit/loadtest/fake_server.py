"""Servers for tests of the load lab: one that follows a script byte by byte, and a small lab.

    python -m tests.unit.loadtest.fake_server 8000

serves the lab by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import generate_latest

from serving.core.errors import Reason
from serving.core.latency import RequestTimeline
from serving.core.request import Outcome
from serving.gateway.metrics import GatewayMetrics

OK_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-tandem-lane: batched\r\nx-tandem-replica: batched-1\r\n\r\n"
)
END = b"0\r\n\r\n"


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def usage_event(prompt_tokens: int, output_tokens: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}}
    )


DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Conversation:
    """One connection of a scripted server: what it received, and when it sent what."""

    sock: socket.socket
    requests: list[bytes] = field(default_factory=list)
    sent_at_s: list[float] = field(default_factory=list)

    def receive(self) -> bytes:
        """One whole request, with its body; empty when the client closed."""
        data = b""
        while b"\r\n\r\n" not in data:
            if not (part := self.sock.recv(65536)):
                return b""
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ),
            0,
        )
        while len(body) < length:
            body += self.sock.recv(65536)
        self.requests.append(head + b"\r\n\r\n" + body)
        return self.requests[-1]

    def send(self, data: bytes) -> None:
        self.sent_at_s.append(time.perf_counter())
        self.sock.sendall(data)


@contextlib.contextmanager
def scripted_server(
    *scripts: Callable[[Conversation], None], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[Conversation]]]:
    """Serve one connection after another, each by its own script; yields the base URL and the conversations."""
    conversations: list[Conversation] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            for script in scripts:
                sock, _ = listener.accept()
                sock.settimeout(10)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with sock, contextlib.suppress(ConnectionError, ssl.SSLError):
                    conversations.append(
                        Conversation(tls.wrap_socket(sock, server_side=True) if tls else sock)
                    )
                    with conversations[-1].sock:
                        script(conversations[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}", conversations
        thread.join(timeout=10)
        assert not thread.is_alive(), "the script waits for a connection that never came"


@dataclass(frozen=True, slots=True)
class FakeLane:
    """How a lane answers: seconds to the first chunk, seconds between chunks, tokens in each.

    Attributes:
        max_running: requests at once; others wait in order.
        slower_per_user: what each further running request adds to a gap, as a share of it.
        story_tokens_per_chunk: the same for prompts that are no copy.
        says_done: with `[DONE]` at the end; without it the last chunk gives a reason.
        fail_every: every n-th request breaks off after two chunks; 0 for none.
    """

    strategy: str
    ttft_s: float
    gap_s: float
    tokens_per_chunk: int = 1
    story_tokens_per_chunk: int = 1
    max_running: int = 16
    slower_per_user: float = 0.0
    fail_every: int = 0
    says_done: bool = True
    memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Served:
    """What the server itself took for an answer, by its own stamps."""

    ttft_s: float
    tpot_s: float


DEFAULT_LANES = {
    "sequential": FakeLane("sequential", 0.020, 0.010, max_running=1, memory_bytes=900 << 20),
    "batched": FakeLane("batched", 0.020, 0.010, slower_per_user=0.03, memory_bytes=1100 << 20),
    "speculative": FakeLane(
        "speculative", 0.020, 0.013, tokens_per_chunk=3, slower_per_user=0.3, memory_bytes=1150 << 20
    ),
}


class FakeLab:
    """The part of a lab's HTTP interface that the load lab uses, with known times."""

    def __init__(self, lanes: dict[str, FakeLane] | None = None) -> None:
        self.lanes = lanes or DEFAULT_LANES
        self.num_requests: dict[str, int] = dict.fromkeys(self.lanes, 0)
        self.served: dict[str, list[Served]] = {name: [] for name in self.lanes}
        self.running: dict[str, int] = dict.fromkeys(self.lanes, 0)
        self.drafts: dict[str, list[int]] = {name: [0, 0, 0] for name in self.lanes}
        self.gateway = GatewayMetrics()
        self.address = ""
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._watches: list[tuple[int, threading.Event]] = []

    def after(self, num_requests: int) -> threading.Event:
        """An event that is set when so many requests have arrived in all."""
        self._watches.append((num_requests, threading.Event()))
        return self._watches[-1][1]

    def hold(self) -> None:
        """Begin no answer until `release`; requests arrive and wait. From another thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._may_answer.clear)

    def release(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._may_answer.set)

    async def serve(self, host: str, port: int) -> asyncio.Server:
        self._loop = asyncio.get_running_loop()
        self._gates = {name: asyncio.Semaphore(lane.max_running) for name, lane in self.lanes.items()}
        server = await asyncio.start_server(self._connection, host, port)
        bound_host, bound_port = server.sockets[0].getsockname()[:2]
        self.address = f"{bound_host}:{bound_port}"
        return server

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client left
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False when the connection is not to be used again."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = request_line.split()[1]
        if path == "/v1/chat/completions":
            return await self._chat(json.loads(body), writer)
        pages = {
            "/lab": self._lab,
            "/targets": self._targets,
            "/metrics": self._metrics,
            "/v1/models": self._models,
        }
        name, _, lane = path.partition("?lane=")
        content = pages[name](lane) if name in pages else None
        status = b"200 OK" if content is not None else b"404 Not Found"
        data = (content or "").encode()
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()
        return True

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        name = body["model"].partition(":")[2]
        lane = self.lanes[name]
        prompt = body["messages"][0]["content"]
        per_chunk = lane.tokens_per_chunk if "text" in prompt[:40] else lane.story_tokens_per_chunk
        arrived_at_s = time.perf_counter()
        self.num_requests[name] += 1
        for count, reached in self._watches:
            if sum(self.num_requests.values()) >= count:
                reached.set()
        is_broken = bool(lane.fail_every) and self.num_requests[name] % lane.fail_every == 0
        tokens = body["max_tokens"]
        ended: tuple[Outcome, Reason | None] = Outcome.CANCELLED, Reason.CLIENT_CLOSED
        try:
            async with self._gates[name]:
                await self._may_answer.wait()
                self.running[name] += 1
                try:
                    stamps = await self._stream(
                        name, lane, per_chunk, tokens, 2 if is_broken else None, writer
                    )
                finally:
                    self.running[name] -= 1
            if is_broken:
                ended = Outcome.FAILED, Reason.UPSTREAM_BROKE
            else:
                ended = Outcome.COMPLETED, None
                timeline = RequestTimeline(arrived_at_s, arrived_at_s, stamps, time.perf_counter(), tokens)
                self.gateway.completed(name, timeline, 150, is_stream=True)
        finally:
            self.gateway.ended(name, *ended)
        return not is_broken

    async def _stream(
        self,
        name: str,
        lane: FakeLane,
        per_chunk: int,
        tokens: int,
        break_after: int | None,
        writer: asyncio.StreamWriter,
    ) -> tuple[float, ...]:
        """Send the answer, or the part of it before the break; when each chunk was sent."""
        stamps = [time.perf_counter()]
        await asyncio.sleep(lane.ttft_s)
        writer.write(
            OK_HEAD.replace(b"batched-1", name.encode() + b"-1").replace(b": batched", b": " + name.encode())
        )
        for number, start in enumerate(range(0, tokens, per_chunk)):
            if number == break_after:
                return ()
            if number:
                await asyncio.sleep(lane.gap_s * (1 + lane.slower_per_user * (self.running[name] - 1)))
            size = min(per_chunk, tokens - start)
            if lane.strategy == "speculative":
                self._count(name, 4, size - 1)
            stamps.append(time.perf_counter())
            writer.write(http_chunk(text_event("word " * size)))
            await writer.drain()
        self.served[name].append(Served(stamps[1] - stamps[0], (stamps[-1] - stamps[1]) / (tokens - 1)))
        if not lane.says_done:
            writer.write(http_chunk(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})))
        writer.write(
            http_chunk(usage_event(150, tokens)) + (http_chunk(DONE) if lane.says_done else b"") + END
        )
        await writer.drain()
        return tuple(stamps[1:])

    def _count(self, name: str, drafted: int, accepted: int) -> None:
        counts = self.drafts[name]
        counts[0] += 1
        counts[1] += drafted
        counts[2] += accepted

    def _lab(self, _: str) -> str:
        lanes = [{"name": name, "strategy": lane.strategy} for name, lane in self.lanes.items()]
        replicas = [
            {"replica": f"{name}-1", "lane": name, "engine": "vllm", "engine_version": "0.0-fake"}
            for name in self.lanes
        ]
        for replica in replicas:
            replica |= {"dtype": "bfloat16", "device": "cpu"}
        model = {"name": "smollm2-135m", "path": "auto", "dtype": "auto", "device": "auto"}
        priorities = {"gateway_niceness": 0, "gateway_group_niceness": 0}
        return json.dumps(
            {"config": {"model": model, "lanes": lanes}, "replicas": replicas, "priorities": priorities}
        )

    def _models(self, _: str) -> str:
        names = ["smollm2-135m", *(f"smollm2-135m:{name}" for name in self.lanes)]
        return json.dumps({"object": "list", "data": [{"id": name, "owned_by": "tandem"} for name in names]})

    def _targets(self, _: str) -> str:
        # A real replica has a port of its own; here the query says whose metrics are meant.
        groups: list[dict[str, Any]] = [{"targets": [self.address], "labels": {"role": "gateway"}}]
        groups += [
            {
                "targets": [f"{self.address}/metrics?lane={name}#"],
                "labels": {"role": "replica", "lane": name, "replica": f"{name}-1"},
            }
            for name in self.lanes
        ]
        return json.dumps(groups)

    def _metrics(self, name: str) -> str:
        if not name:
            return generate_latest(self.gateway.registry).decode()
        lines = [
            f'tandem_replica_memory_bytes{{lane="{name}",replica="{name}-1"}} {self.lanes[name].memory_bytes}'
        ]
        if self.lanes[name].strategy == "speculative":
            drafts, draft_tokens, accepted = self.drafts[name]
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {draft_tokens}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}',
            ]
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def fake_lab(lanes: dict[str, FakeLane] | None = None) -> Iterator[tuple[str, FakeLab]]:
    """A fake lab in a thread of its own; yields its base URL and itself."""
    lab = FakeLab(lanes)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(lab.serve("127.0.0.1", 0), loop).result(10)
    try:
        yield f"http://{lab.address}", lab
    finally:
        asyncio.run_coroutine_threadsafe(_shut_down(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _shut_down(server: asyncio.Server) -> None:
    server.close()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _serve_by_hand(port: int) -> None:
    async with await FakeLab().serve("127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve_by_hand(int(sys.argv[1])))
