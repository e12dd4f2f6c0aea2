"""A stage: its lane warmed up, laid out, offered and judged meanwhile, collected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import gevent

from loadtest.analysis.stage_summary import Repeat, make_repeat
from loadtest.bench.crowd import Crowd, crowd
from loadtest.bench.workbench import TICK_S, Workbench
from loadtest.client import lab
from loadtest.client.health import ClientHealth, HealthMonitor
from loadtest.client.lab import Scrape
from loadtest.client.record import ClientReason, RequestRecord
from loadtest.run.directory import StageRun
from loadtest.run.plan import StagePlan
from loadtest.run.planning import time_left_s
from loadtest.run.stage_trace import TracedStage, tracing_steps
from loadtest.run.traffic import Traffic, WarmUp, make_traffic
from serving.core.latency import e2e_latency_s

MAX_COMING_S = 30.0  # of the users of a closed loop
# A lane that did nothing for longer may have lost its place in caches, and pages of its code and weights in memory.
MAX_IDLE_S = 5.0
WAKING_TOKENS = 2


@dataclass(frozen=True, slots=True)
class StagePlace:
    """A stage's place in its run, for progress.

    Attributes:
        name: such as `stage 2 of 8`.
        time_left: what to say of the time left, given the share of the stage that is done.
    """

    name: str
    time_left: Callable[[float], str]


def run_stages(bench: Workbench, stages: Collection[StagePlan]) -> Iterator[Repeat]:
    """Run stages one after another, until the last or until stopped.

    Raises:
        RunWriteError: as `run_stage`.
    """
    todo, began_at_s = list(stages), bench.clock()
    for number, stage in enumerate(todo):

        def time_left(share: float, number: int = number) -> str:
            left_s = time_left_s(todo, number, share, bench.clock() - began_at_s)
            return f"about {left_s:.0f} s left"

        measured = run_stage(bench, stage, StagePlace(f"stage {number + 1} of {len(todo)}", time_left))
        if measured is None:
            return
        yield measured


def run_stage(bench: Workbench, plan: StagePlan, place: StagePlace) -> Repeat | None:
    """Run one stage; what came of it is judged by `analysis.stage_summary`.

    Returns:
        None when the run was stopped before the stage began.

    Raises:
        ValueError: the plan asks for more requests than its schedule holds.
        RunWriteError: a record could not be written; those of earlier stages are there.
    """
    base_url = bench.plan.base_url
    if bench.stop.is_set:
        return None
    with crowd() as users:
        warm_up(bench, plan)
        traffic = lay_out(bench, plan, users)
        if bench.stop.is_set:
            return None
        with step_recording(bench, plan) as traced:
            before = lab.scrape(base_url)
            offered = offer(bench, traffic, users, place)
            after = lab.scrape_at_rest(base_url, plan.lane, before, num_sent(traffic.records))
        bench.used_until_s[plan.lane] = bench.clock()
        bench.records.refuse_missing()
        stage = collect(traffic, offered, users, before, after)
        return make_repeat(replace(stage, trace=traced.trace), traffic.records)


@dataclass(frozen=True, slots=True)
class Offered:
    """When a stage's traffic was on, by the clock of the run, and how the client fared meanwhile."""

    started_at_s: float
    finished_at_s: float
    client: ClientHealth


def lay_out(bench: Workbench, plan: StagePlan, users: Crowd) -> Traffic:
    """The stage's traffic, ready to start: its schedule is known, its prompts can be made at once."""

    def keep(record: RequestRecord) -> None:
        bench.keep(record)
        if record.label.counts:
            users.count(record)

    return make_traffic(
        bench.sender,
        plan,
        keep,
        bench.max_in_flight,
        come_within_s=min(MAX_COMING_S, bench.warm_up_s[plan.lane]),
    )


