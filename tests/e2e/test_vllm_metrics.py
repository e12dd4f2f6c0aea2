"""What dashboards and rules read of vLLM is exported by it, under the names that the simulated engine copies."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.config import LaneConfig, SimulatedProfile
from serving.core.lane import Strategy
from serving.engines.simulated.engine import SimulatedEngine
from serving.metrics import names as metric_names
from serving.metrics.names import VLLM_FLOPS, VLLM_READ_BYTES
from tests.running_lab import RunningLab

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

NAMES = {value for name, value in vars(metric_names).items() if name.startswith("VLLM_")}
HISTOGRAMS = {metric_names.VLLM_STEP_TOKENS}


def exported(lab: RunningLab, lane: str) -> dict[str, float]:
    """Every sample of a lane's replica by name, summed over its labels."""
    (replica,) = lab.replicas(lane)
    text = httpx.get(f"{replica['url']}/metrics", timeout=10).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def sample_names(names: set[str]) -> set[str]:
    return (names - HISTOGRAMS) | {f"{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count")}


def test_the_engine_exports_every_name_that_is_read(lab: RunningLab) -> None:
    answer = lab.post(
        "/v1/completions", {"model": f"{lab.model}:speculative", "prompt": "a b a b a b", "max_tokens": 24}
    )
    assert answer.status_code == 200
    sums = exported(lab, "speculative")
    assert sample_names(NAMES) - sums.keys() == set()
    # Estimated by vLLM from the model's shape: at least two operations for each weight and token.
    assert sums[VLLM_FLOPS] > 24 * 2 * 100e6
    assert sums[VLLM_READ_BYTES] > 100e6


def test_the_engine_s_steps_are_timed(lab: RunningLab) -> None:
    before = exported(lab, "batched")
    body = {"model": f"{lab.model}:batched", "prompt": "Once", "max_tokens": 20, "ignore_eos": True}
    assert lab.post("/v1/completions", body).status_code == 200
    after = exported(lab, "batched")
    steps = after["tandem_engine_steps_total"] - before["tandem_engine_steps_total"]
    busy_s = after["tandem_engine_busy_seconds_total"] - before["tandem_engine_busy_seconds_total"]
    assert 15 <= steps <= 21
    assert 0.001 < busy_s / steps < 5


def test_the_simulated_engine_exports_the_same_names() -> None:
    lane = LaneConfig(
        name="s", strategy=Strategy.BATCHED, engine="simulated",
        simulated=SimulatedProfile(num_speculative_tokens=2),
    )  # fmt: skip
    engine = SimulatedEngine(lane, ["sim"], 128)
    found = {sample.name for family in engine.registry.collect() for sample in family.samples}
    engine.close()
    assert sample_names(NAMES) - found == set()
