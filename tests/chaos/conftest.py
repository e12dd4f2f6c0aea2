"""A lab of simulated engines to break: three replicas, two gateways, short limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.crowd import at_rest
from tests.running_lab import RunningLab, running_lab, wait_until

REPLICAS = 3
CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
    "gateway": {"replicas": 2, "connect_timeout_s": 1, "first_byte_timeout_s": 2, "idle_timeout_s": 2},
    "scheduler": {
        "max_waiting_requests": 600,
        "max_waiting_tokens": 10_000_000,
        "breaker_failures": 2,
        "breaker_cooldown_s": 1,
        "drain_timeout_s": 10,
    },
    "lanes": [
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "replicas": REPLICAS,
            "max_num_seqs": 8,
            "simulated": {"ttft_ms": 30, "step_ms": 10, "killed_by": "poison"},
        }
    ],
}


@pytest.fixture(scope="module")
def lab() -> Iterator[RunningLab]:
    with running_lab(CONFIG) as started:
        yield started


@pytest.fixture(autouse=True)
def whole_before_and_after(lab: RunningLab) -> Iterator[None]:
    """Each test finds the lab whole and at rest, and leaves no lease behind."""
    wait_until(lambda: _is_whole(lab), "all replicas ready, breakers closed", limit_s=60)
    yield
    wait_until(lambda: at_rest(lab), "all counts back to 0", limit_s=30)


def _is_whole(lab: RunningLab) -> bool:
    replicas = lab.replicas("batched")
    return at_rest(lab) and len(replicas) == REPLICAS
