"""Break a running lab on purpose. Triggers are counters, never sleeps; each caller must hear how it ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time

import aiohttp
import httpx
import psutil
import pytest

from tests.chaos.crowd import (
    Stream,
    at_rest,
    count,
    crowd,
    kill,
    listeners,
    replica_process,
    requests_ended,
    reroutes,
    role_address,
    role_process,
    stream,
    until,
)
from tests.running_lab import RunningLab, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
SLOTS = 24  # of three replicas of eight


def test_a_replica_killed_mid_stream_fails_its_own_streams_only(lab: RunningLab) -> None:
    async def work(client: aiohttp.ClientSession) -> tuple[str, list[Stream]]:
        seen = [Stream() for _ in range(15)]
        tasks = [asyncio.create_task(stream(client, lab, 300, one)) for one in seen]
        await until(lambda: all(one.tokens > 0 for one in seen), "every stream has begun")
        victim = seen[0].replica
        assert victim is not None
        kill(replica_process(lab, victim))
        await asyncio.gather(*tasks)
        return victim, seen

    victim, seen = crowd(work)
    for one in seen:
        if one.replica == victim:
            assert one.error == "upstream_broke", one
            assert not one.is_done
        else:
            assert one.is_done, one
            assert one.tokens == 300
    assert {one.replica for one in seen} > {victim}


def test_of_a_replica_killed_under_load_only_what_it_had_fails(lab: RunningLab) -> None:
    """Those in mid-stream, and those in their first step, which may have been why; others run elsewhere."""

    async def work(client: aiohttp.ClientSession) -> list[Stream]:
        seen = [Stream() for _ in range(60)]
        tasks = [asyncio.create_task(stream(client, lab, 30, one)) for one in seen]
        await until(lambda: sum(one["running"] for one in lab.replicas("batched")) >= 20, "the lab is full")
        kill(replica_process(lab, lab.replicas("batched")[0]["replica"]))
        await asyncio.gather(*tasks)
        return seen

    fared = count(crowd(work))
    assert fared["done"] + fared["upstream_broke"] + fared["502 engine_died"] == 60, fared
    # A slot that the death frees may be granted once more before the scheduler hears of it, and the kernel of a
    # dying process takes a connection to the last: nobody can tell that request from one that was begun.
    assert fared["done"] >= 60 - 16, "only what the dead replica was given may fail"


def test_a_poisonous_request_kills_one_engine_and_no_more(lab: RunningLab) -> None:
    before = {one["replica"] for one in lab.replicas("batched")}

    async def work(client: aiohttp.ClientSession) -> tuple[Stream, list[Stream]]:
        seen = [Stream() for _ in range(40)]
        tasks = [asyncio.create_task(stream(client, lab, 100, one)) for one in seen[:24]]
        await until(lambda: all(one.tokens > 0 for one in seen[:24]), "the lab is full")
        poisonous = Stream()
        poison = asyncio.create_task(stream(client, lab, 100, poisonous, prompt="poison"))
        await until(
            lambda: lab.get("/scheduler")["waiting"] + lab.get("/scheduler")["leases"] >= 1, "it is known"
        )
        tasks += [asyncio.create_task(stream(client, lab, 100, one)) for one in seen[24:]]
        await asyncio.gather(poison, *tasks)
        return poisonous, seen

    poisonous, seen = crowd(work)
    assert (poisonous.status, poisonous.reason) == (502, "engine_died"), poisonous
    for one in seen:
        if (
            not one.is_done
        ):  # it had begun on the engine that died, be it a token ago or in the very same step
            assert one.replica == poisonous.replica, one
            assert (one.reason or one.error) in ("engine_died", "upstream_broke"), one
    assert count(seen)["done"] >= 40 - 15, "the seven beside it, and each freed slot once more, as above"
    wait_until(
        lambda: at_rest(lab) and len(lab.replicas("batched")) == len(before), "whole again", limit_s=60
    )
    after = {one["replica"] for one in lab.replicas("batched")}
    assert before - after == {poisonous.replica}


def test_a_hanging_replica_is_left_alone_until_it_answers_again(lab: RunningLab) -> None:
    victim = lab.replicas("batched")[0]["replica"]
    process = replica_process(lab, victim)

    def breaker() -> str:
        (found,) = [one["breaker"] for one in lab.replicas("batched") if one["replica"] == victim]
        return str(found)

    async def work(client: aiohttp.ClientSession) -> list[Stream]:
        process.send_signal(signal.SIGSTOP)
        try:
            seen = [Stream() for _ in range(12)]
            # The first of them run into the first-byte limit, are rerouted, and open the breaker.
            await asyncio.gather(*(stream(client, lab, 5, one) for one in seen))
            assert breaker() != "closed"
            rerouted = reroutes(lab)
            assert rerouted >= 2, "as many as open a breaker"
            later = [Stream() for _ in range(40)]
            await asyncio.gather(*(stream(client, lab, 5, one) for one in later))
            assert count(later) == {"done": 40}
            # One at a time may try whether it is well again, after each pause.
            assert reroutes(lab) - rerouted <= 4, "it is left alone"
        finally:
            process.send_signal(signal.SIGCONT)
        return seen

    assert count(crowd(work)) == {"done": 12}

    async def probe(client: aiohttp.ClientSession) -> None:
        async def ask_until_closed() -> None:
            while breaker() != "closed":
                await asyncio.gather(*(stream(client, lab, 2, Stream()) for _ in range(4)))

        await asyncio.wait_for(ask_until_closed(), 30)

    crowd(probe)


def test_five_hundred_clients_that_leave_take_everything_with_them(lab: RunningLab) -> None:
    async def work(client: aiohttp.ClientSession) -> None:
        seen = [Stream() for _ in range(500)]
        tasks = [asyncio.create_task(stream(client, lab, 3000, one)) for one in seen]
        await until(
            lambda: lab.get("/scheduler")["leases"] == 24 and lab.get("/scheduler")["waiting"] == 476,
            "24 run, 476 wait",
            limit_s=60,
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    crowd(work)
    wait_until(lambda: at_rest(lab), "leases, queue and tokens at 0")

    def engines_rest() -> bool:
        return not any(engine["running"] or engine["waiting"] for engine in lab.engines("batched"))

    # An engine yields the processor, and so it may see a client go after the scheduler does; its answer takes 30 s.
    wait_until(engines_rest, "no engine works for a client that has gone", limit_s=5)


def test_an_overflowing_queue_refuses_with_reason_and_serves_the_rest(lab: RunningLab) -> None:
    async def work(client: aiohttp.ClientSession) -> list[Stream]:
        # All slots are taken for longer than it takes to fill the queue.
        seen = [Stream() for _ in range(SLOTS)]
        held = [asyncio.create_task(stream(client, lab, 1000, one)) for one in seen]
        await until(lambda: lab.get("/scheduler")["leases"] == SLOTS, "the lab is full")
        late = [Stream() for _ in range(700)]
        tasks = [asyncio.create_task(stream(client, lab, 2, one)) for one in late]
        await until(
            lambda: count_refused(late) == 100 and lab.get("/scheduler")["waiting"] == 600,
            "as many wait as may, the others are refused",
        )
        await asyncio.gather(*held, *tasks)
        return seen + late

    fared = count(crowd(work))
    assert fared == {"done": SLOTS + 600, "429 queue_full": 100}, fared


def test_the_scheduler_killed_under_load_loses_and_doubles_nothing(lab: RunningLab) -> None:
    """By the engines' own word, which no scheduler can be wrong about."""

    def most_in_an_engine() -> int:
        return max(engine["running"] + engine["waiting"] for engine in lab.engines("batched"))

    def finished() -> set[str]:
        return {one["request_id"] for engine in lab.engines("batched") for one in engine["finished"]}

    before = finished()
    loads: list[int] = []

    async def work(client: aiohttp.ClientSession) -> list[Stream]:
        seen = [Stream() for _ in range(60)]
        tasks = [asyncio.create_task(stream(client, lab, 400, one)) for one in seen]
        await until(lambda: lab.get("/scheduler")["leases"] == SLOTS, "24 run, 36 wait")
        begun = [one for one in seen if one.tokens]
        kill(role_process(lab, "scheduler"))

        def is_back() -> bool:
            try:
                status = lab.get("/scheduler")
            except httpx.HTTPError:
                return False
            return (
                len(status["gateways"]) == 2 and sum(len(lane["replicas"]) for lane in status["lanes"]) == 3
            )

        await until(is_back, "the new scheduler knows gateways and replicas", limit_s=30)
        while not all(task.done() for task in tasks):
            loads.append(await asyncio.to_thread(most_in_an_engine))
        assert all(one.is_done for one in begun), "running streams go on without a scheduler"
        return seen

    seen = crowd(work)
    assert count(seen) == {"done": 60}
    assert [one.tokens for one in seen] == [400] * 60, "each answered once, and whole"
    assert max(loads) <= 8, "a slot is not given twice"
    assert len(finished() - before) == 60, "no request runs twice"


