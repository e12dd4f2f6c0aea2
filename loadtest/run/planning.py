"""Plans stages: how many requests each sends, in what order they run, and how long that should take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from loadtest.offer.arrivals import schedule
from loadtest.offer.load import ClosedLoop, Load, OpenLoop, TraceReplay
from loadtest.offer.workload import load_workload
from loadtest.run.plan import DEFAULT_MAX_STAGE_S, StagePlan, schedule_seed
from serving.core.lane import Strategy

# Only for the estimate before anything has run, from a 2-core machine without AVX-512: one decoding step,
# what each further request adds to it, and what a request costs before its first token.
ASSUMED_STEP_S = 0.030
ASSUMED_STEP_PER_REQUEST_S = 0.002
ASSUMED_PREFILL_S = 0.1

# An open loop's own time box: its schedule, and this long for the answers that are still under way.
DRAIN_S = 60.0


def plan_stages(
    lanes: Sequence[tuple[str, Strategy]],
    workloads: Sequence[str],
    loads: Sequence[Load],
    *,
    output_tokens: int | None,
    seed: int,
    repeats: int = 1,
    max_stage_s: float | None = None,
    warmup_s: float = 0.0,
    stop_early: bool = False,
    first_prompt: int = 0,
) -> tuple[StagePlan, ...]:
    """Each lane through each workload under each load, as often as `repeats` says.

    Lanes take turns within each load, and the whole round is repeated: a machine that gets slower over the
    run does so for all of them. Prompts depend on load and repeat and not on the lane: lanes do the same
    work, loads and repeats do different work.

    Args:
        max_stage_s: time box of each stage; None: `DEFAULT_MAX_STAGE_S`, or an open loop's length and `DRAIN_S`.
        warmup_s: the first part of an open loop, which no figure counts.
        first_prompt: number of the first prompt; those before it belong to others.

    Raises:
        ValueError: a load does not fit its time box, or is over before its warm-up is.
    """
    stages: list[StagePlan] = []
    for repeat in range(repeats):
        for load in loads:
            now = [
                replace(
                    plan_closed(lane, strategy, workload, load, output_tokens, max_stage_s)
                    if isinstance(load, ClosedLoop)
                    else plan_open(lane, workload, load, output_tokens, seed, repeat, max_stage_s, warmup_s),
                    first_prompt=first_prompt,
                    repeat=repeat,
                    stop_early=stop_early,
                )
                for workload in workloads
                for lane, strategy in lanes
            ]
            stages += now
            first_prompt = max(stage.prompts_end for stage in now)
    return tuple(stages)


def plan_closed(
    lane: str,
    strategy: Strategy,
    workload: str,
    load: ClosedLoop,
    output_tokens: int | None,
    max_stage_s: float | None = None,
) -> StagePlan:
    """A stage of users; their number says how many requests it has."""
    requests = num_requests(strategy, load.users)
    num_rounds = math.ceil(requests / load.users) + 1  # the first is before what counts
    return StagePlan(
        lane,
        workload,
        load,
        requests,
        max_stage_s=max_stage_s or DEFAULT_MAX_STAGE_S,
        estimated_s=load.think_time_s * num_rounds
        + estimate_s(
            strategy,
            load.users,
            requests + load.users + 1,  # those under way when the last that counts ends are about one round
            output_tokens or load_workload(workload).output_tokens,
        ),
    )


def plan_open(
    lane: str,
    workload: str,
    load: OpenLoop | TraceReplay,
    output_tokens: int | None,
    seed: int,
    repeat: int = 0,
    max_stage_s: float | None = None,
    warmup_s: float = 0.0,
) -> StagePlan:
    """A stage of arrivals: all that the schedule of this seed and repeat holds.

    Raises:
        ValueError: it does not fit its time box, or is over before its warm-up is.
    """
    stage = StagePlan(lane, workload, load, requests=1, repeat=repeat)
    arrivals = schedule(load, schedule_seed(stage, seed))
    warmup_requests = sum(arrival.at_s < warmup_s for arrival in arrivals)
    if warmup_requests == len(arrivals):
        raise ValueError(
            f"stage {stage.key}: none of its {len(arrivals)} requests comes after warmup_s={warmup_s:g}"
        )
    length_s = load.duration_s if isinstance(load, OpenLoop) else arrivals[-1].at_s
    if max_stage_s is not None and max_stage_s < length_s:
        raise ValueError(f"stage {stage.key}: takes {length_s:g} s, more than max_stage_s={max_stage_s:g}")
    return replace(
        stage,
        requests=len(arrivals) - warmup_requests,
        warmup_requests=warmup_requests,
        max_stage_s=max_stage_s or length_s + DRAIN_S,
        estimated_s=length_s
        + estimate_s(Strategy.BATCHED, 1, 1, output_tokens or load_workload(workload).output_tokens),
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
