"""The scheduler and its client over a real WebSocket. Every test ends with all counts at 0."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import aiohttp
import anyio
import pytest
from aiohttp import web

from serving.core.errors import Reason, RefusedError
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import Lease, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.metrics.registry import exposition
from serving.scheduler import channel as channel_module
from serving.scheduler import client as client_module
from serving.scheduler import service as service_module
from serving.scheduler.client import SchedulerClient
from serving.scheduler.protocol import (
    MAX_MESSAGES_A_FRAME,
    GatewayHello,
    Granted,
    Refused,
    ReplicaHello,
    ReplicaLeaving,
    ReplicaUpdate,
    Submit,
    Withdraw,
    decode_to_scheduler,
    encode,
    next_frame,
)
from tests.unit.scheduler.control_plane import (
    ENGINE,
    ControlPlane,
    RawGateway,
    control_plane,
    deaf_scheduler,
    hear_update,
    release,
    say,
    until,
)
from tests.unit.scheduler.examples import request

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def quick_retries_and_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a tick, what an event should bring about must come from that event."""
    monkeypatch.setattr(channel_module, "RECONNECT_DELAY_S", 0.01)
    monkeypatch.setattr(service_module, "TICK_S", 3600)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "TICK_S", 0.01)


class Holder:
    """A task that asks for a lease and holds it until told to end."""

    def __init__(self, client: SchedulerClient, asked: SchedulingRequest) -> None:
        self.granted: Granted | None = None
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._hold(client, asked))

    async def _hold(self, client: SchedulerClient, asked: SchedulingRequest) -> None:
        async with client.lease(asked) as held:
            self.granted = held.granted
            await self._end.wait()

    @property
    def has_lease(self) -> bool:
        return self.granted is not None

    async def end(self) -> None:
        self._end.set()
        await self.task

    async def leave(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


async def heard(gateway: RawGateway, *request_ids: str) -> None:
    """These requests are granted, in this order."""
    for request_id in request_ids:
        message = await gateway.hear()
        assert isinstance(message, Granted)
        assert message.request_id == request_id


# One gateway


async def test_a_lease_is_booked_for_the_length_of_the_block() -> None:
    async with (
        control_plane() as plane,
        plane.replica("r1", url="http://127.0.0.1:5"),
        plane.client() as client,
    ):
        async with client.lease(request("a", tokens=30)) as held:
            assert held.granted == Granted("a", "r1", "batched", "http://127.0.0.1:5")
            (replica,) = plane.lane("batched")["replicas"]
            assert (replica["running"], replica["outstanding_tokens"]) == (1, 30)
        await until(lambda: plane.counts == (0, 0))


async def test_a_block_that_fails_gives_its_lease_back() -> None:
    async with control_plane() as plane, plane.replica("r1"), plane.client() as client:
        with pytest.raises(ZeroDivisionError):
            async with client.lease(request("a")):
                raise ZeroDivisionError
        await until(lambda: plane.counts == (0, 0))


async def test_requests_of_a_sequential_lane_run_one_after_another() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.client() as client:
        holders = [Holder(client, request(name, "sequential")) for name in "abc"]
        for number, holder in enumerate(holders):
            await until(lambda holder=holder: holder.has_lease)  # type: ignore[misc]
            await until(lambda left=2 - number: plane.counts == (left, 1))  # type: ignore[misc]
            await holder.end()


async def test_a_refusal_reaches_the_caller_with_reason_and_advice() -> None:
    async with control_plane(max_waiting_requests=0) as plane, plane.client() as client:
        with pytest.raises(RefusedError) as caught:
            async with client.lease(request("a")):
                pass
        assert caught.value.reason is Reason.NO_REPLICA_READY
        async with plane.replica("s", "sequential"):
            running = Holder(client, request("b", "sequential"))
            await until(lambda: running.has_lease)
            with pytest.raises(RefusedError, match=r"0 of 0 .*max_waiting_requests") as caught:
                async with client.lease(request("c", "sequential")):
                    pass
            assert (caught.value.reason, caught.value.retry_after_s) == (Reason.QUEUE_FULL, 1)
            await running.end()
        assert plane.status["refusals"] == {"no_replica_ready": 1, "queue_full": 1}


@pytest.mark.usefixtures("ticking")
async def test_who_waits_too_long_is_refused() -> None:
    async with (
        control_plane(max_queue_wait_s=30) as plane,
        plane.replica("s", "sequential"),
        plane.client() as client,
    ):
        running = Holder(client, request("a", "sequential"))
        waiting = Holder(client, request("b", "sequential"))
        await until(lambda: plane.counts == (1, 1))
        plane.clock.now_s += 31
        with pytest.raises(RefusedError, match=r"waited 31\.0 s") as caught:
            await waiting.task
        assert caught.value.reason is Reason.QUEUE_TIMEOUT
        assert plane.counts == (0, 1), "who runs is not touched by the age of its lease"
        await running.end()


async def test_a_client_that_leaves_the_queue_leaves_no_trace() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.client() as client:
        running = Holder(client, request("a", "sequential"))
        leaving = Holder(client, request("b", "sequential"))
        staying = Holder(client, request("c", "sequential"))
        await until(lambda: plane.counts == (2, 1))
        await leaving.leave()
        await until(lambda: plane.counts == (1, 1))
        await running.end()
        await until(lambda: staying.has_lease)
        await staying.end()


async def test_leaving_at_any_moment_around_the_grant_leaves_no_trace() -> None:
    """Before it is sent, while it is on its way, in the tick it arrives, after."""
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.client() as client:
        moments_with_lease = 0
        for ticks in range(40):
            holder = Holder(client, request(f"q{ticks}", "sequential"))
            for _ in range(ticks):
                await asyncio.sleep(0)
            moments_with_lease += holder.has_lease
            await holder.leave()
        assert 0 < moments_with_lease < 40, "the moments lie on both sides of the grant"
        await until(lambda: plane.counts == (0, 0))
        async with client.lease(request("after", "sequential")):
            pass
        assert b"tandem_lease_errors_total 0.0" in exposition(plane.service.metrics.registry)
        # A new scheduler hears of no lease: the client, too, has forgotten them all.
        await plane.stop()
        await plane.start()
        await until(lambda: plane.status["gateways"] == ["g"])
        assert plane.counts == (0, 0)


async def test_a_request_that_cannot_be_told_fails_alone() -> None:
    async with control_plane() as plane, plane.replica("r1"), plane.client() as client:
        with pytest.raises(ValueError, match="4300 digits"):
            async with client.lease(request("a", tokens=10**5000)):
                pass
        async with client.lease(request("b")):
            assert plane.counts == (0, 1)


async def test_all_that_a_client_may_say_reaches_the_scheduler() -> None:
    said = request(
        "a",
        "sequential",
        tenant="t",
        band=1,
        ttft_deadline_s=5.0,
        max_queue_s=7.0,
        prefix_blocks=(1, 2),
        age_s=1.0,
        avoid_replica="r9",
    )
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.client() as client:
        running = Holder(client, request("b", "sequential"))
        await until(lambda: running.has_lease)
        waiting = Holder(client, said)
        await until(lambda: plane.counts == (1, 1))
        (heard_of,) = plane.service._core._queue  # noqa: SLF001 - no page shows all of it
        known = heard_of.request
        assert known.age_s >= said.age_s
        assert replace(known, age_s=1.0, predicted_output_tokens=0) == said
        assert plane.status["waiting_by_tenant"] == {"t": 1}
        tokens = said.reserved_tokens
        lane_of = {lane["lane"]: lane for lane in plane.status["lanes"]}
        assert lane_of["sequential"]["waiting"] == [
            {"band": "normal", "tenant": "t", "requests": 1, "tokens": tokens}
        ]
        assert plane.status["waiting_any"] == []
        assert plane.status["waiting_by_band"] == {"high": 0, "normal": 1, "low": 0}
        await running.end()
        await until(lambda: waiting.has_lease)
        await waiting.end()


async def test_verdicts_reach_the_breaker() -> None:
    async with (
        control_plane(breaker_failures=2) as plane,
        plane.replica("r1"),
        plane.client() as client,
    ):
        for number in range(2):
            async with client.lease(request(str(number))) as held:
                held.end = RequestEnd(ReplicaVerdict.FAILED)
        await until(lambda: plane.counts == (0, 0))
        (replica,) = plane.lane("batched")["replicas"]
        assert (replica["breaker"], replica["failures_in_a_row"]) == ("open", 2)
        assert b'tandem_breaker_state{lane="batched",replica="r1"} 2.0' in exposition(
            plane.service.metrics.registry
        )
        plane.clock.now_s += 5
        async with client.lease(request("probe")) as held:
            (replica,) = plane.lane("batched")["replicas"]
            assert replica["breaker"] == "half_open"
            held.end = RequestEnd(ReplicaVerdict.HEALTHY)
        await until(lambda: plane.lane("batched")["replicas"][0]["breaker"] == "closed")


# The channel


async def test_a_grant_that_crosses_a_withdrawal_is_given_back() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.gateway("g") as gateway:
        await gateway.submit("a", "sequential")
        await gateway.say(Withdraw("a"))
        await gateway.submit("b", "sequential")
        await heard(gateway, "a", "b")
        await gateway.say(release("b"))


async def test_a_withdrawal_that_crosses_a_refusal_does_nothing() -> None:
    async with control_plane() as plane, plane.gateway("g") as gateway:
        await gateway.submit("a")
        await gateway.say(Withdraw("a"))
        message = await gateway.hear()
        assert isinstance(message, Refused)
        assert message.reason is Reason.NO_REPLICA_READY


async def test_a_double_release_is_counted_and_takes_nobody_down() -> None:
    async with control_plane() as plane, plane.replica("r1"), plane.gateway("g") as gateway:
        for request_id in ("a", "b"):
            await gateway.submit(request_id)
        await heard(gateway, "a", "b")
        await gateway.say(release("a"))
        await gateway.say(release("a"))
        await gateway.submit("c")
        await heard(gateway, "c")
        assert plane.counts == (0, 2)
        assert b"tandem_lease_errors_total 1.0" in exposition(plane.service.metrics.registry)
        for request_id in ("b", "c"):
            await gateway.say(release(request_id))


async def test_a_late_word_on_a_replaced_connection_books_nothing() -> None:
    """Nobody would ever release it: a sequential lane would be dead until the scheduler starts again."""
    async with (
        control_plane() as plane,
        plane.replica("s", "sequential"),
        plane.gateway("g") as old,
        plane.gateway("g") as new,
    ):
        await old.submit("late", "sequential")
        message = await old.socket.receive(timeout=20)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)
        assert plane.counts == (0, 0)
        await new.submit("a", "sequential")
        await heard(new, "a")
        await new.say(release("a"))
        assert b"tandem_lease_errors_total 0.0" in exposition(plane.service.metrics.registry)


