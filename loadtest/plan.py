"""What a load run will do: its stages, written down before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from loadtest.load import ClosedLoop, Load
from loadtest.workload import load_workload
from serving.core.lane import Strategy

# Only for the estimate before anything has run, from a 2-core machine without AVX-512: one decoding step,
# what each further request adds to it, and what a request costs before its first token.
ASSUMED_STEP_S = 0.030
ASSUMED_STEP_PER_REQUEST_S = 0.002
ASSUMED_PREFILL_S = 0.1

DEFAULT_MAX_STAGE_S = 180.0


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One lane under one workload and one load.

    Attributes:
        load: users in a closed loop, arrivals at a rate, or a trace.
        requests: how many are sent in all; in a closed loop at least one for each user.
        first_prompt: number of the first prompt; the stage uses `requests` prompts from there on.
        max_stage_s: time box; a stage that reaches it is cut and marked.
        estimated_s: how long it should take.
        repeat: 0 for the first time this stage runs, 1 for the second, and so on.
    """

    lane: str
    workload: str
    load: Load
    requests: int
    first_prompt: int = 0
    max_stage_s: float = DEFAULT_MAX_STAGE_S
    estimated_s: float = 10.0
    repeat: int = 0

    def __post_init__(self) -> None:
        load_workload(self.workload)
        fewest = self.load.users if isinstance(self.load, ClosedLoop) else 1
        if self.requests < fewest:
            raise ValueError(
                f"stage {self.key}: requests={self.requests} is below {fewest}: some users would send nothing"
            )
        if self.first_prompt < 0:
            raise ValueError(f"stage {self.key}: first_prompt={self.first_prompt} must be at least 0")
        if self.max_stage_s <= 0:
            raise ValueError(f"stage {self.key}: max_stage_s={self.max_stage_s} must be above 0")

    @property
    def group(self) -> str:
        """What the repeats of one stage share."""
        return f"{self.lane}/{self.workload}/{self.load.label}"

    @property
    def key(self) -> str:
        return self.group + (f"/repeat {self.repeat + 1}" if self.repeat else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole load run: stages in the order they run, one after another."""

    base_url: str
    model: str
    stages: tuple[StagePlan, ...]
    name: str = "bench"
    seed: int = 0
    output_tokens: int = 48
    connect_timeout_s: float = 5
    idle_timeout_s: float = 300

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("the plan has no stages")
        if self.output_tokens < 2:
            raise ValueError(f"output_tokens={self.output_tokens} must be at least 2: one token has no TPOT")
        keys = [stage.key for stage in self.stages]
        if doubled := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"stage {doubled[0]} is planned twice")

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in the order they first run."""
        return tuple(dict.fromkeys(stage.lane for stage in self.stages))

    @property
    def num_requests(self) -> int:
        """Requests of all stages, warm-up left out."""
        return sum(stage.requests for stage in self.stages)

    @property
    def estimated_s(self) -> float:
        return sum(stage.estimated_s for stage in self.stages)


_ADAPTER = TypeAdapter(Plan)


def read_plan(path: Path) -> Plan:
    """Read a plan written by hand or by `write_plan`.

    Raises:
        ValueError: with the file, the field and the fault.
    """
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ValueError(f"{path}: {'; '.join(faults)}") from None


def write_plan(plan: Plan, path: Path) -> None:
    path.write_bytes(_ADAPTER.dump_json(plan, indent=1) + b"\n")


def plan_stages(
    lanes: Sequence[tuple[str, Strategy]],
    workloads: Sequence[str],
    levels: Sequence[int],
    output_tokens: int,
    max_stage_s: float = DEFAULT_MAX_STAGE_S,
) -> tuple[StagePlan, ...]:
    """Each lane through each workload at each level of concurrency, lane by lane.

    Prompts depend on the level and not on the lane: lanes do the same work, levels do different work.
    """
    first_prompts = {}
    used = 0
    for level in levels:
        first_prompts[level] = used
        used += num_requests(Strategy.BATCHED, level)
    return tuple(
        StagePlan(
            lane=lane,
            workload=workload,
            load=ClosedLoop(level),
            requests=num_requests(strategy, level),
            first_prompt=first_prompts[level],
            max_stage_s=max_stage_s,
            estimated_s=estimate_s(strategy, level, num_requests(strategy, level), output_tokens),
        )
        for lane, strategy in lanes
        for workload in workloads
        for level in levels
    )


def num_requests(strategy: Strategy, concurrency: int) -> int:
    """Requests of a stage: enough for a median, few enough for a coffee break.

    4 at concurrency 1, 12 at 4, then two for each user. A sequential lane takes as long for 8 requests
    whatever the concurrency, so it gets 8, or one for each user where there are more.
    """
    if strategy is Strategy.SEQUENTIAL:
        return concurrency * min(4, max(1, 8 // concurrency))
    return concurrency * min(4, max(2, math.ceil(12 / concurrency)))


def estimate_s(strategy: Strategy, concurrency: int, requests: int, output_tokens: int) -> float:
    """How long a stage should take, in seconds, before anything is known of this machine."""
    running = 1 if strategy is Strategy.SEQUENTIAL else concurrency
    step_s = ASSUMED_STEP_S + ASSUMED_STEP_PER_REQUEST_S * (running - 1)
    return math.ceil(requests / running) * (ASSUMED_PREFILL_S * running + output_tokens * step_s)


def time_left_s(stages: Sequence[StagePlan], current: int, share: float, elapsed_s: float) -> float:
    """How long the rest of a run should take, in seconds, from the pace of what ran so far.

    Args:
        current: index of the running stage.
        share: how much of it is done, 0 to 1.
        elapsed_s: since the start of the run.
    """
    done_s = sum(stage.estimated_s for stage in stages[:current]) + share * stages[current].estimated_s
    total_s = sum(stage.estimated_s for stage in stages)
    # Too little has run to know the pace: the plan's own estimate is the better guess.
    pace = elapsed_s / done_s if done_s > 0.05 * total_s else 1.0
    return pace * (total_s - done_s)
