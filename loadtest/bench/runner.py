"""Runs stages with Locust as a library, one after another, and keeps every request as soon as it ended."""

import fcntl
import os
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.client import lab
from loadtest.client.health import HealthMonitor
from loadtest.client.record import ClientReason, RequestRecord, to_row
from loadtest.judge.slo import parse_slo
from loadtest.offer.prompt_tokens import BYTE_ESTIMATE, TokenCounter
from loadtest.run.directory import StageRun, writing
from loadtest.run.exporter import LoadExporter, ProgressCounter, ended_request
from loadtest.run.locust_stats import report_to_locust
from loadtest.run.plan import Plan, StagePlan
from loadtest.run.planning import time_left_s
from loadtest.run.stage import MAX_IN_FLIGHT, Sender, Stage, WarmUp, make_stage
from loadtest.run.stage_trace import TracedStage, tracing
from serving.progress import Say

TICK_S = 0.5
# A line each tick suits a terminal; a log gets one each five seconds.
PLAIN_LINE_EVERY_S = 5.0
FILES_BESIDE_CONNECTIONS = 256


@dataclass(slots=True)
class Stop:
    """Whether the run was stopped by hand, and the stage that must hear of it."""

    signal: int | None = None
    stage: Stage | None = None

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def set(self, number: int) -> None:
        self.signal = number
        if self.stage is not None:
            self.stage.stop(ClientReason.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """A stage that ran, and its records, warm-up included."""

    run: StageRun
    records: tuple[RequestRecord, ...]


class StageUser(User):  # type: ignore[misc]
    """A Locust user that does its part of the stage and leaves."""

    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def do_part(self) -> None:
        self.environment.stage.run_user()
        raise StopUser


class Runner:
    """Runs stages against one lab. Use it as a context: leaving it closes the file of records.

    Args:
        plan: what all stages share; its list of stages need not hold those that are run.
        run_id: salts the prompts.
        part: 1, or 2 and so on for a run that goes on after a pause; ids of requests begin with run and part.
        counter: counts the tokens of prompts.
        requests_path: records are appended here, each when its request ended; traces are written beside it.
        offset_s: where the clock of the run stands, for a run that goes on after a pause.
    """

    def __init__(
        self,
        plan: Plan,
        run_id: str,
        requests_path: Path,
        say: Say,
        stop: Stop,
        *,
        counter: TokenCounter = BYTE_ESTIMATE,
        part: int = 1,
        offset_s: float = 0.0,
    ) -> None:
        self._plan = plan
        self._slo = None if plan.slo is None else parse_slo(plan.slo)
        self._say = say
        self._stop = stop
        self._zero_s = time.perf_counter() - offset_s
        self._began_at_s = offset_s
        id_prefix = run_id if part == 1 else f"{run_id}.{part}"
        self._sender = Sender(plan, id_prefix, run_id, self.clock, counter)
        self._progress = ProgressCounter(self.clock, is_run_active=True)
        self._exporter = LoadExporter(self._progress.read)
        self._exporter.serve(say)
        self._directory = requests_path.parent
        self._requests_path = requests_path
        # Nothing is left in a buffer: a record is in the file, or is known not to be.
        self._requests = requests_path.open("ab", buffering=0)
        self._write_fault: OSError | None = None
        fcntl.flock(self._requests, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see resume.refuse_running
        # A fault of ours in a user must end the user, not send its share a second time.
        self._environment = Environment(user_classes=[StageUser], catch_exceptions=False)
        self._runner = self._environment.create_local_runner()
        self._max_in_flight = min(MAX_IN_FLIGHT, _allow_open_files(MAX_IN_FLIGHT + FILES_BESIDE_CONNECTIONS))
        self._line_every_s = TICK_S if sys.stderr.isatty() else PLAIN_LINE_EVERY_S
        self._warm_lanes: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runner.quit()
        self._progress.is_run_active = False
        self._exporter.close()
        self._requests.close()

    def clock(self) -> float:
        """Seconds since the run started."""
        return time.perf_counter() - self._zero_s

    def run_all(self, finished: Collection[str] = ()) -> Iterator[MeasuredStage]:
        """Run the plan's stages in order, but those whose key is in `finished`, until the last or until stopped."""
        todo = [stage for stage in self._plan.stages if stage.key not in finished]
        for number, stage in enumerate(todo):
            if self._stop.is_set:
                return

            def left(share: float, number: int = number) -> str:
                left_s = time_left_s(todo, number, share, self.clock() - self._began_at_s)
                return f"about {left_s:.0f} s left"

            measured = self.run_stage(stage, f"stage {number + 1} of {len(todo)}", left)
            if measured is not None:
                yield measured

    def run_stage(self, plan: StagePlan, place: str, left: Callable[[float], str]) -> MeasuredStage | None:
        """Run one stage; the first of a lane is preceded by a request that no figure counts.

        Args:
            place: the stage's place among others, for progress.
            left: what to say of the time left, given the share of the stage that is done.

        Returns:
            None when the run was stopped before the stage began.

        Raises:
            RunWriteError: a record could not be written; those of earlier stages are there.
        """
        if plan.lane not in self._warm_lanes:
            self._warm_up(plan)
            self._refuse_missing_records()
        if self._stop.is_set:
            return None
        stage = make_stage(self._sender, plan, self._keep, self._max_in_flight)
        with self._tracing(plan) as traced:
            run = self._run_stage(stage, place, left)
        self._refuse_missing_records()
        return MeasuredStage(replace(run, trace=traced.trace), tuple(stage.records))

    def _tracing(self, plan: StagePlan) -> AbstractContextManager[TracedStage]:
        if not self._plan.trace:
            return nullcontext(TracedStage())
        return tracing(plan, self._plan.base_url, self._directory)

    def _run_stage(self, stage: Stage, place: str, left: Callable[[float], str]) -> StageRun:
        plan = stage.plan
        before = lab.scrape(self._plan.base_url)
        self._environment.stage = self._stop.stage = stage
        if self._stop.is_set:  # it came during the scrape
            stage.stop(ClientReason.INTERRUPTED)
        started_at_s = self.clock()
        monitor = HealthMonitor()
        monitor.start()
        now_s = self.clock()
        self._progress.began(stage, [now_s + arrival.at_s for arrival in stage.arrivals])
        self._runner.start(stage.num_users, spawn_rate=stage.num_users)
        self._watch(stage, started_at_s, place, left)
        finished_at_s = self.clock()
        health = monitor.stop()
        self._runner.stop()
        self._progress.ended()
        self._stop.stage = None
        counted = self._environment.stats.get("E2E", plan.key)
        return StageRun(
            plan=plan,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
            is_cut=stage.stop_reason is not None,
            before=before,
            after=lab.scrape_at_rest(self._plan.base_url, plan.lane, before, _num_sent(stage.records)),
            locust_requests=counted.num_requests,
            locust_failures=counted.num_failures,
            client=health,
            stop_reason=stage.stop_reason,
            stop_detail=stage.stop_detail or None,
        )

    def _warm_up(self, plan: StagePlan) -> None:
        self._say(f"lane {plan.lane}: one request to warm up")
        before = lab.scrape(self._plan.base_url)
        warm_up = WarmUp(self._sender, plan, self._keep)
        self._stop.stage = warm_up
        warm_up.run_user()
        self._stop.stage = None
        self._warm_lanes.add(plan.lane)
        # What the gateway counts late must not fall into the stage that follows.
        lab.scrape_at_rest(self._plan.base_url, plan.lane, before, 1)

    def _watch(self, stage: Stage, started_at_s: float, place: str, left: Callable[[float], str]) -> None:
        said_at_s = float("-inf")
        while not stage.done.is_set():
            now_s = self.clock()
            if stage.stop_reason is None and now_s - started_at_s > stage.plan.max_stage_s:
                detail = f"took longer than {stage.plan.max_stage_s:g} s (max_stage_s)"
                stage.stop(ClientReason.STAGE_TIME_UP, detail)
            if stage.plan.stop_early and self._slo is not None:
                stage.judge(self._slo)
            if now_s - said_at_s >= self._line_every_s:
                said_at_s = now_s
                self._say(
                    f"{place}: {stage.plan.lane}, {stage.plan.workload}, {stage.plan.load.label}: "
                    f"{stage.progress}; {left(stage.share(now_s - started_at_s))}"
                )
            stage.done.wait(TICK_S)

    def _keep(self, record: RequestRecord) -> None:
        if self._write_fault is None:
            self._write(to_row(record).encode() + b"\n")
        self._exporter.count(ended_request(record, record.label.lane))
        if not record.label.is_warmup:
            report_to_locust(self._environment, record.label.stage, record)

    def _write(self, row: bytes) -> None:
        """Append a row, or take back what of it fitted and end the stage: without all records it has no figures."""
        size_bytes = os.fstat(self._requests.fileno()).st_size
        try:
            while row:
                row = row[self._requests.write(row) :]
        except OSError as error:
            self._write_fault = error
            os.ftruncate(self._requests.fileno(), size_bytes)
            if self._stop.stage is not None:
                self._stop.stage.stop(ClientReason.INTERRUPTED)

    def _refuse_missing_records(self) -> None:
        if self._write_fault is not None:
            with writing(self._requests_path):
                raise self._write_fault


def _num_sent(records: Collection[RequestRecord]) -> int:
    return sum(record.sent_at_s is not None for record in records)


def _allow_open_files(wanted: int) -> int:
    """Raise the limit of open files towards `wanted`; how many connections there is room for then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, soft - FILES_BESIDE_CONNECTIONS)