async def test_a_late_goodbye_on_a_replaced_connection_takes_no_replica_away() -> None:
    url = "http://127.0.0.1:7"
    async with control_plane() as plane, plane.replica("r1") as old, plane.replica("r1", url=url):
        await until(lambda: plane.service.replicas()[0]["url"] == url)
        await say(old, ReplicaLeaving())
        message = await old.receive(timeout=20)
        while message.type is aiohttp.WSMsgType.TEXT:  # it was told what is booked on it
            message = await old.receive(timeout=20)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1001)
        assert plane.is_ready("r1")


async def test_a_gateway_that_vanishes_gives_back_all_it_had() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.gateway("stays") as stays:
        async with plane.gateway("dies") as dies:
            for request_id in ("a", "b"):
                await dies.submit(request_id, "sequential")
            await heard(dies, "a")
            await stays.submit("c", "sequential")
            await until(lambda: plane.counts == (2, 1))
        await heard(stays, "c")
        assert plane.counts == (0, 1)
        assert plane.status["gateways"] == ["stays"]
        await stays.say(release("c"))


async def test_of_ended_requests_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "serving.scheduler")
    async with control_plane() as plane, plane.replica("s", "sequential"):
        async with plane.gateway("g") as gateway:
            for request_id in ("runs", "waits", "refused"):
                await gateway.submit(request_id, "nowhere" if request_id == "refused" else "sequential")
            await heard(gateway, "runs")
            assert isinstance(await gateway.hear(), Refused)
            await gateway.say(Withdraw("waits"))
            await gateway.say(release("runs"))
            await until(lambda: plane.counts == (0, 0))
        await until(lambda: plane.status["gateways"] == [])
    assert "gateway g left with 0 requests" in caplog.text


