"""The load tool's own metrics for Prometheus while a run is on: what was due, sent, and seen by the client.

A scrape takes a few milliseconds of the load tool's only thread; nothing is computed in between.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loadtest.client.record import RequestRecord
from serving.core.addresses import LOOPBACK
from serving.core.latency import e2e_latency_s, tpot_s, ttft_s
from serving.environment import metrics_faults
from serving.metrics import names
from serving.progress import Say

PORT_VARIABLE = "TANDEM_LOAD_METRICS_PORT"
ADDRESS_VARIABLE = "TANDEM_LOAD_METRICS_ADDRESS"
DEFAULT_PORT = 9465  # dashboards/prometheus/prometheus.yml looks there
OFF = 0
MAX_PORT = 65535

LaneWorkload = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests that were due and that were begun since the process started, and users now, by lane and workload."""

    due: Mapping[LaneWorkload, int]
    sent: Mapping[LaneWorkload, int]
    users: Mapping[LaneWorkload, int]
    is_run_active: bool


class RunningLoad(Protocol):
    """What is read of a load while it is on."""

    @property
    def lane_workload(self) -> LaneWorkload: ...

    @property
    def num_dispatched(self) -> int:
        """Requests begun."""

    @property
    def num_busy(self) -> int:
        """Users of a closed loop, or requests in flight of an open one."""


class ProgressCounter:
    """Adds up one load after another.

    Args:
        clock: now, in seconds.
    """

    def __init__(self, clock: Callable[[], float], *, is_run_active: bool = False) -> None:
        self.is_run_active = is_run_active
        self._clock = clock
        self._load: RunningLoad | None = None
        self._due_at_s: Sequence[float] = ()
        self._due: Counts[LaneWorkload] = Counts()
        self._sent: Counts[LaneWorkload] = Counts()

    def began(self, load: RunningLoad, due_at_s: Sequence[float] = ()) -> None:
        """A load starts now.

        Args:
            due_at_s: an open loop's arrivals by the clock, in order; a user of a closed loop is due when it is
                free, which is when it sends.
        """
        self._load, self._due_at_s = load, due_at_s

    def ended(self) -> None:
        """The load that began last is over."""
        self._due, self._sent = self._totals()
        self._load = None

    def read(self) -> Progress:
        due, sent = self._totals()
        users = {} if self._load is None else {self._load.lane_workload: self._load.num_busy}
        return Progress(due, sent, users, self.is_run_active)

    def _totals(self) -> tuple[Counts[LaneWorkload], Counts[LaneWorkload]]:
        due, sent = self._due.copy(), self._sent.copy()
        if (load := self._load) is not None:
            is_open = bool(self._due_at_s)
            due[load.lane_workload] += (
                bisect_right(self._due_at_s, self._clock()) if is_open else load.num_dispatched
            )
            sent[load.lane_workload] += load.num_dispatched
        return due, sent


class EndedRequest(NamedTuple):
    """What the metrics take of a request; plain values, as Locust's workers can send them to their master."""

    lane: str
    workload: str
    outcome: str
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


def ended_request(record: RequestRecord, lane: str) -> EndedRequest:
    """Latencies are those of completed requests only."""
    labels = (lane, record.label.workload, str(record.outcome))
    if not record.is_completed:
        return EndedRequest(*labels, 0, None, None, None)
    timeline = record.timeline
    latencies_s = (
        ttft_s(timeline) if timeline.chunk_at_s else None,
        tpot_s(timeline),
        e2e_latency_s(timeline),
    )
    return EndedRequest(*labels, record.output_tokens or 0, *latencies_s)


class LoadExporter:
    """Counts of one process's runs.

    Args:
        read: how far the load is, asked at each scrape.
    """

    def __init__(self, read: Callable[[], Progress]) -> None:
        self.registry = CollectorRegistry()
        self._server: WSGIServer | None = None
        self._requests = self._counter(names.LOAD_REQUESTS)
        self._output_tokens = self._counter(names.LOAD_OUTPUT_TOKENS)
        self._ttft, self._tpot, self._e2e = (
            Histogram(metric.name, metric.help, metric.labels, registry=self.registry, buckets=metric.buckets)
            for metric in (names.LOAD_TTFT, names.LOAD_TPOT, names.LOAD_E2E)
        )
        self.registry.register(_ProgressCollector(read))

    def _counter(self, metric: names.Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def serve(self, say: Say) -> None:
        """Serve `/metrics` at `TANDEM_LOAD_METRICS_ADDRESS` (the loopback) and `TANDEM_LOAD_METRICS_PORT` (0: not).

        A run is worth more than its live picture: where the port is taken it goes on without, and says so.

        Raises:
            ValueError: the variable holds no port.
        """
        port, address = metrics_port(), os.environ.get(ADDRESS_VARIABLE) or LOOPBACK
        if port == OFF:
            return
        try:
            self._server, _ = start_http_server(port, addr=address, registry=self.registry)
        except OSError as error:
            place = f"{address}:{port} ({ADDRESS_VARIABLE}, {PORT_VARIABLE})"
            say(f"no live metrics of this run at {place}: {error.strerror}")

    def close(self) -> None:
        """End the HTTP server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def count(self, ended: EndedRequest) -> None:
        """A request ended."""
        labels = {"lane": ended.lane, "workload": ended.workload}
        self._requests.labels(**labels, outcome=ended.outcome).inc()
        self._output_tokens.labels(**labels).inc(ended.output_tokens)
        for histogram, latency_s in (
            (self._ttft, ended.ttft_s),
            (self._tpot, ended.tpot_s),
            (self._e2e, ended.e2e_s),
        ):
            if latency_s is not None:
                histogram.labels(**labels).observe(latency_s)


class _ProgressCollector(Collector):
    def __init__(self, read: Callable[[], Progress]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        progress = self._read()
        for metric, totals in ((names.LOAD_DUE, progress.due), (names.LOAD_SENT, progress.sent)):
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for lane_workload, total in totals.items():
                counter.add_metric(lane_workload, total)
            yield counter
        users = GaugeMetricFamily(
            names.LOAD_USERS.name, names.LOAD_USERS.help, labels=names.LOAD_USERS.labels
        )
        for lane_workload, num_users in progress.users.items():
            users.add_metric(lane_workload, num_users)
        yield users
        active = names.LOAD_RUN_ACTIVE
        yield GaugeMetricFamily(active.name, active.help, value=float(progress.is_run_active))


def metrics_port() -> int:
    """The port of `TANDEM_LOAD_METRICS_PORT`; 0 for none.

    Raises:
        ValueError: it holds no port, or prometheus-client would keep the metrics in files.
    """
    if faults := metrics_faults():
        raise ValueError("; ".join(faults))
    text = os.environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise ValueError(f"{PORT_VARIABLE}={text!r} must be a port, 1 to {MAX_PORT}, or 0 for none")
    return int(text)
