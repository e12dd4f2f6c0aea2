"""What the scheduler exports: counts read from the core at scrape time, so they cannot drift from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.core import metric_names as names
from serving.core.errors import SCHEDULER_REASONS
from serving.scheduler.core import SchedulerCore
from serving.telemetry import registry as make


class SchedulerMetrics:
    """The scheduler's metrics, in a registry of their own."""

    def __init__(self, core: SchedulerCore, lanes: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_CoreCollector(core, lanes))
        self.queue_wait = make.histogram(names.QUEUE_WAIT, self.registry)
        self.lease_errors = make.counter(names.LEASE_ERRORS, self.registry)


class _CoreCollector(Collector):
    def __init__(self, core: SchedulerCore, lanes: Sequence[str]) -> None:
        self._core = core
        self._lanes = lanes

    def collect(self) -> Iterator[Metric]:
        refusals = CounterMetricFamily(names.REFUSALS.name, names.REFUSALS.help, labels=names.REFUSALS.labels)
        for reason in SCHEDULER_REASONS:
            refusals.add_metric([reason], self._core.refusals[reason])
        waiting = _gauge(names.WAITING)
        counts = self._core.waiting_by_lane()
        for lane in (*self._lanes, None):
            waiting.add_metric([lane or "any"], counts.get(lane, 0))
        running, tokens, ready = (
            _gauge(metric) for metric in (names.RUNNING, names.OUTSTANDING_TOKENS, names.REPLICA_READY)
        )
        for load in self._core.loads():
            labels = [load.info.lane, load.info.replica_id]
            running.add_metric(labels, load.running)
            tokens.add_metric(labels, load.outstanding_tokens)
            ready.add_metric(labels, 1)
        yield from (refusals, waiting, running, tokens, ready)


def _gauge(metric: names.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