async def test_garbage_ends_its_senders_channel_and_no_other() -> None:
    async with control_plane() as plane, plane.replica("r1"), plane.gateway("good") as good:
        async with plane.gateway("bad") as bad:
            await bad.submit("a")
            await heard(bad, "a")
            await bad.socket.send_str('{"type": "submit", "request": {}}')
            message = await bad.socket.receive(timeout=20)
            assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1008)
            assert "request_id" in str(message.extra)
        await until(lambda: plane.status["gateways"] == ["good"])
        await good.submit("b")
        await heard(good, "b")
        await good.say(release("b"))


async def test_a_channel_begins_with_a_hello() -> None:
    async with control_plane() as plane, plane.connected() as socket:
        await socket.send_str('{"type": "withdraw", "request_id": "a"}')
        message = await socket.receive(timeout=20)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1002)


async def test_a_replica_that_placement_cannot_reckon_with_is_told_so_and_not_kept() -> None:
    async with (
        control_plane(placement="adaptive", profile="none is read") as plane,
        plane.connected() as socket,
    ):
        info = ReplicaInfo(
            "r1", "sequential", Strategy.SEQUENTIAL, "http://127.0.0.1:1", 1, takes_unpinned=True
        )
        await say(socket, ReplicaHello(info, ENGINE))
        message = await socket.receive(timeout=20)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, 1002)
        assert "lane 'sequential'" in str(message.extra)
        assert plane.service.replicas() == []
        assert plane.status["leaving_replicas"] == []


