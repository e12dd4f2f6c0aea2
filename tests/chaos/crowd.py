"""Many clients at once, each of which says how it fared."""

from __future__ import annotations

import asyncio
import collections
import json
import re
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import aiohttp
import httpx
import psutil

from tests.running_lab import RunningLab


@dataclass
class Stream:
    """What one streaming client saw."""

    status: int | None = None
    reason: str | None = None
    replica: str | None = None
    tokens: int = 0
    error: str | None = None  # an error event, or a torn connection
    is_done: bool = False


async def stream(
    client: aiohttp.ClientSession,
    lab: RunningLab,
    max_tokens: int,
    seen: Stream,
    headers: dict[str, str] | None = None,
    prompt: str = "x",
) -> Stream:
    """Read one answer to its end, noting into `seen` on the way."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    try:
        async with client.post(f"{lab.url}/v1/completions", json=body, headers=headers) as answer:
            seen.status = answer.status
            seen.reason = answer.headers.get("x-tandem-reason")
            seen.replica = answer.headers.get("x-tandem-replica")
            async for line in answer.content:
                _note(line.decode().rstrip("\r\n"), seen)
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.error = f"torn: {error!r}"
    return seen


def _note(line: str, seen: Stream) -> None:
    if line == "data: [DONE]":
        seen.is_done = True
    elif line.startswith("data: "):
        payload = json.loads(line.removeprefix("data: "))
        if "error" in payload:
            seen.error = payload["error"]["code"]
        else:
            seen.tokens += payload["choices"][0]["text"].count("simulated")


def crowd(work: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, Any]]) -> Any:
    """Run clients in one event loop over one pool without a limit."""

    async def run() -> Any:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
            return await work(client)

    return asyncio.run(run())


async def until(condition: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    """Poll from within an event loop; what held once may be over at the next look."""
    try:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110 - the condition lives in other processes
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {limit_s} s: {what}") from None


def at_rest(lab: RunningLab) -> bool:
    """Nobody waits, nothing runs, no lease is held and no token outstanding."""
    try:
        status = lab.get("/scheduler")
    except httpx.HTTPError:
        return False
    replicas = [replica for lane in status["lanes"] for replica in lane["replicas"]]
    counts = [status["leases"], status["waiting"]]
    counts += [count for one in replicas for count in (one["running"], one["outstanding_tokens"])]
    return not any(counts) and all(one["breaker"] == "closed" for one in replicas)


def replica_process(lab: RunningLab, replica_id: str) -> psutil.Process:
    (url,) = [one["url"] for one in lab.replicas("batched") if one["replica"] == replica_id]
    return lab.process_behind(url)


def role_process(lab: RunningLab, role: str) -> psutil.Process:
    """The first process of that role in the service discovery."""
    return lab.process_behind(role_address(lab, role))


def role_address(lab: RunningLab, role: str) -> str:
    """Its host:port."""
    return role_addresses(lab, role)[0]


def role_addresses(lab: RunningLab, role: str) -> list[str]:
    """host:port of each process of that role in the service discovery."""
    return [str(entry["targets"][0]) for entry in lab.get("/targets") if entry["labels"]["role"] == role]


def requests_ended(lab: RunningLab) -> int:
    """As all gateways that run count them."""
    return _counted(lab, "tandem_requests_total")


def reroutes(lab: RunningLab) -> int:
    """Requests that ran a second time on another replica."""
    return _counted(lab, "tandem_reroutes_total")


def _counted(lab: RunningLab, counter: str) -> int:
    pages = [httpx.get(f"http://{address}/metrics").text for address in role_addresses(lab, "gateway")]
    counts = re.findall(rf"^{counter}\{{.*\}} ([0-9.e+]+)$", "\n".join(pages), re.MULTILINE)
    return round(sum(map(float, counts)))


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def listeners(port: int) -> int:
    """How many sockets the kernel gives new connections of this port to: one for each gateway.

    That a killed process is a zombie says less: its other threads may still hold what it had open.
    """
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    return sum(one.laddr.port == port for one in listening if one.laddr)


def count(streams: list[Stream]) -> collections.Counter[str]:
    """How the clients fared: `done`, or the error."""
    return collections.Counter(
        "done" if one.is_done else one.error or f"{one.status} {one.reason}" for one in streams
    )
