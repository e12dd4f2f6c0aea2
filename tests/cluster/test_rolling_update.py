"""A changed config replaces what runs while clients ask on; none of them hears of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import yaml

from tests.chaos.crowd import Stream, count, crowd, kill, role_address, role_addresses, stream, until
from tests.cluster.nodes import RayCluster, ray_cluster
from tests.running_lab import RunningLab, running_lab

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 8192},
    "gateway": {"replicas": 2},
    "scheduler": {"drain_timeout_s": 90},
    "lanes": [
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "replicas": 2,
            "max_num_seqs": 16,
            "simulated": {"ttft_ms": 30, "step_ms": 10},
        }
    ],
}
USERS = 12
LONG_TOKENS = 6000  # 60 s, longer than an update and a new scheduler take
LIMIT_S = 150


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        for _ in range(2):
            started.start_worker(engines=2)  # a new replica starts while an old one drains
        yield started


@pytest.fixture
def lab(cluster: RayCluster) -> Iterator[RunningLab]:
    with running_lab(CONFIG, ("--address", cluster.address), cluster.environment) as started:
        yield started


def deploy_again(cluster: RayCluster, lab: RunningLab, change: Callable[[dict[str, Any]], None]) -> None:
    """The lab's config with a change, as `serve deploy` puts it in place of the old one."""
    path = Path(lab.environment["TANDEM_STATE"]) / "lab.yaml"
    config = yaml.safe_load(path.read_text())
    change(config)
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tests.cluster.deploy_again", cluster.address, str(path)]
    subprocess.run(command, env=lab.environment, check=True, timeout=LIMIT_S)


def test_an_update_of_the_whole_lab_loses_no_request(cluster: RayCluster, lab: RunningLab) -> None:
    before = names(lab)

    def change(config: dict[str, Any]) -> None:
        config["gateway"]["request_log"] = True

    async def work(kept: aiohttp.ClientSession) -> list[Stream]:
        users = Users(lab, kept)
        tasks = [asyncio.create_task(users.ask(index)) for index in range(USERS)]
        await asyncio.to_thread(deploy_again, cluster, lab, change)
        async with asyncio.timeout(LIMIT_S):
            while not await asyncio.to_thread(are_all_new, before, lab):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        users.must_stop = True
        await asyncio.gather(*tasks)
        return users.seen

    seen = crowd(work)
    assert count(seen) == {"done": len(seen)}
    assert len(seen) > USERS, "they asked again while it went on"


@pytest.mark.slow
def test_a_replica_that_drains_gets_nothing_from_a_scheduler_that_starts_meanwhile(
    cluster: RayCluster, lab: RunningLab
) -> None:
    def change(config: dict[str, Any]) -> None:
        config["lanes"][0]["simulated"]["step_ms"] = 9

    async def work(client: aiohttp.ClientSession) -> tuple[Stream, list[Stream]]:
        long = Stream()
        running = asyncio.create_task(stream(client, lab, LONG_TOKENS, long))
        await until(lambda: long.tokens > 0, "it has begun")
        await asyncio.to_thread(deploy_again, cluster, lab, change)
        await until(lambda: is_replaced(lab, long.replica), "two others are ready", limit_s=LIMIT_S)
        await until(lambda: len(role_addresses(lab, "scheduler")) == 1, "its old scheduler is gone", LIMIT_S)
        killed = role_address(lab, "scheduler")
        kill(lab.process_behind(killed))
        await until(lambda: hears_of_them(lab, long.replica, killed), "a new one hears of them", LIMIT_S)
        later = await asyncio.gather(*(stream(client, lab, 20, Stream()) for _ in range(40)))
        assert not running.done(), f"it drained all the while: {long}"
        assert is_replaced(lab, long.replica)
        await running
        return long, later

    long, later = crowd(work)
    assert count(later) == {"done": 40}
    assert long.replica not in {one.replica for one in later}
    assert (long.is_done, long.tokens) == (True, LONG_TOKENS), long


def names(lab: RunningLab) -> tuple[set[str], set[str]]:
    """Of the gateways, and of the replicas."""
    status = lab.get("/scheduler")
    return {str(one) for one in status["gateways"]}, {
        one["replica"] for one in status["lanes"][0]["replicas"]
    }


def are_all_new(before: tuple[set[str], set[str]], lab: RunningLab) -> bool:
    try:
        now = names(lab)
    except httpx.HTTPError:
        return False  # there is no scheduler to ask between the old one and the new
    return all(len(ours) == 2 and not ours & theirs for ours, theirs in zip(now, before, strict=True))


def is_replaced(lab: RunningLab, replica: str | None) -> bool:
    """Two gateways, or an old one more, and two ready replicas other than this one are known to a scheduler."""
    try:
        gateways, replicas = names(lab)
    except httpx.HTTPError:
        return False
    return len(gateways) >= 2 and len(replicas) == 2 and replica not in replicas


def hears_of_them(lab: RunningLab, replica: str | None, killed: str) -> bool:
    """As `is_replaced`, and the scheduler is another than the one at the address `killed`."""
    try:
        return role_address(lab, "scheduler") != killed and is_replaced(lab, replica)
    except httpx.HTTPError:
        return False


class Users:
    """Closed loops: every second one with a connection for each request, the others with one that they keep."""

    def __init__(self, lab: RunningLab, kept: aiohttp.ClientSession) -> None:
        self.seen: list[Stream] = []
        self.must_stop = False
        self._lab = lab
        self._kept = kept

    async def ask(self, index: int) -> None:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as fresh:
            while not self.must_stop:
                one = Stream()
                self.seen.append(one)
                client = fresh if index % 2 else self._kept
                await stream(client, self._lab, (5, 50, 200)[index % 3], one)
