"""Admissions per second through the running scheduler service: real HTTP server, real channel, real client."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import aiohttp

from serving.config import LaneConfig, SchedulerConfig, SimulatedProfile
from serving.core.addresses import LOOPBACK
from serving.core.lane import EngineFacts, ReplicaInfo, Strategy
from serving.core.latency import percentile
from serving.core.request import SchedulingRequest
from serving.http_server import serve_app
from serving.scheduler.channel import keep_connected, listen
from serving.scheduler.client import SchedulerClient
from serving.scheduler.protocol import ReplicaHello, encode
from serving.scheduler.service import SchedulerService, build_scheduler_app

START_LIMIT_S = 30.0
LANE = LaneConfig(
    name="batched",
    strategy=Strategy.BATCHED,
    engine="simulated",
    max_num_seqs=32,
    simulated=SimulatedProfile(),
)


@dataclass(frozen=True, slots=True)
class ServiceRate:
    """One measurement. An admission is a lease asked for, granted and released; nothing runs under it.

    Attributes:
        num_tasks: clients that ask at once; those beyond `num_slots` wait in the scheduler's queue.
        grant_p50_s, grant_p99_s: from asking to grant, waiting included.
    """

    num_tasks: int
    num_slots: int
    admissions: int
    elapsed_s: float
    grant_p50_s: float | None
    grant_p99_s: float | None

    @property
    def admissions_per_s(self) -> float:
        return self.admissions / self.elapsed_s


def measure_service(num_tasks: Sequence[int], duration_s: float) -> list[ServiceRate]:
    """Run the service in a process of its own and ask it from this one, for `duration_s` each."""
    # `spawn`: a fork would hand this process' threads and sockets on.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), name="scheduler under test", daemon=True)
    process.start()
    try:
        if not ours.poll(START_LIMIT_S):
            raise RuntimeError(f"the scheduler service has not started within {START_LIMIT_S:g} s")
        address: str = ours.recv()
        return asyncio.run(_measure_all(address, num_tasks, duration_s))
    finally:
        ours.close()  # tells the service to leave
        process.join(START_LIMIT_S)
        if process.is_alive():
            process.kill()


def _serve(pipe: Connection) -> None:
    asyncio.run(_serve_until_closed(pipe))


async def _serve_until_closed(pipe: Connection) -> None:
    service = SchedulerService(SchedulerConfig(max_waiting_requests=100_000), [LANE], settle_s=0)
    address = ""
    server, serving, address = await serve_app(
        build_scheduler_app(service, own_address=lambda: address), LOOPBACK
    )
    pipe.send(address)
    await asyncio.to_thread(pipe.poll, None)
    server.should_exit = True
    await serving


async def _measure_all(address: str, num_tasks: Sequence[int], duration_s: float) -> list[ServiceRate]:
    async def find() -> str:
        return address

    client = SchedulerClient("bench", f"{LOOPBACK}:9", find)
    async with asyncio.timeout(START_LIMIT_S + duration_s * len(num_tasks)):
        background = [
            asyncio.create_task(keep_connected(find, _be_replica)),
            asyncio.create_task(client.run()),
        ]
        try:
            await client.wait_connected(START_LIMIT_S)
            await _replica_is_ready(address)
            return [await _measure(client, count, duration_s) for count in num_tasks]
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)


async def _be_replica(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Announce a replica for as long as the channel is open."""
    info = ReplicaInfo(
        replica_id="bench-replica",
        lane=LANE.name,
        strategy=LANE.strategy,
        url="http://bench-replica.invalid",
        max_running=LANE.max_running,
        takes_unpinned=LANE.takes_unpinned,
    )
    hello = ReplicaHello(info, EngineFacts("simulated", "none", has_model=False, device="none", dtype="none"))
    await socket.send_str(encode(hello).decode())
    await listen(socket, lambda _: None)


async def _replica_is_ready(address: str) -> None:
    async with aiohttp.ClientSession(f"http://{address}") as session:
        while True:
            async with session.get("/replicas") as response:
                if await response.json():
                    return
            await asyncio.sleep(0.05)


async def _measure(client: SchedulerClient, num_tasks: int, duration_s: float) -> ServiceRate:
    grants_s: list[float] = []
    numbers = itertools.count()
    started_at_s = time.perf_counter()

    async def ask() -> None:
        while (asked_at_s := time.perf_counter()) - started_at_s < duration_s:
            request_id = f"{num_tasks}-{next(numbers)}"
            async with client.lease(SchedulingRequest(request_id, None, 100, 100)):
                grants_s.append(time.perf_counter() - asked_at_s)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_tasks):
            tasks.create_task(ask())
    elapsed_s = time.perf_counter() - started_at_s
    return ServiceRate(
        num_tasks,
        LANE.max_running,
        len(grants_s),
        elapsed_s,
        percentile(grants_s, 50),
        percentile(grants_s, 99),
    )
