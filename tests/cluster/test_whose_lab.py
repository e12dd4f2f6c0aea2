"""On a cluster that others use: a run takes down its own lab, all of it, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from serving.lab import state as lab_state
from serving.lab.state import LabPhase, LabState
from tests.cluster.nodes import RayCluster, ray_cluster
from tests.running_lab import RunningLab, free_port, running_lab, tandem, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
    "lanes": [
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "max_num_seqs": 4,
            "simulated": {"ttft_ms": 30, "step_ms": 10},
        }
    ],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as started:
        started.start_worker(engines=4)
        yield started


def others(cluster: RayCluster, *words: str) -> Any:
    """What somebody else does there, or sees."""
    command = [sys.executable, "-m", "tests.cluster.serve_verbs", cluster.address, *words]
    done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout or "null")


class User:
    """Somebody with a state directory and a config of his own."""

    def __init__(self, cluster: RayCluster, directory: Path) -> None:
        directory.mkdir()
        self.environment = cluster.environment | {"TANDEM_STATE": str(directory)}
        self.state_dir = directory
        self.port = free_port()
        self.config = directory / "lab.yaml"
        self.config.write_text(yaml.safe_dump(CONFIG | {"gateway": {"port": self.port}}))
        self._address = cluster.address

    def up(self) -> subprocess.CompletedProcess[str]:
        options = ("--detach", "--config", str(self.config), "--address", self._address)
        return tandem("up", *options, "--timeout-s", "100", environment=self.environment)

    def down(self) -> subprocess.CompletedProcess[str]:
        return tandem("down", environment=self.environment)

    def kill_supervisor(self) -> None:
        state = lab_state.read(self.state_dir)
        assert state is not None
        psutil.Process(state.pid).kill()
        wait_until(lambda: not state.is_alive, "the supervisor is dead")

    @property
    def log(self) -> str:
        return lab_state.log_path(self.state_dir).read_text()

    @property
    def is_served(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=10).is_success
        except httpx.HTTPError:
            return False


@pytest.fixture
def user(cluster: RayCluster, tmp_path: Path) -> Iterator[Callable[[str], User]]:
    """Makes users by their names; after the test none of them has a lab."""
    made: list[User] = []

    def make(name: str) -> User:
        made.append(User(cluster, tmp_path / name))
        return made[-1]

    yield make
    for one in made:
        one.down()
    others(cluster, "shutdown")


@contextmanager
def stopped_start(cluster: RayCluster, user: User, moment: str) -> Iterator[subprocess.Popen[str]]:
    """A start that waits at that moment; on leaving it is stopped, unless it has ended before."""
    command = [sys.executable, "-m", "tests.cluster.stopped_start", cluster.address, str(user.config), moment]
    with subprocess.Popen(
        command, env=user.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{moment}\n"
        yield process
        if process.poll() is None:
            process.communicate("\n", timeout=120)
            assert process.returncode == 0


@pytest.fixture
def lab(cluster: RayCluster) -> Iterator[RunningLab]:
    options = ("--address", cluster.address)
    with running_lab(CONFIG, options=options, environment=cluster.environment) as started:
        yield started


def test_of_two_starts_at_once_one_passes_and_goes_down_whole(
    cluster: RayCluster, user: Callable[[str], User]
) -> None:
    users = [user(name) for name in "ab"]
    with ThreadPoolExecutor() as pool:
        starts = list(pool.map(User.up, users))
    codes = [start.returncode for start in starts]
    assert sorted(codes) == [0, 1], [start.stderr for start in starts]
    winner, loser = users[codes.index(0)], users[codes.index(1)]
    refusal = starts[codes.index(1)].stderr
    assert f"is being started or stopped on the Ray cluster at {cluster.address}" in refusal or (
        f"a lab runs on the Ray cluster at {cluster.address}" in refusal
    )
    wait_until(lambda: winner.is_served, "the lab that passed serves")
    assert "no lab is running" in loser.down().stderr
    assert winner.is_served
    assert winner.down().returncode == 0
    assert others(cluster, "show") is None, "Serve was there for this lab only"


def test_anothers_lab_is_left_by_a_start_that_is_stopped_and_by_down_after_a_dead_supervisor(
    cluster: RayCluster, lab: RunningLab, user: Callable[[str], User]
) -> None:
    wait_until(lambda: len(lab.replicas("batched")) == 1, "the replica is there")
    before = replica(lab)
    with stopped_start(cluster, user("b"), "joined"):
        pass
    assert replica(lab) == before

    other = user("c")
    ports = (other.port,)
    dead = LabState(
        0, 0, "f" * 32, "c", "u", "127.0.0.1", ports, None, LabPhase.READY, "", 0.0, cluster.address
    )
    lab_state.write(other.state_dir, dead)
    down = other.down()
    assert down.returncode == 0, down.stderr
    assert f"this run's lab is not on the Ray cluster at {cluster.address} any more" in down.stderr
    assert replica(lab) == before


def replica(lab: RunningLab) -> str:
    (one,) = lab.replicas("batched")
    return str(one["replica"])


def test_a_start_has_its_turn_alone_and_dead_it_stands_in_nobodys_way(
    cluster: RayCluster, user: Callable[[str], User]
) -> None:
    first, second = user("a"), user("b")
    with stopped_start(cluster, first, "claimed") as start:
        refused = second.up()
        assert refused.returncode == 1
        assert (
            f"is being started or stopped on the Ray cluster at {cluster.address} (--address)"
            in refused.stderr
        )
        start.kill()
        start.wait()
    assert second.up().returncode == 0
    assert f"taking over the Ray cluster at {cluster.address} from run " in second.log
    wait_until(lambda: second.is_served, "the second serves")
    assert second.down().returncode == 0
    assert others(cluster, "show") is None


def test_a_start_that_is_stopped_before_it_deployed_leaves_what_others_have_deployed(
    cluster: RayCluster, user: Callable[[str], User]
) -> None:
    with stopped_start(cluster, user("a"), "claimed"):
        others(cluster, "run", "tandem")
    assert others(cluster, "show") == ["tandem"]


def test_after_serve_shutdown_the_next_lab_is_nobodys_but_its_own_runs(
    cluster: RayCluster, user: Callable[[str], User]
) -> None:
    first, second, third = (user(name) for name in "abc")
    assert first.up().returncode == 0
    others(cluster, "shutdown")
    assert second.up().returncode == 0
    assert f"taking over the Ray cluster at {cluster.address} from run " in second.log
    wait_until(lambda: second.is_served, "the second serves")
    assert first.down().returncode == 0  # its supervisor lives and is asked to stop
    assert second.is_served
    second.kill_supervisor()
    assert second.is_served
    refused = third.up()
    assert "a lab runs on the Ray cluster" in refused.stderr
    assert second.is_served
    others(cluster, "shutdown")
    others(cluster, "run", "tandem")
    assert "this run's lab is not on the Ray cluster" in second.down().stderr
    assert others(cluster, "show") == ["tandem"]


def test_what_others_have_in_serve_stays_and_so_does_a_serve_of_theirs(
    cluster: RayCluster, user: Callable[[str], User]
) -> None:
    ours = user("a")
    assert ours.up().returncode == 0
    others(cluster, "run", "other")
    assert ours.down().returncode == 0
    assert others(cluster, "show") == ["other"]
    others(cluster, "shutdown")
    others(cluster, "start")
    assert ours.up().returncode == 0
    assert ours.down().returncode == 0
    assert others(cluster, "show") == []