def test_a_gateway_that_dies_takes_its_own_streams_and_the_other_serves_on(lab: RunningLab) -> None:
    port = int(lab.url.rpartition(":")[2])

    async def work(client: aiohttp.ClientSession) -> tuple[list[Stream], list[Stream]]:
        seen = [Stream() for _ in range(20)]
        tasks = [asyncio.create_task(stream(client, lab, 300, one)) for one in seen]
        await until(lambda: all(one.tokens > 0 for one in seen), "every stream has begun")
        assert listeners(port) == 2
        kill(role_process(lab, "gateway"))
        await until(lambda: listeners(port) == 1, "the kernel has taken the dead gateway's socket back")
        # It gives new connections to the one that is left.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as newcomers:
            later = await asyncio.gather(*(stream(newcomers, lab, 5, Stream()) for _ in range(20)))
        await asyncio.gather(*tasks)
        return seen, later

    seen, later = crowd(work)
    assert count(later) == {"done": 20}, "nobody who comes afterwards hears of it"
    torn = [one for one in seen if one.error]
    assert 0 < len(torn) < 20, "with twenty connections each gateway has some"
    assert all(one.error.startswith("torn") for one in torn if one.error)
    assert all(one.tokens == 300 for one in seen if not one.error), "the other gateway's streams end whole"
    wait_until(lambda: at_rest(lab), "the dead gateway's leases are released")
    wait_until(lambda: len(lab.get("/scheduler")["gateways"]) == 2, "a new gateway", limit_s=60)


