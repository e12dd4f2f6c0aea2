"""A simulated lab under load, and a real Prometheus that scrapes it; shared by this folder's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.observability.prometheus_process import Prometheus, running_prometheus
from tests.running_lab import RunningLab, free_port, running_lab, wait_until

REPLICAS = 2
LANES = ("sequential", "batched", "speculative")
NUM_TARGETS = 1 + 2 + len(LANES) * REPLICAS + 1  # scheduler, gateways, replicas, Ray's agent
# A third of the seconds for each lane.
LOAD = ("--workloads", "copy", "--load", "constant:8/s,8s", "--output-tokens", "24", "--no-ceiling")

CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
    "gateway": {"replicas": 2},
    "scheduler": {"max_waiting_requests": 8, "order": "priority", "tenants": [{"name": "gold"}]},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
    "lanes": [
        {
            "name": "sequential",
            "strategy": "sequential",
            "engine": "simulated",
            "replicas": REPLICAS,
            "max_num_seqs": 1,
            "takes_unpinned": False,
            "simulated": {"ttft_ms": 30, "step_ms": 8},
        },
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "replicas": REPLICAS,
            "max_num_seqs": 4,
            "simulated": {"ttft_ms": 30, "step_ms": 10, "step_ms_per_request": 1},
        },
        {
            "name": "speculative",
            "strategy": "speculative",
            "engine": "simulated",
            "replicas": REPLICAS,
            "max_num_seqs": 4,
            "takes_unpinned": False,
            "speculation": {"method": "ngram"},
            "simulated": {
                "ttft_ms": 30,
                "step_ms": 12,
                "step_ms_per_request": 1,
                "acceptance_rate": 0.7,
                "num_speculative_tokens": 4,
            },
        },
    ],
}


@dataclass(frozen=True)
class Watched:
    """A lab whose load is over, and the Prometheus that saw it.

    Attributes:
        start_s, end_s: the load run, in seconds since the epoch.
        targets: those of job `tandem` while the load was on.
    """

    lab: RunningLab
    prometheus: Prometheus
    start_s: float
    end_s: float
    targets: list[dict[str, Any]]

    def one_of_each(self) -> dict[str, str]:
        """One value for each variable that can be at All; the lane is one that every panel has data of."""
        lane = "speculative"
        replicas: list[str] = self.prometheus.ask("label/replica/values")
        replica = next(replica for replica in replicas if replica.startswith(f"{lane}-"))
        return {"lane": lane, "replica": replica, "tenant": "gold", "workload": "copy"}


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory, load_port = tmp_path_factory.mktemp("prometheus"), free_port()
    with (
        running_lab(CONFIG) as lab,
        running_prometheus(lab.url, load_port, directory) as prometheus,
    ):
        wait_until(lambda: _num_up(prometheus) == NUM_TARGETS, "every target is up", limit_s=60)
        start_s = time.time()
        with _bench(lab, load_port, directory) as bench:
            try:
                crowd(lab)
                targets = prometheus.targets("tandem")
                output, _ = bench.communicate(timeout=120)
            finally:
                bench.kill()
        assert bench.returncode in (0, 5), output  # 5: INVALID, as on busy cores
        end_s = time.time()
        yield Watched(lab, prometheus, start_s, end_s, targets)


def _num_up(prometheus: Prometheus) -> int:
    return sum(target["health"] == "up" for target in prometheus.targets("tandem"))


def _bench(lab: RunningLab, load_port: int, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "loadtest.bench", "--base-url", lab.url, *LOAD),
            *("--runs-dir", str(directory / "runs")),
        ],
        env=os.environ | {"TANDEM_LOAD_METRICS_PORT": str(load_port)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def crowd(lab: RunningLab) -> None:
    """More requests at once than may run and wait, from several tenants and bands: some wait, some are refused."""

    def ask(number: int) -> int:
        tenant = ("gold", "free")[number % 2]
        headers = {"x-tandem-tenant": tenant, "x-tandem-priority": ("high", "normal", "low")[number % 3]}
        body = {"model": "sim", "prompt": "a b c", "max_tokens": 200, "stream": True}
        return lab.post("/v1/completions", body, headers=headers).status_code

    with ThreadPoolExecutor(40) as threads:
        statuses = list(threads.map(ask, range(40)))
    assert {200, 429} <= set(statuses), Counter(statuses)
