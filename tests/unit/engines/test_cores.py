"""Which replicas say that they compute on the same."""

from __future__ import annotations

import os

import pytest

from serving.config import LaneConfig, SimulatedProfile
from serving.core.lane import Strategy
from serving.engines.cores import cores_of


def lane(**fields: object) -> LaneConfig:
    return LaneConfig.model_validate({"name": "b", "strategy": Strategy.BATCHED} | fields)


def test_engines_on_cpu_share_the_cores_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 5})
    assert cores_of(lane(), "cpu", "10.0.0.1") == "10.0.0.1 cores 0-2,5"
    assert cores_of(lane(), "cpu", "10.0.0.2") != cores_of(lane(), "cpu", "10.0.0.1")
    pinned = cores_of(lane(), "cpu", "10.0.0.1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert cores_of(lane(), "cpu", "10.0.0.1") != pinned


def test_a_whole_card_is_shared_with_nobody_and_less_with_who_sees_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert cores_of(lane(num_gpus=1), "cuda", "h") == ""
    assert cores_of(lane(tensor_parallel_size=2), "cuda", "h") == ""
    assert cores_of(lane(num_gpus=0.5), "cuda", "h") == "h cards 3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cores_of(lane(), "cuda", "h") == "h cards all"


def test_an_engine_that_only_acts_as_if_takes_nobody_s_time() -> None:
    simulated = lane(engine="simulated", simulated=SimulatedProfile().model_dump())
    assert cores_of(simulated, "none", "h") == ""