async def test_a_reconnecting_gateway_holds_what_it_says_it_holds() -> None:
    """Its old connection looks alive: what it no longer reports is free, and at once for those who wait."""
    async with (
        control_plane() as plane,
        plane.replica("s", "sequential"),
        plane.replica("r1"),
        plane.gateway("other") as other,
        plane.gateway("g") as old,
    ):
        await old.submit("a", "sequential")
        await old.submit("b")
        await heard(old, "a", "b")
        await other.submit("c", "sequential")
        await until(lambda: plane.counts == (1, 2))
        async with plane.gateway("g", Lease("b", "r1", 10)) as new:
            await heard(other, "c")
            (replica,) = plane.lane("batched")["replicas"]
            assert replica["running"] == 1
            await old.socket.close()
            assert plane.counts == (0, 2), "the end of the old connection says nothing about the new one"
            await new.say(release("b"))
            await other.say(release("c"))
            await until(lambda: plane.counts == (0, 0))


async def test_a_silent_scheduler_is_left_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "HEARTBEAT_S", 0.02)
    plane = ControlPlane()
    async with deaf_scheduler() as deaf:
        monkeypatch.setattr(plane, "address", deaf.find)
        async with plane.client():
            await until(lambda: deaf.connections >= 3)


# No scheduler


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ALONE_LIMIT_S", 0.05)
    monkeypatch.setattr(client_module, "ALONE_TICK_S", 0.005)


