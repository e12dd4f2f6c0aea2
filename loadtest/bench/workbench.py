"""What all stages of a run share, opened before the first and closed after the last."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client.record import ClientReason, RequestRecord
from loadtest.judge.slo import Slo, parse_slo
from loadtest.offer.prompt_tokens import TokenCounter
from loadtest.run.directory import REQUESTS_FILE, RunInfo
from loadtest.run.exporter import LoadExporter, ProgressCounter, ended_request
from loadtest.run.plan import Plan
from loadtest.run.record_file import RecordFile, open_records
from loadtest.run.sender import Clock, Sender
from loadtest.run.traffic import MAX_IN_FLIGHT, Traffic
from serving.progress import Say

TICK_S = 0.5
# A line each tick suits a terminal; a log gets one each five seconds.
PLAIN_LINE_EVERY_S = 5.0
FILES_BESIDE_CONNECTIONS = 256


@dataclass(slots=True)
class Stop:
    """Whether the run was stopped by hand, and the traffic that must hear of it."""

    signal: int | None = None
    _traffic: Traffic | None = None

    @property
    def is_set(self) -> bool:
        return self.signal is not None

    def set(self, number: int) -> None:
        self.signal = number
        self.interrupt()

    def interrupt(self) -> None:
        """End the traffic that is on."""
        if self._traffic is not None:
            self._traffic.stop(ClientReason.INTERRUPTED)

    @contextmanager
    def heard_by(self, traffic: Traffic) -> Iterator[None]:
        """The traffic is on during the block."""
        self._traffic = traffic
        if self.is_set:
            self.interrupt()
        try:
            yield
        finally:
            self._traffic = None


@dataclass(frozen=True, slots=True)
class Workbench:
    """The tools of a run, ready to use. `open_workbench` makes one.

    Attributes:
        plan: what all stages share; its list of stages need not hold those that are run.
        directory: of the run.
        clock: seconds since the run started.
        live: how far the load is, for those who scrape.
        max_in_flight: requests that an open loop may have unanswered at once.
        line_every_s: how often progress is said.
        warm_up_s: how long the first warm-up request of each lane took, of those that had it.
        used_until_s: when the last stage of each lane was over.
    """

    plan: Plan
    slo: Slo | None
    directory: Path
    clock: Clock
    sender: Sender
    records: RecordFile
    live: ProgressCounter
    exporter: LoadExporter
    stop: Stop
    say: Say
    max_in_flight: int
    line_every_s: float
    warm_up_s: dict[str, float] = field(default_factory=dict)
    used_until_s: dict[str, float] = field(default_factory=dict)

    def keep(self, record: RequestRecord) -> None:
        """A request ended: to the file and to the live metrics. A record that is lost ends the stage."""
        if not self.records.append(record):
            self.stop.interrupt()
        self.exporter.count(ended_request(record, record.label.lane))


@contextmanager
def open_workbench(
    plan: Plan,
    info: RunInfo,
    directory: Path,
    *,
    counter: TokenCounter,
    counters: Mapping[str, TokenCounter],
    say: Say,
    stop: Stop,
    offset_s: float = 0.0,
) -> Iterator[Workbench]:
    """Lock the file of records, serve live metrics and raise the limit of open files, for the block.

    Args:
        info: its id salts the prompts; ids of requests begin with it, and with its part from the second on.
        counter, counters: count the tokens of prompts, as `Sender` has them.
        offset_s: where the clock of the run stands, for a run that goes on after a pause.
    """
    zero_s = time.perf_counter() - offset_s

    def clock() -> float:
        return time.perf_counter() - zero_s

    id_prefix = info.id if info.parts == 1 else f"{info.id}.{info.parts}"
    live = ProgressCounter(clock, is_run_active=True)
    exporter = LoadExporter(live.read)
    with open_records(directory / REQUESTS_FILE) as records:
        exporter.serve(say)
        try:
            yield Workbench(
                plan=plan,
                slo=None if plan.slo is None else parse_slo(plan.slo),
                directory=directory,
                clock=clock,
                sender=Sender(plan, id_prefix, info.id, clock, counter, counters),
                records=records,
                live=live,
                exporter=exporter,
                stop=stop,
                say=say,
                max_in_flight=min(MAX_IN_FLIGHT, _allow_open_files(MAX_IN_FLIGHT + FILES_BESIDE_CONNECTIONS)),
                line_every_s=TICK_S if sys.stderr.isatty() else PLAIN_LINE_EVERY_S,
            )
        finally:
            live.is_run_active = False
            exporter.close()


def _allow_open_files(wanted: int) -> int:
    """Raise the limit of open files towards `wanted`; how many connections there is room for then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, soft - FILES_BESIDE_CONNECTIONS)
