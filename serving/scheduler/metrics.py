"""What the scheduler exports: counts read from the core at scrape time, so they cannot drift from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.core import metric_names as names
from serving.core.errors import SCHEDULER_REASONS
from serving.scheduler.breaker import BreakerState
from serving.scheduler.core import SchedulerCore
from serving.telemetry import registry as make

BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class SchedulerMetrics:
    """The scheduler's metrics, in a registry of their own."""

    def __init__(self, core: SchedulerCore, lanes: Sequence[str], clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_CoreCollector(core, lanes, clock))
        self.queue_wait = make.histogram(names.QUEUE_WAIT, self.registry)
        self.lease_errors = make.counter(names.LEASE_ERRORS, self.registry)


class _CoreCollector(Collector):
    def __init__(self, core: SchedulerCore, lanes: Sequence[str], clock: Callable[[], float]) -> None:
        self._core = core
        self._lanes = lanes
        self._clock = clock

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
        breaker = _gauge(names.BREAKER)
        for replica in self._core.replicas():
            labels = [replica.info.lane, replica.info.replica_id]
            running.add_metric(labels, replica.load.running)
            tokens.add_metric(labels, replica.load.outstanding_tokens)
            ready.add_metric(labels, 1)
            breaker.add_metric(labels, BREAKER_VALUES[replica.breaker.state(self._clock())])
        by_band = _gauge(names.WAITING_BY_BAND)
        for band, count in self._core.waiting_by_band().items():
            by_band.add_metric([band], count)
        yield from (refusals, waiting, by_band, running, tokens, ready, breaker)


def _gauge(metric: names.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
