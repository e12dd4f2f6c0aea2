"""A real scheduler service on the loopback, with gateways and replicas that a test plays by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import uvicorn
from aiohttp import web

from serving.config import LaneConfig, SchedulerConfig
from serving.core.lane import AttachedServer, EngineFacts, ReplicaInfo, Strategy
from serving.core.request import Lease, ReplicaVerdict, RequestEnd
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import LinearStepTime
from serving.http_server import serve_app
from serving.scheduler import protocol
from serving.scheduler.client import SchedulerClient
from serving.scheduler.lane_costs import LaneCost
from serving.scheduler.service import SchedulerService, build_scheduler_app
from tests.unit.scheduler.examples import request

LANES = [
    LaneConfig(name="sequential", strategy=Strategy.SEQUENTIAL, max_num_seqs=1, takes_unpinned=False),
    LaneConfig(name="batched", strategy=Strategy.BATCHED, max_num_seqs=2),
]


# For placement `adaptive`: as if the lane drafted.
LANE_COSTS = {"batched": LaneCost(CostModel(LinearStepTime(0.02, 0.002, 0)), (3,))}
ENGINE = EngineFacts("simulated", "simulated 1", has_model=False, device="none", dtype="none")


async def until(condition: Callable[[], bool], limit_s: float = 20) -> None:
    """Give way to the other tasks until the condition holds."""
    with anyio.fail_after(limit_s):
        while not condition():  # noqa: ASYNC110 - what is watched has no event to wait for
            await asyncio.sleep(0.001)


@dataclass
class Clock:
    """A clock that stands still until a test moves it."""

    now_s: float = 1000.0
    num_reads: int = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


class ControlPlane:
    """A scheduler that can be stopped and started again, as another process would be: it forgets everything."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.service: SchedulerService
        self._server: uvicorn.Server | None = None
        self._address: str | None = None

    async def start(self, *, settle_s: float = 0, **settings: Any) -> None:
        self.service = SchedulerService(
            SchedulerConfig(**settings), LANES, self.clock, settle_s, lane_costs=LANE_COSTS
        )
        app = build_scheduler_app(self.service, own_address=lambda: self._address or "")
        self._server, self._serving, self._address = await serve_app(app, "127.0.0.1")

    async def stop(self) -> None:
        if self._server is not None:
            self._address = None
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._server = None

    async def address(self) -> str:
        if self._address is None:
            raise ConnectionError("the scheduler is not there")
        return self._address

    @property
    def status(self) -> dict[str, Any]:
        return self.service.status()

    @property
    def counts(self) -> tuple[int, int]:
        """(waiting, leases)."""
        return self.status["waiting"], self.status["leases"]

    def lane(self, name: str) -> dict[str, Any]:
        (found,) = [lane for lane in self.status["lanes"] if lane["lane"] == name]
        assert isinstance(found, dict)
        return found

    def is_ready(self, *replica_ids: str) -> bool:
        ready = {replica["replica"] for lane in self.status["lanes"] for replica in lane["replicas"]}
        return ready >= set(replica_ids)

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A bare control channel."""
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://{await self.address()}/control") as socket,
        ):
            yield socket

    @contextlib.asynccontextmanager
    async def replica(
        self,
        replica_id: str,
        lane: str = "batched",
        *,
        url: str = "http://127.0.0.1:1",
        server: AttachedServer | None = None,
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A replica that is announced for the length of the block."""
        config = next(known for known in LANES if known.name == lane)
        info = ReplicaInfo(
            replica_id, lane, config.strategy, url, config.max_running, config.takes_unpinned, server
        )
        hello = protocol.ReplicaHello(info, ENGINE)
        async with self.connected() as socket:
            await say(socket, hello)
            await until(lambda: self.is_ready(replica_id))
            yield socket

    @contextlib.asynccontextmanager
    async def client(self, gateway_id: str = "g") -> AsyncIterator[SchedulerClient]:
        """A gateway's real client, connected."""
        client = SchedulerClient(gateway_id, f"127.0.0.1:9/{gateway_id}", self.address)
        channel = asyncio.create_task(client.run())
        try:
            await client.wait_connected(20)
            yield client
        finally:
            assert not channel.done(), channel
            channel.cancel()
            await asyncio.wait([channel])

    @contextlib.asynccontextmanager
    async def gateway(self, gateway_id: str, *leases: Lease) -> AsyncIterator[RawGateway]:
        """A gateway whose every message a test writes itself."""
        async with self.connected() as socket:
            await say(socket, protocol.GatewayHello(gateway_id, "127.0.0.1:9", list(leases)))
            gateway = RawGateway(socket)
            assert await gateway.hear() == protocol.Welcome()
            await until(lambda: gateway_id in self.status["gateways"])
            yield gateway


@dataclass
class RawGateway:
    socket: aiohttp.ClientWebSocketResponse
    heard: list[str] = field(
        default_factory=list
    )  # of a frame with several messages, those not given out yet

    async def submit(self, request_id: str, lane: str | None = None, **fields: Any) -> None:
        await self.say(protocol.Submit(request(request_id, lane, **fields)))

    async def say(self, message: protocol.Message) -> None:
        await say(self.socket, message)

    async def hear(self) -> protocol.FromScheduler:
        if not self.heard:
            self.heard += (await self.socket.receive_str(timeout=20)).split("\n")
        message: protocol.FromScheduler = protocol.decode_from_scheduler(self.heard.pop(0))
        return message


def release(
    request_id: str, verdict: ReplicaVerdict = ReplicaVerdict.HEALTHY, output_tokens: int | None = None
) -> protocol.Release:
    """The word that a request ended."""
    return protocol.Release(request_id, RequestEnd(verdict, None, output_tokens))


async def hear_update(socket: aiohttp.ClientWebSocketResponse) -> protocol.ReplicaUpdate:
    """The scheduler's next word to a replica."""
    update: protocol.ReplicaUpdate = protocol.decode_replica_update(await socket.receive_str(timeout=5))
    return update


async def say(socket: aiohttp.ClientWebSocketResponse, message: protocol.Message) -> None:
    await socket.send_str(protocol.encode(message).decode())


@dataclass
class DeafScheduler:
    """Takes every connection, welcomes it and is silent for ever after; not even a ping is answered."""

    address: str = ""
    connections: int = 0

    async def find(self) -> str:
        return self.address

    async def serve(self, http: web.Request) -> web.WebSocketResponse:
        self.connections += 1
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(http)
        with contextlib.suppress(ConnectionError):
            if "gateway_hello" in await socket.receive_str():
                await socket.send_str(protocol.encode(protocol.Welcome()).decode())
            async for _ in socket:
                pass
        return socket


@contextlib.asynccontextmanager
async def deaf_scheduler() -> AsyncIterator[DeafScheduler]:
    scheduler = DeafScheduler()
    app = web.Application()
    app.router.add_get("/control", scheduler.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    scheduler.address = f"{host}:{port}"
    try:
        yield scheduler
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def control_plane(**settings: Any) -> AsyncIterator[ControlPlane]:
    """A running scheduler. When the block is left well, nothing may be left waiting or running."""
    plane = ControlPlane()
    await plane.start(**settings)
    try:
        yield plane
        await until(lambda: plane.counts == (0, 0))
    finally:
        await plane.stop()