@pytest.mark.usefixtures("alone")
async def test_without_a_scheduler_nobody_waits_for_ever() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.client() as client:
        running = Holder(client, request("a", "sequential"))
        await until(lambda: running.has_lease)
        waiting = Holder(client, request("b", "sequential"))
        await until(lambda: plane.counts == (1, 1))
        await plane.stop()
        with pytest.raises(RefusedError, match=r"has not been reachable for 0\.05 s") as caught:
            await waiting.task
        assert (caught.value.reason, caught.value.retry_after_s) == (Reason.SCHEDULER_UNREACHABLE, 1)
        assert not running.task.done(), "who runs needs no scheduler"
        await plane.start()
        await until(lambda: plane.counts == (0, 1))
        await running.end()


@pytest.mark.usefixtures("alone")
async def test_who_is_refused_on_a_channel_that_is_not_welcome_yet_is_withdrawn() -> None:
    heard: list[str] = []

    async def serve(http: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(http)
        async for frame in socket:
            heard.extend(frame.data.split("\n"))
        return socket

    app = web.Application()
    app.router.add_get("/control", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]

    async def address() -> str:
        return f"{host}:{port}"

    client = SchedulerClient("g", "127.0.0.1:9", address)
    channel = asyncio.create_task(client.run())
    with pytest.raises(RefusedError):
        async with client.lease(request("r")):
            pass
    await until(lambda: len(heard) == 3)
    _, submitted, withdrawn = map(decode_to_scheduler, heard)
    assert isinstance(submitted, Submit)
    assert submitted.request.request_id == "r"
    assert withdrawn == Withdraw("r")
    channel.cancel()
    await asyncio.wait([channel])
    await runner.cleanup()


async def test_who_may_not_wait_is_refused_as_soon_as_the_scheduler_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "ALONE_TICK_S", 0.005)
    async with control_plane() as plane, plane.client() as client:
        await plane.stop()
        patient = Holder(client, request("patient"))
        with pytest.raises(RefusedError, match="for 0 s") as caught:
            async with client.lease(request("now", max_queue_s=0.0)):
                pass
        assert caught.value.reason is Reason.SCHEDULER_UNREACHABLE
        assert not patient.task.done()
        await patient.leave()
        await plane.start()


# A scheduler that restarts


async def test_requests_that_wait_and_run_survive_a_new_scheduler() -> None:
    async with control_plane() as plane, plane.client("g1") as first, plane.client("g2") as second:
        async with plane.replica("s", "sequential"):
            running = Holder(first, request("a", "sequential", tokens=30))
            await until(lambda: running.has_lease)
            waiting = Holder(second, request("b", "sequential"))
            await until(lambda: plane.counts == (1, 1))
            await plane.stop()
        ends_meanwhile = Holder(second, request("c", "sequential"))
        await asyncio.sleep(0)
        await ends_meanwhile.leave()

        await plane.start(settle_s=3)
        await until(lambda: plane.counts == (1, 1))
        async with plane.replica("s", "sequential"):
            (replica,) = plane.lane("sequential")["replicas"]
            assert (replica["running"], replica["outstanding_tokens"]) == (1, 30)
            plane.clock.now_s += 4
            await running.end()
            await until(lambda: waiting.has_lease)
            await waiting.end()
            await until(lambda: plane.counts == (0, 0))
        assert b"tandem_lease_errors_total 0.0" in exposition(plane.service.metrics.registry)


async def test_a_new_scheduler_places_nothing_before_all_have_reported() -> None:
    async with (
        control_plane(settle_s=3) as plane,
        plane.replica("s", "sequential"),
        plane.gateway("early") as early,
    ):
        await early.submit("a", "sequential")
        await until(lambda: plane.counts == (1, 0))
        async with plane.gateway("late", Lease("held", "s", 10)) as late:
            plane.clock.now_s += 4
            await until(lambda: plane.counts == (1, 1))
            await late.say(release("held"))
            await heard(early, "a")
            await early.say(release("a"))
            await until(lambda: plane.counts == (0, 0))


@pytest.mark.usefixtures("ticking")
async def test_settling_ends_by_itself() -> None:
    async with control_plane(settle_s=3) as plane, plane.replica("r1"), plane.gateway("g") as gateway:
        await gateway.submit("a")
        await until(lambda: plane.counts == (1, 0))
        plane.clock.now_s += 4
        await heard(gateway, "a")
        await gateway.say(release("a"))