def test_a_scheduler_that_is_silent_for_ten_seconds_costs_no_stream_and_no_engine(lab: RunningLab) -> None:
    before = {one["replica"] for one in lab.replicas("batched")}

    async def work(client: aiohttp.ClientSession) -> list[Stream]:
        seen = [Stream() for _ in range(20)]
        tasks = [asyncio.create_task(stream(client, lab, 1500, one)) for one in seen]
        await until(lambda: all(one.tokens > 0 for one in seen), "every stream has begun")
        scheduler = role_process(lab, "scheduler")
        scheduler.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(10)  # longer than a heartbeat and its answer may take
        finally:
            scheduler.send_signal(signal.SIGCONT)
        await asyncio.gather(*tasks)
        return seen

    seen = crowd(work)
    assert count(seen) == {"done": 20}
    assert {one.tokens for one in seen} == {1500}
    wait_until(lambda: len(lab.replicas("batched")) == len(before), "all replicas are back", limit_s=30)
    assert {one["replica"] for one in lab.replicas("batched")} == before, "the same, with the same engines"


@pytest.mark.skipif(
    shutil.which("ss") is None or os.geteuid() != 0, reason="only root may cut connections (`ss --kill`)"
)
def test_a_control_channel_cut_for_ten_seconds_costs_no_stream_and_no_engine(lab: RunningLab) -> None:
    before = {one["replica"] for one in lab.replicas("batched")}
    port = role_address(lab, "scheduler").rpartition(":")[2]
    cut = ["ss", "--kill", "--no-header", "--tcp", f"( sport = :{port} or dport = :{port} )"]

    async def work(client: aiohttp.ClientSession) -> tuple[list[Stream], list[Stream], int]:
        seen, later = [[Stream() for _ in range(count)] for count in (20, 30)]
        tasks = [asyncio.create_task(stream(client, lab, 1500, one)) for one in seen]
        await until(lambda: all(one.tokens > 0 for one in seen), "every stream has begun")
        num_cut, give_up_at_s = 0, time.monotonic() + 10
        while time.monotonic() < give_up_at_s:
            killed = await asyncio.to_thread(subprocess.run, cut, capture_output=True, check=True, text=True)
            if not num_cut:
                tasks += [asyncio.create_task(stream(client, lab, 5, one)) for one in later]
            num_cut += len(killed.stdout.splitlines())
        await asyncio.gather(*tasks)
        return seen, later, num_cut

    seen, later, num_cut = crowd(work)
    assert num_cut > 50, "they connected again and again, and were cut each time"
    assert (count(seen), count(later)) == ({"done": 20}, {"done": 30})
    assert {one.tokens for one in seen} == {1500}
    wait_until(lambda: len(lab.replicas("batched")) == len(before), "all replicas are back", limit_s=30)
    assert {one["replica"] for one in lab.replicas("batched")} == before, "the same, with the same engines"


def test_of_a_thousand_clients_that_drop_each_is_counted_once(lab: RunningLab) -> None:
    before = requests_ended(lab)

    async def work(client: aiohttp.ClientSession) -> None:
        seen = [Stream() for _ in range(1000)]
        tasks = [asyncio.create_task(stream(client, lab, 3000, one)) for one in seen]
        # Every request has reached a gateway: it runs, waits, or was refused.
        await until(
            lambda: (
                lab.get("/scheduler")["leases"] + lab.get("/scheduler")["waiting"] + count_refused(seen)
                == 1000
            ),
            "each of them is known",
            limit_s=60,
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    crowd(work)
    wait_until(lambda: at_rest(lab), "leases, queue and tokens at 0")
    wait_until(
        lambda: requests_ended(lab) - before == 1000, "a thousand ended, not one more or less", limit_s=10
    )


def count_refused(seen: list[Stream]) -> int:
    return sum(one.status is not None and one.status != 200 for one in seen)


def test_the_processes_are_what_they_seem(lab: RunningLab) -> None:
    """The tests above kill what they mean to kill."""
    roles = {role: title(role_process(lab, role)) for role in ("scheduler", "gateway")}
    assert roles == {role: f"ray::ServeReplica:tandem:{role}" for role in roles}
    replicas = [lab.process_behind(one["url"]) for one in lab.replicas("batched")]
    assert {title(one) for one in replicas} == {"ray::ServeReplica:tandem:batched"}
    assert len({one.pid for one in replicas}) == 3


def title(process: psutil.Process) -> str:
    """As Ray names it."""
    return process.cmdline()[0].split(".")[0]
