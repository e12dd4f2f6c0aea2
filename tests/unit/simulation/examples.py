"""Replicas and traces with times that a reader can work out."""

from __future__ import annotations

from serving.config import SchedulerConfig, SimulatedProfile
from serving.core.request import SchedulingRequest
from serving.simulation.lab import SimulatedLab
from serving.simulation.replica import ReplicaModel
from serving.simulation.results import SimulatedRun
from serving.simulation.traffic import Arrival, RequestClass

KIND = RequestClass("any", "a", 1, prompt_tokens=100, output_tokens=10, ttft_slo_s=1.0)


def model(max_num_seqs: int = 2, prefill_ms_per_prompt_token: float = 0.0) -> ReplicaModel:
    """First token after 25 ms, steps of 10 ms and 2 ms more for each further request."""
    profile = SimulatedProfile(ttft_ms=25, step_ms=10, step_ms_per_request=2)
    return ReplicaModel(profile, max_num_seqs, prefill_ms_per_prompt_token)


def arrival(number: int, at_s: float, output_tokens: int, kind: RequestClass = KIND) -> Arrival:
    request = SchedulingRequest(
        request_id=f"q{number}",
        lane=None,
        prompt_tokens=kind.prompt_tokens,
        max_output_tokens=100,
        tenant=kind.tenant,
        predicted_output_tokens=output_tokens,
        ttft_deadline_s=kind.ttft_slo_s,
    )
    return Arrival(at_s, kind, request, output_tokens)


def run(
    trace: list[Arrival], replica: ReplicaModel, num_replicas: int = 1, **settings: object
) -> SimulatedRun:
    return SimulatedLab(SchedulerConfig.model_validate(settings), replica, num_replicas, trace).run()