# Replicas


async def test_after_a_cut_requests_wait_for_replicas_that_come_back_later_than_their_gateway() -> None:
    async with control_plane(settle_s=3) as plane:
        plane.clock.now_s += 4
        async with plane.replica("r1"):
            pass  # its connection breaks
        await until(lambda: not plane.is_ready("r1"))
        plane.clock.now_s += 10
        async with plane.gateway("g") as gateway:
            await gateway.submit("a")
            await until(lambda: plane.counts == (1, 0))
            async with plane.replica("r1"):
                await heard(gateway, "a")
                await gateway.say(release("a"))


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_replica_that_says_it_leaves_is_not_waited_for(says_so: bool) -> None:
    async with control_plane(settle_s=3) as plane, plane.gateway("g") as gateway:
        plane.clock.now_s += 4
        async with plane.replica("r1") as replica:
            if says_so:
                await say(replica, ReplicaLeaving())
                await until(lambda: not plane.is_ready("r1"))
        await until(lambda: not plane.is_ready("r1"))
        await gateway.submit("a")
        if says_so:
            assert isinstance(await gateway.hear(), Refused)
        else:
            await until(lambda: plane.counts == (1, 0))


async def test_a_replica_that_leaves_gets_nothing_more() -> None:
    async with control_plane() as plane, plane.gateway("g") as gateway:
        async with plane.replica("r1"):
            await gateway.submit("a")
            await heard(gateway, "a")
        await until(lambda: not plane.is_ready("r1"))
        await gateway.submit("b")
        assert isinstance(await gateway.hear(), Refused)
        assert plane.counts == (0, 1), "the lease lives until its holder lets go"
        await gateway.say(release("a"))


async def test_a_replica_that_is_leaving_gets_nothing_more_and_keeps_its_streams() -> None:
    async with control_plane() as plane, plane.gateway("g") as gateway:
        async with plane.replica("s", "sequential") as replica:
            for request_id in ("runs", "waits"):
                await gateway.submit(request_id, "sequential")
            await heard(gateway, "runs")
            await say(replica, ReplicaLeaving())
            await until(lambda: plane.status["leaving_replicas"] == ["s"])
            assert not plane.is_ready("s")
            assert plane.counts == (1, 1)
            async with plane.replica("s2", "sequential"):
                await heard(gateway, "waits")
                await gateway.say(release("runs"))
                await gateway.say(release("waits"))
                await until(lambda: plane.counts == (0, 0))
        await until(lambda: plane.status["leaving_replicas"] == [])


@pytest.mark.usefixtures("ticking")
async def test_a_replica_hears_what_is_booked_on_it_and_what_waits_for_it() -> None:
    async with (
        control_plane() as plane,
        plane.replica("s", "sequential") as replica,
        plane.gateway("g") as gateway,
    ):
        for request_id in ("runs", "waits"):
            await gateway.submit(request_id, "sequential")
        await heard(gateway, "runs")
        with anyio.fail_after(5):
            while await hear_update(replica) != ReplicaUpdate(20, has_grace=True):
                pass
        await say(replica, ReplicaLeaving())
        with anyio.fail_after(5):
            while (await hear_update(replica)).outstanding_tokens != 0:
                pass
        await gateway.say(Withdraw("waits"))
        await gateway.say(release("runs"))


@pytest.mark.usefixtures("ticking")
async def test_a_replica_is_not_told_what_it_knows() -> None:
    async with (
        control_plane() as plane,
        plane.replica("s", "sequential") as replica,
        plane.gateway("g") as gateway,
    ):
        assert await hear_update(replica) == ReplicaUpdate(0, has_grace=True)
        num_reads = plane.clock.num_reads
        await until(lambda: plane.clock.num_reads > num_reads + 10)  # each tick reads it at least once
        await gateway.submit("runs", "sequential")
        assert await hear_update(replica) == ReplicaUpdate(10, has_grace=True)
        await gateway.say(release("runs"))
        assert await hear_update(replica) == ReplicaUpdate(0, has_grace=True)


