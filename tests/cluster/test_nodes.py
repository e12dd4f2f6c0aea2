"""The lab on a Ray cluster that others started: engines on the workers, and what happens when one is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from tests.chaos.crowd import Stream, at_rest, crowd, stream, until
from tests.cluster.nodes import RayCluster, kill_node, ray_cluster
from tests.running_lab import RunningLab, free_port, running_lab, tandem, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
    "gateway": {"connect_timeout_s": 1, "first_byte_timeout_s": 2, "idle_timeout_s": 2},
    "lanes": [
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "replicas": 2,
            "max_num_seqs": 4,
            "simulated": {"ttft_ms": 30, "step_ms": 10},
        }
    ],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        started.start_worker(engines=1)
        started.start_worker(engines=1)
        yield started


@pytest.fixture(scope="module")
def lab(cluster: RayCluster) -> Iterator[RunningLab]:
    options = ("--address", cluster.address)
    with running_lab(CONFIG, options=options, environment=cluster.environment) as started:
        yield started


def nodes_with_engines(cluster: RayCluster) -> list[psutil.Popen]:
    """For each engine replica, the node whose process it is."""
    return [
        node
        for node in cluster.nodes
        if node.is_running()
        for process in node.children(recursive=True)
        if "ServeReplica:tandem:batched" in process.name() + " ".join(process.cmdline())
    ]


def test_engines_run_where_they_are_offered_a_place_and_nowhere_else(
    cluster: RayCluster, lab: RunningLab
) -> None:
    _, *workers = cluster.nodes
    assert sorted(nodes_with_engines(cluster), key=workers.index) == workers
    answer = lab.post("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_nobody_but_the_head_listens_for_clients(cluster: RayCluster, lab: RunningLab) -> None:
    port = int(lab.url.rpartition(":")[2])
    listening = [
        node
        for node in cluster.nodes
        for process in node.children(recursive=True)
        if any(
            one.laddr.port == port for one in process.net_connections() if one.status == psutil.CONN_LISTEN
        )
    ]
    assert listening == cluster.nodes[:1]


def test_a_lost_node_takes_its_own_streams_only_and_its_engine_comes_back_with_it(
    cluster: RayCluster, lab: RunningLab
) -> None:
    victim = cluster.nodes[-1]

    async def work(client: aiohttp.ClientSession) -> list[Stream]:
        seen = [Stream() for _ in range(12)]
        tasks = [asyncio.create_task(stream(client, lab, 200, one)) for one in seen]
        # Two replicas run four each; four wait in the scheduler.
        await until(lambda: sum(one.tokens > 0 for one in seen) == 8, "eight streams have begun")
        await asyncio.to_thread(kill_node, victim)
        await asyncio.gather(*tasks)
        return seen

    seen = crowd(work)
    cut = [one for one in seen if not one.is_done]
    assert 0 < len(cut) <= 4
    assert {one.error for one in cut} == {"upstream_broke"}
    assert len({one.replica for one in cut}) == 1
    assert all(one.tokens == 200 for one in seen if one.is_done)
    wait_until(lambda: len(lab.replicas("batched")) == 1, "the lost replica is gone")
    wait_until(lambda: at_rest(lab), "all counts back to 0")

    cluster.start_worker(engines=1)
    wait_until(lambda: len(lab.replicas("batched")) == 2, "both replicas again", limit_s=90)
    assert {one.is_done for one in crowd(lambda client: _eight(client, lab))} == {True}


async def _eight(client: aiohttp.ClientSession, lab: RunningLab) -> list[Stream]:
    return await asyncio.gather(*(stream(client, lab, 20, Stream()) for _ in range(8)))


def test_a_second_lab_leaves_the_first_alone(cluster: RayCluster, lab: RunningLab, tmp_path: Path) -> None:
    before = lab.replicas("batched")
    config = tmp_path / "lab.yaml"
    config.write_text(yaml.safe_dump(CONFIG | {"gateway": {"port": free_port()}}))
    environment = cluster.environment | {"TANDEM_STATE": str(tmp_path)}
    second = tandem("up", "--config", str(config), "--address", cluster.address, environment=environment)
    assert second.returncode == 1
    assert "a lab runs on the Ray cluster" in second.stderr
    assert lab.replicas("batched") == before


def test_down_stops_what_a_dead_supervisor_left_on_the_cluster(cluster: RayCluster, lab: RunningLab) -> None:
    status = json.loads(tandem("status", "--json", environment=lab.environment).stdout)
    psutil.Process(status["pid"]).kill()
    wait_until(
        lambda: tandem("status", environment=lab.environment).returncode == 3, "the supervisor is dead"
    )
    assert lab.get("/health") == {"status": "ok"}
    down = tandem("down", environment=lab.environment)
    assert down.returncode == 0, down.stderr
    assert nodes_with_engines(cluster) == []
