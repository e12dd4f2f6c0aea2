"""One lab of simulated engines in a real Ray Serve, shared by this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.running_lab import RunningLab, running_lab

CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
    "scheduler": {"max_waiting_requests": 20},
    "lanes": [
        {
            "name": "sequential",
            "strategy": "sequential",
            "engine": "simulated",
            "max_num_seqs": 1,
            "takes_unpinned": False,
            "simulated": {"ttft_ms": 30, "step_ms": 10},
        },
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "max_num_seqs": 4,
            "replicas": 2,
            "simulated": {"ttft_ms": 30, "step_ms": 10},
        },
        {
            "name": "speculative",
            "strategy": "speculative",
            "engine": "simulated",
            "max_num_seqs": 4,
            "takes_unpinned": False,
            "speculation": {"method": "ngram"},
            "simulated": {
                "ttft_ms": 30,
                "step_ms": 10,
                "acceptance_rate": 0.7,
                "num_speculative_tokens": 4,
            },
        },
        {
            "name": "tuned",
            "strategy": "batched",
            "engine": "simulated",
            "max_num_seqs": 4,
            "model": {"name": "other", "path": "/models/other"},
            "simulated": {"ttft_ms": 30, "step_ms": 10},
        },
    ],
}


@pytest.fixture(scope="package")
def lab() -> Iterator[RunningLab]:
    with running_lab(CONFIG) as started:
        yield started


@pytest.fixture(autouse=True)
def at_rest(lab: RunningLab) -> Iterator[None]:
    """Whatever a test does, afterwards nothing runs, nothing waits and no lease is held."""
    yield
    from tests.running_lab import wait_until

    wait_until(lambda: is_at_rest(lab.get("/scheduler")), "all counts back to 0")


def is_at_rest(status: dict[str, Any]) -> bool:
    """No lease, nobody waiting, no token outstanding."""
    replicas = [replica for lane in status["lanes"] for replica in lane["replicas"]]
    return (
        status["leases"] == 0
        and status["waiting"] == 0
        and all(replica["running"] == 0 == replica["outstanding_tokens"] for replica in replicas)
    )
