"""Decisions per second of the scheduler's pure core, on one core of this machine."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from serving.config import SchedulerConfig
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import LinearStepTime
from serving.scheduler.core import SchedulerCore
from serving.scheduler.lane_costs import LaneCost

SLOTS_PER_REPLICA = 4
NUM_TENANTS = 20
NUM_BANDS = 3
NO_BOUND = 1_000_000_000
ARRIVAL_GAP_S = 0.001  # of virtual time


@dataclass(frozen=True, slots=True)
class CoreRate:
    """One measurement. A decision is a release, a submission and the dispatch of whoever is next.

    Attributes:
        cpu_s: processor time of the measuring thread. Rates are over it: what others do on a shared machine is
            no matter of this code.
        elapsed_s: by the wall clock.
    """

    order: str
    placement: str
    num_replicas: int
    num_waiting: int
    decisions: int
    cpu_s: float
    elapsed_s: float

    @property
    def decisions_per_s(self) -> float:
        """Of processor time."""
        return self.decisions / self.cpu_s


def measure_core(
    order: str,
    placement: str,
    num_replicas: int,
    *,
    num_waiting: int,
    max_decisions: int,
    limit_s: float,
    seed: int,
) -> CoreRate:
    """Decide at a standing queue of `num_waiting`, `max_decisions` times or for `limit_s`, whichever is less."""
    config = SchedulerConfig.model_validate(
        {
            "order": order,
            "placement": placement,
            "profile": "none is read" if placement == "adaptive" else None,
            "seed": seed,
            "max_waiting_requests": 1_000_000,
            "max_waiting_tokens": NO_BOUND,
            "max_queue_wait_s": 3600,
        }
    )
    rng = random.Random(seed)
    requests = _requests(rng)
    num_slots = num_replicas * SLOTS_PER_REPLICA
    core = SchedulerCore(
        config, lane_costs={"batched": LaneCost(CostModel(LinearStepTime(0.01, 0.001, 1e-6)))}
    )
    core.replica_ready(_replica(0))
    for _ in range(num_slots + num_waiting):
        _must_wait(core, next(requests), 0.0)
    for number in range(1, num_replicas):
        core.replica_ready(_replica(number))
    running = [grant.lease.request_id for grant in core.dispatch(0.0)]
    fresh = [next(requests) for _ in range(max_decisions)]
    end = RequestEnd(ReplicaVerdict.HEALTHY, first_token_s=0.1, output_tokens=100)
    started_at_s, cpu_started_at_s = time.perf_counter(), time.thread_time()
    decisions = 0
    elapsed_s = 0.0
    while decisions < max_decisions and elapsed_s < limit_s:
        now_s = decisions * ARRIVAL_GAP_S
        place = rng.randrange(num_slots)
        core.release(running[place], now_s, end)
        _must_wait(core, fresh[decisions], now_s)
        (grant,) = core.dispatch(now_s)
        running[place] = grant.lease.request_id
        decisions += 1
        elapsed_s = time.perf_counter() - started_at_s
    cpu_s = time.thread_time() - cpu_started_at_s
    if core.num_waiting != num_waiting:
        raise RuntimeError(
            f"{core.num_waiting} requests wait at the end; the queue should stand at {num_waiting}"
        )
    return CoreRate(order, placement, num_replicas, num_waiting, decisions, cpu_s, elapsed_s)


def _must_wait(core: SchedulerCore, request: SchedulingRequest, now_s: float) -> None:
    if refusal := core.submit(request, now_s):
        raise RuntimeError(f"the measurement wants no refusals: {refusal.message}")


def _replica(number: int) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"r{number}",
        lane="batched",
        strategy=Strategy.BATCHED,
        url=f"http://r{number}.invalid",
        max_running=SLOTS_PER_REPLICA,
        takes_unpinned=True,
    )


def _requests(rng: random.Random) -> Iterator[SchedulingRequest]:
    """Requests of many tenants and all bands, with deadlines far away and one of a few prompt prefixes."""
    number = 0
    while True:
        prefix = 1000 * rng.randrange(50)
        yield SchedulingRequest(
            request_id=f"q{number}",
            lane=None,
            prompt_tokens=rng.randint(10, 500),
            max_output_tokens=500,
            tenant=f"t{rng.randrange(NUM_TENANTS)}",
            band=rng.randrange(NUM_BANDS),
            ttft_deadline_s=1000 + 1000 * rng.random(),
            predicted_output_tokens=rng.randint(1, 500),
            prefix_blocks=tuple(range(prefix, prefix + 4)),
        )
        number += 1
