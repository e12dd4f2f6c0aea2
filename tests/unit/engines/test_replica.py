"""A replica's life beside a real scheduler: announced when warm, and gone without cutting a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from serving.config import LaneConfig, SimulatedProfile
from serving.core.errors import TandemError
from serving.core.lane import Strategy
from serving.engines import replica as replica_module
from serving.engines.replica import EngineReplica
from serving.engines.simulated.engine import SimulatedEngine
from serving.scheduler import channel as channel_module
from serving.scheduler import protocol
from serving.scheduler import service as service_module
from tests.unit.scheduler.control_plane import ControlPlane, control_plane, deaf_scheduler, until

pytestmark = pytest.mark.anyio

OURS = protocol.PROTOCOL_VERSION
NEXT = OURS + 1
LANE = LaneConfig(
    name="batched",
    strategy=Strategy.BATCHED,
    engine="simulated",
    max_num_seqs=2,
    simulated=SimulatedProfile(ttft_ms=0, step_ms=5),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "LEAVE_SETTLE_S", 0.01)
    monkeypatch.setattr(service_module, "TICK_S", 0.01)


@dataclass
class Scene:
    """A replica that serves, and the scheduler that knows it."""

    plane: ControlPlane
    replica: EngineReplica
    url: str

    @contextlib.asynccontextmanager
    async def streaming(self, max_tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """A stream that has given its first bytes, as a gateway would read it."""
        body = {"model": "sim", "prompt": "x", "max_tokens": max_tokens, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/v1/completions", json=body) as response,
        ):
            await response.content.readany()
            yield response


@dataclass
class CountingFinder:
    """Finds the scheduler; `found` is how often it was there."""

    plane: ControlPlane
    found: int = 0

    async def find(self) -> str:
        address = await self.plane.address()
        self.found += 1
        return address


def made(find_scheduler: Callable[[], Awaitable[str]], drain_timeout_s: float = 30) -> EngineReplica:
    engine = SimulatedEngine(LANE, ["sim"], max_model_len=1_000_000)
    return EngineReplica(engine, LANE, "b-1", "sim", find_scheduler, drain_timeout_s)


@contextlib.asynccontextmanager
async def scene(*, drain_timeout_s: float = 30) -> AsyncIterator[Scene]:
    async with control_plane(drain_timeout_s=0.01) as plane:
        replica = made(plane.address, drain_timeout_s)
        url = await replica.start("127.0.0.1")
        await until(lambda: plane.is_ready("b-1"))
        yield Scene(plane, replica, url)


async def test_it_is_announced_as_its_lane_says() -> None:
    async with scene() as one:
        (shown,) = one.plane.lane("batched")["replicas"]
        assert (shown["url"], shown["max_running"]) == (one.url, 2)
        one.replica.check()
        await one.replica.close()
        await until(lambda: not one.plane.is_ready("b-1"))


@pytest.mark.parametrize(("engine_args", "temperature"), [({"diffusion_config": {}}, None), (None, 0)])
async def test_a_model_that_denoises_is_asked_for_no_temperature(
    engine_args: dict[str, Any] | None, temperature: int | None
) -> None:
    lane = LaneConfig(name="batched", strategy=Strategy.BATCHED, engine_args=engine_args)
    assert replica_module.warm_up_body(lane, "m").get("temperature") == temperature


async def test_a_leaving_replica_gets_nothing_new_and_its_streams_end() -> None:
    async with scene() as one:
        async with one.streaming(max_tokens=40) as response:
            closing = asyncio.create_task(one.replica.close())
            await until(lambda: one.plane.status["leaving_replicas"] == ["b-1"])
            assert not one.plane.is_ready("b-1")
            assert not closing.done()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await closing
        await until(lambda: one.plane.service.replicas() == [])


async def test_a_leaving_replica_does_not_announce_itself_to_the_next_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel_module, "RECONNECT_DELAY_S", 0.01)
    async with control_plane() as plane:
        finder = CountingFinder(plane)
        replica = made(finder.find)
        url = await replica.start("127.0.0.1")
        await until(lambda: plane.is_ready("b-1"))
        async with Scene(plane, replica, url).streaming(max_tokens=100_000):
            closing = asyncio.create_task(replica.close())
            await until(lambda: plane.status["leaving_replicas"] == ["b-1"])
            await plane.stop()
            before = finder.found
            await plane.start()
            await until(lambda: finder.found > before)
            async with plane.replica("r2"):  # by now the scheduler has heard whatever was said to it before
                assert [shown["replica"] for shown in plane.service.replicas()] == ["r2"]
            assert not closing.done()
        await closing


async def test_a_broken_one_says_that_it_leaves_so_that_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: SimulatedEngine) -> None:
        raise TandemError("the engine died")

    async with control_plane(settle_s=3) as plane, plane.gateway("g") as gateway:
        plane.clock.now_s += 4
        replica = made(plane.address)
        await replica.start("127.0.0.1")
        await until(lambda: plane.is_ready("b-1"))
        monkeypatch.setattr(SimulatedEngine, "check", broken)
        await until(lambda: not plane.is_ready("b-1"))
        await gateway.submit("a")
        assert isinstance(await gateway.hear(), protocol.Refused)
        await replica.close()


async def test_a_request_in_its_first_step_is_waited_for_too() -> None:
    """vLLM counts a request with its first output; a replica that stopped before that cut it."""
    async with scene() as one:
        async with one.streaming(max_tokens=40) as response:
            tally = one.replica._engine.tally  # noqa: SLF001
            tally.load = lambda running, waiting: None  # type: ignore[method-assign]
            tally.step = lambda running, waiting, ended_at_s: None  # type: ignore[method-assign]
            tally.running = 0
            closing = asyncio.create_task(one.replica.close())
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        await closing


async def test_a_stream_that_does_not_end_is_left_at_the_limit() -> None:
    async with scene(drain_timeout_s=0.05) as one, one.streaming(max_tokens=100_000):
        async with asyncio.timeout(5):
            await one.replica.close()


async def test_after_the_labs_own_drain_no_stream_is_waited_for_again() -> None:
    async with scene() as one, one.streaming(max_tokens=100_000):
        await one.plane.service.drain()
        async with asyncio.timeout(5):
            await one.replica.close()


async def test_it_hears_what_waits_for_it() -> None:
    async with scene() as one, one.plane.gateway("g") as gateway:
        for number in range(3):
            await gateway.submit(str(number), "batched")
        await until(lambda: one.replica.demand_tokens == 30)
        await gateway.socket.close()
        await until(lambda: one.replica.demand_tokens == 0)
        await one.replica.close()


async def test_one_of_another_release_says_so_once_and_joins_when_the_right_scheduler_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_module, "REFUSED_DELAY_S", 0.01)
    async with control_plane() as plane:
        finder = CountingFinder(plane)
        monkeypatch.setattr(
            protocol, "PROTOCOL_VERSION", NEXT
        )  # the scheduler's; the hello has its own already
        replica = made(finder.find)
        await replica.start("127.0.0.1")
        await until(lambda: finder.found >= 4)
        replica.check()
        assert plane.service.replicas() == []
        (said,) = [record.getMessage() for record in caplog.records if record.name == channel_module.__name__]
        assert f"replica_hello of control protocol {OURS}, but this scheduler" in said
        assert f"speaks {NEXT}: start all from one release; trying again every 0.01 s" in said
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", OURS)
        await until(lambda: plane.is_ready("b-1"))
        await replica.close()


async def test_a_silent_scheduler_is_left_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(channel_module, "RECONNECT_DELAY_S", 0.01)
    async with deaf_scheduler() as deaf:
        replica = made(deaf.find, drain_timeout_s=0)
        await replica.start("127.0.0.1")
        await until(lambda: deaf.connections >= 3)
        replica.check()
        await replica.close()