async def test_a_replica_that_reconnects_outlives_its_old_connection() -> None:
    async with control_plane() as plane:
        async with plane.replica("r1", url="http://127.0.0.1:5") as old, plane.replica("r1") as new:
            await old.close()
            await until(lambda: old.closed)
            async with plane.replica("r2"):  # a round trip: by now the scheduler has seen the old one end
                assert plane.is_ready("r1", "r2")
            await new.close()
            await until(lambda: not plane.is_ready("r1"))
        assert plane.service.replicas() == []


async def test_a_new_replica_takes_those_who_wait() -> None:
    async with control_plane() as plane, plane.replica("s1", "sequential"), plane.gateway("g") as gateway:
        for request_id in ("a", "b"):
            await gateway.submit(request_id, "sequential")
        await heard(gateway, "a")
        async with plane.replica("s2", "sequential"):
            message = await gateway.hear()
            assert isinstance(message, Granted)
            assert (message.request_id, message.replica_id) == ("b", "s2")
        for request_id in ("a", "b"):
            await gateway.say(release(request_id))


# Drain and pages


async def test_drain_waits_for_all_and_says_whether_all_ended() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.gateway("g") as gateway:
        for request_id in ("runs", "waits"):
            await gateway.submit(request_id, "sequential")
        await heard(gateway, "runs")
        draining = asyncio.create_task(plane.service.drain())
        await until(lambda: plane.status["draining"])
        await gateway.submit("late", "sequential")
        message = await gateway.hear()
        assert isinstance(message, Refused)
        assert message.reason is Reason.DRAINING
        await gateway.say(release("runs"))
        await heard(gateway, "waits")
        assert not draining.done()
        await gateway.say(release("waits"))
        assert await draining


async def test_drain_ends_at_its_limit_and_tells_replicas_to_wait_no_longer() -> None:
    async with (
        control_plane(drain_timeout_s=0.01) as plane,
        plane.replica("s", "sequential") as replica,
        plane.gateway("g") as gateway,
    ):
        await gateway.submit("runs", "sequential")
        await heard(gateway, "runs")
        assert not await plane.service.drain()
        assert await hear_update(replica) == ReplicaUpdate(10, has_grace=False)
        await gateway.say(release("runs"))
        await until(lambda: plane.counts == (0, 0))
        assert await plane.service.drain()


async def test_drain_counts_those_who_still_wait() -> None:
    async with control_plane() as plane, plane.gateway("g") as gateway:
        async with plane.replica("s", "sequential"):
            for request_id in ("runs", "waits"):
                await gateway.submit(request_id, "sequential")
            await heard(gateway, "runs")
        await until(lambda: not plane.is_ready("s"))
        await gateway.say(release("runs"))
        await until(lambda: plane.counts == (1, 0))
        draining = asyncio.create_task(plane.service.drain())
        await until(lambda: plane.status["draining"])
        async with plane.replica("s2", "sequential"):
            await heard(gateway, "waits")
            assert not draining.done()
            await gateway.say(release("waits"))
            assert await draining