def warm_up(bench: Workbench, plan: StagePlan) -> None:
    """Before a lane's first stage, and before a later one when the lane has been idle: one request that no figure
    counts.

    Raises:
        RunWriteError: its record could not be written.
    """
    is_first = plan.lane not in bench.warm_up_s
    now_s = bench.clock()
    idle_s = now_s - bench.used_until_s.get(plan.lane, now_s)
    if not is_first and idle_s <= MAX_IDLE_S:
        return
    why = "" if is_first else f", idle for {idle_s:.0f} s"
    bench.say(f"lane {plan.lane}{why}: one request to warm up")
    before = lab.scrape(bench.plan.base_url)
    traffic = WarmUp(bench.sender, plan, bench.keep, None if is_first else WAKING_TOKENS)
    box = gevent.spawn_later(plan.max_stage_s, traffic.stop, ClientReason.STAGE_TIME_UP)
    try:
        with bench.stop.heard_by(traffic):
            traffic.run_user()
    finally:
        box.kill()
    if is_first:
        bench.warm_up_s[plan.lane] = sum(e2e_latency_s(record.timeline) for record in traffic.records)
    # What the gateway counts late must not fall into the stage that follows.
    lab.scrape_at_rest(bench.plan.base_url, plan.lane, before, num_sent(traffic.records))
    bench.records.refuse_missing()


def step_recording(bench: Workbench, plan: StagePlan) -> AbstractContextManager[TracedStage]:
    """A recording of the lane's engine steps during the block, where the plan asks for it."""
    if not bench.plan.trace:
        return nullcontext(TracedStage())
    return tracing_steps(plan, bench.plan.base_url, bench.directory)


def offer(bench: Workbench, traffic: Traffic, users: Crowd, place: StagePlace) -> Offered:
    """Let the users send, until the last answer is there or the stage is stopped."""
    with bench.stop.heard_by(traffic):
        started_at_s = bench.clock()
        monitor = HealthMonitor()
        monitor.start()
        now_s = bench.clock()
        bench.live.began(traffic, [now_s + arrival.at_s for arrival in traffic.arrivals])
        users.start(traffic.num_users, traffic.run_user)
        watch(bench, traffic, started_at_s, place)
        finished_at_s = bench.clock()
        client = monitor.stop()
        users.stop()
        bench.live.ended()
    return Offered(started_at_s, finished_at_s, client)


def watch(bench: Workbench, traffic: Traffic, started_at_s: float, place: StagePlace) -> None:
    """Until the traffic is over: say how far it is, and stop it when its time is up or its objective is lost."""
    plan, said_at_s = traffic.plan, float("-inf")
    while not traffic.done.is_set():
        now_s = bench.clock()
        if traffic.stop_reason is None and now_s - started_at_s > plan.max_stage_s:
            detail = f"took longer than {plan.max_stage_s:g} s (max_stage_s)"
            traffic.stop(ClientReason.STAGE_TIME_UP, detail)
        if plan.stop_early and bench.slo is not None:
            traffic.judge(bench.slo)
        if now_s - said_at_s >= bench.line_every_s:
            said_at_s = now_s
            time_left = place.time_left(traffic.share(now_s - started_at_s))
            bench.say(
                f"{place.name}: {plan.lane}, {plan.workload}, {plan.load.label}: {traffic.progress}; {time_left}"
            )
        traffic.done.wait(TICK_S)


def collect(traffic: Traffic, offered: Offered, users: Crowd, before: Scrape, after: Scrape) -> StageRun:
    """What is kept of the stage beside its records."""
    requests, failures = users.counted(traffic.plan.key)
    return StageRun(
        plan=traffic.plan,
        started_at_s=offered.started_at_s,
        finished_at_s=offered.finished_at_s,
        is_cut=traffic.stop_reason is not None,
        before=before,
        after=after,
        locust_requests=requests,
        locust_failures=failures,
        client=offered.client,
        stop_reason=traffic.stop_reason,
        stop_detail=traffic.stop_detail or None,
    )


def num_sent(records: Iterable[RequestRecord]) -> int:
    """Requests that reached the lab."""
    return sum(record.sent_at_s is not None for record in records)
