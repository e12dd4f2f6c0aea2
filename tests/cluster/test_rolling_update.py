"""A changed config replaces scheduler, lanes and gateways while clients ask on; none of them hears of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import yaml

from tests.chaos.crowd import Stream, count, crowd, stream
from tests.cluster.nodes import ray_cluster
from tests.running_lab import RunningLab, running_lab

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
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
LIMIT_S = 150


def test_an_update_of_the_whole_lab_loses_no_request() -> None:
    with ray_cluster() as cluster:
        for _ in range(2):
            cluster.start_worker(engines=1)
        options = ("--address", cluster.address)
        with running_lab(CONFIG, options=options, environment=cluster.environment) as lab:
            path = Path(lab.environment["TANDEM_STATE"]) / "lab.yaml"
            config = yaml.safe_load(path.read_text())
            config["gateway"]["request_log"] = True
            path.write_text(yaml.safe_dump(config))
            before = names(lab)

            async def work(kept: aiohttp.ClientSession) -> list[Stream]:
                update = [sys.executable, "-m", "tests.cluster.deploy_again", cluster.address, str(path)]
                users = Users(lab, kept)
                tasks = [asyncio.create_task(users.ask(index)) for index in range(USERS)]
                await asyncio.to_thread(subprocess.run, update, env=lab.environment, check=True)
                async with asyncio.timeout(LIMIT_S):
                    while not await asyncio.to_thread(are_all_new, before, lab):  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                users.must_stop = True
                await asyncio.gather(*tasks)
                return users.seen

            seen = crowd(work)
    assert count(seen) == {"done": len(seen)}
    assert len(seen) > USERS, "they asked again while it went on"


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