async def test_pages_and_metrics() -> None:
    async with (
        control_plane() as plane,
        plane.replica("r1", url="http://127.0.0.1:5"),
        plane.gateway("g") as gateway,
        aiohttp.ClientSession(f"http://{await plane.address()}") as http,
    ):
        await gateway.submit("a", "batched")
        await heard(gateway, "a")
        async with http.get("/scheduler") as page:
            status = await page.json()
        assert status == plane.status
        assert [lane["lane"] for lane in status["lanes"]] == ["sequential", "batched"]
        async with http.get("/replicas") as page:
            (replica,) = await page.json()
        assert (replica["replica"], replica["engine"]) == ("r1", "simulated")
        assert replica == {
            "replica": "r1",
            "lane": "batched",
            "strategy": "batched",
            "url": "http://127.0.0.1:5",
            "server": None,
            "served_model": None,
            "lacks": [],
            "engine": "simulated",
            "engine_version": "simulated 1",
            "has_model": False,
            "niceness": None,
            "group_niceness": None,
            "dtype": "none",
            "device": "none",
            "arguments": [],
            "tokenizer": "",
            "max_step_tokens": None,
            "kv_tokens": None,
        }
        async with http.get("/targets") as page:
            targets = await page.json()
        assert [(target["labels"]["role"], target["targets"]) for target in targets] == [
            ("scheduler", [await plane.address()]),
            ("gateway", ["127.0.0.1:9"]),
            ("replica", ["127.0.0.1:5"]),
        ]
        async with http.get("/metrics") as page:
            text = await page.text()
        assert 'tandem_running_requests{lane="batched",replica="r1"} 1.0' in text
        assert 'tandem_outstanding_tokens{lane="batched",replica="r1"} 10.0' in text
        assert 'tandem_replica_ready{lane="batched",replica="r1"} 1.0' in text
        assert 'tandem_waiting_requests{lane="any"} 0.0' in text
        assert 'tandem_waiting_by_band_requests{band="high"} 0.0' in text
        assert 'tandem_breaker_state{lane="batched",replica="r1"} 0.0' in text
        assert 'tandem_queue_wait_seconds_count{band="high",lane="batched"} 1.0' in text
        await gateway.say(release("a"))


async def test_the_status_page_tells_who_waits_and_who_was_refused() -> None:
    async with (
        control_plane(max_waiting_requests=30, order="fair", placement="power_of_two") as plane,
        plane.replica("s", "sequential"),
        plane.gateway("g") as gateway,
    ):
        await gateway.submit("runs", "sequential")
        await heard(gateway, "runs")
        for number in range(30):
            tenant = "many" if number < 9 else f"t{number}"
            await gateway.submit(f"w{number}", "sequential", tenant=tenant, band=2)
        await gateway.submit("too-many", "sequential", tenant="late")
        message = await gateway.hear()
        assert isinstance(message, Refused)
        plane.clock.now_s += 3
        status = plane.status
        assert (status["order"], status["placement"]) == ("fair", "power_of_two")
        assert status["waiting_by_band"] == {"high": 0, "normal": 0, "low": 30}
        assert len(status["waiting_by_tenant"]) == 21
        assert status["waiting_by_tenant"]["many"] == 9
        assert status["waiting_by_tenant"]["other"] == 2
        (sequential,) = [lane for lane in status["lanes"] if lane["lane"] == "sequential"]
        groups = {group["tenant"]: group for group in sequential["waiting"]}
        assert len(groups) == 21
        assert {group["band"] for group in groups.values()} == {"low"}
        assert [groups[name]["requests"] for name in ("many", "t9", "other")] == [9, 1, 2]
        assert groups["other"]["tokens"] == 2 * groups["t9"]["tokens"]
        assert status["last_refusals"] == [
            {"seconds_ago": 3.0, "reason": "queue_full", "tenant": "late", "lane": "sequential"}
        ]


async def test_what_is_said_at_once_goes_in_one_frame_and_is_heard_in_order() -> None:
    async with control_plane() as plane, plane.replica("s", "sequential"), plane.connected() as socket:
        said = [
            GatewayHello("g", "127.0.0.1:9"),
            Submit(request("a", "sequential")),
            Submit(request("b", "sequential")),
        ]
        await socket.send_str("\n".join(encode(message).decode() for message in said))
        await until(lambda: plane.counts == (1, 1))
        await socket.send_str("\n".join(encode(message).decode() for message in (release("a"), release("b"))))
        await until(lambda: plane.counts == (0, 0))
        outbox: asyncio.Queue[str] = asyncio.Queue()
        for number in range(MAX_MESSAGES_A_FRAME + 1):
            outbox.put_nowait(str(number))
        assert (await next_frame(outbox)).count("\n") == MAX_MESSAGES_A_FRAME - 1
        assert await next_frame(outbox) == str(MAX_MESSAGES_A_FRAME)
