"""The load tool's own metrics for Prometheus while a run is on: what was due, sent, and seen by the client.

A scrape takes a few milliseconds of the load tool's only thread; nothing is computed in between.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtest.load import Arrival, ClosedLoop
from loadtest.plan import StagePlan
from loadtest.record import RequestRecord
from serving.core import metric_names as names
from serving.core.latency import e2e_latency_s, tpot_s, ttft_s
from serving.progress import Say

PORT_VARIABLE = "TANDEM_LOAD_METRICS_PORT"
DEFAULT_PORT = 9465  # dashboards/prometheus/prometheus.yml looks there
OFF = 0
MAX_PORT = 65535

Place = tuple[str, str]  # lane and workload


class RunningStage(Protocol):
    """What is read of a stage; `loadtest.stage.Stage` is one."""

    plan: StagePlan
    num_dispatched: int
    in_flight: dict[int, float]
    arrivals: tuple[Arrival, ...]


class LoadExporter:
    """Counts of one run.

    Args:
        clock: seconds since the run started.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._server: WSGIServer | None = None
        self._requests = self._counter(names.LOAD_REQUESTS)
        self._output_tokens = self._counter(names.LOAD_OUTPUT_TOKENS)
        self._ttft, self._tpot, self._e2e = (
            Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)
            for metric in (names.LOAD_TTFT, names.LOAD_TPOT, names.LOAD_E2E)
        )
        self._stages = _StageCollector(clock)
        self.registry.register(self._stages)

    def _counter(self, metric: names.Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def serve(self, say: Say) -> None:
        """Serve `/metrics` on the loopback, at the port of `TANDEM_LOAD_METRICS_PORT`; 0 turns it off.

        A run is worth more than its live picture: where the port is taken it goes on without, and says so.

        Raises:
            ValueError: the variable holds no port.
        """
        port = metrics_port()
        if port == OFF:
            return
        try:
            self._server, _ = start_http_server(port, addr="127.0.0.1", registry=self.registry)
        except OSError as error:
            say(f"no live metrics of this run: port {port} ({PORT_VARIABLE}): {error.strerror}")

    def close(self) -> None:
        """End the run, and its HTTP server."""
        self._stages.is_run_active = False
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def began(self, stage: RunningStage) -> None:
        """A stage starts now."""
        now_s = self._clock()
        self._stages.begin(stage, [now_s + arrival.at_s for arrival in stage.arrivals])

    def ended(self) -> None:
        """The stage that began last is over."""
        self._stages.end()

    def record(self, record: RequestRecord) -> None:
        """A request ended."""
        place = {"lane": record.label.lane, "workload": record.label.workload}
        self._requests.labels(**place, outcome=record.outcome).inc()
        if not record.is_completed:
            return
        self._ttft.labels(**place).observe(ttft_s(record.timeline))
        self._e2e.labels(**place).observe(e2e_latency_s(record.timeline))
        if (tpot := tpot_s(record.timeline)) is not None:
            self._tpot.labels(**place).observe(tpot)
        self._output_tokens.labels(**place).inc(record.output_tokens or 0)


class _StageCollector(Collector):
    """Figures read from the running stage when scraped, on top of those of the stages before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage: RunningStage | None = None
        self._due_at_s: Sequence[float] = ()
        self._due: Counts[Place] = Counts()
        self._sent: Counts[Place] = Counts()
        self.is_run_active = True

    def begin(self, stage: RunningStage, due_at_s: Sequence[float]) -> None:
        self._stage, self._due_at_s = stage, due_at_s

    def end(self) -> None:
        self._due, self._sent = self._totals()
        self._stage = None

    def _totals(self) -> tuple[Counts[Place], Counts[Place]]:
        due, sent = self._due.copy(), self._sent.copy()
        if (stage := self._stage) is not None:
            # A user of a closed loop is due when it is free, which is when it sends.
            num_due = bisect_right(self._due_at_s, self._clock()) if self._due_at_s else stage.num_dispatched
            due[_place(stage)] += num_due
            sent[_place(stage)] += stage.num_dispatched
        return due, sent

    def collect(self) -> Iterator[Metric]:
        due, sent = self._totals()
        for metric, totals in ((names.LOAD_DUE, due), (names.LOAD_SENT, sent)):
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for place, total in totals.items():
                counter.add_metric(place, total)
            yield counter
        users = GaugeMetricFamily(
            names.LOAD_USERS.name, names.LOAD_USERS.help, labels=names.LOAD_USERS.labels
        )
        if (stage := self._stage) is not None:
            load = stage.plan.load
            num_users = load.users if isinstance(load, ClosedLoop) else len(stage.in_flight)
            users.add_metric(_place(stage), num_users)
        yield users
        active = names.LOAD_RUN_ACTIVE
        yield GaugeMetricFamily(active.name, active.help, value=float(self.is_run_active))


def _place(stage: RunningStage) -> Place:
    return stage.plan.lane, stage.plan.workload


def metrics_port() -> int:
    """The port of `TANDEM_LOAD_METRICS_PORT`; 0 for none.

    Raises:
        ValueError: it holds no port.
    """
    text = os.environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ValueError(f"{PORT_VARIABLE}={text!r} must be a port, 1 to {MAX_PORT}, or 0 for none")
    return int(text)
