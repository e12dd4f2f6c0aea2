"""What the scheduler exports: counts read from the core at scrape time, so they cannot drift from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.ceilings import kept
from serving.config import LaneConfig, SchedulerConfig
from serving.core.errors import SCHEDULER_REASONS
from serving.core.lane import ANY_LANE
from serving.metrics import names
from serving.metrics import registry as make
from serving.metrics.tenant_label import TenantLabels
from serving.scheduler.adaptive import Adaptive
from serving.scheduler.breaker import BreakerState
from serving.scheduler.core import Grant, SchedulerCore

BREAKER_VALUES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class SchedulerMetrics:
    """The scheduler's metrics, in a registry of their own."""

    def __init__(
        self,
        core: SchedulerCore,
        config: SchedulerConfig,
        lanes: Sequence[LaneConfig],
        clock: Callable[[], float],
    ) -> None:
        self.registry = CollectorRegistry()
        self._bands = [band.name for band in config.bands]
        self._tenants = TenantLabels(tenant.name for tenant in config.tenants)
        lane_names = [lane.name for lane in lanes]
        self.registry.register(_CoreCollector(core, lane_names, clock, self._tenants))
        make.gauge(names.WAITING_LIMIT, self.registry).set(config.max_waiting_requests)
        wanted = make.gauge(names.WANTED_REPLICAS, self.registry)
        for lane in lanes:
            scaling = lane.autoscaling
            wanted.labels(lane=lane.name).set(scaling.min_replicas if scaling else lane.replicas)
        self._queue_wait = make.histogram(names.QUEUE_WAIT, self.registry)
        self._tenant_wait = make.histogram(names.TENANT_QUEUE_WAIT, self.registry)
        self.lease_errors = make.counter(names.LEASE_ERRORS, self.registry)

    def granted(self, grant: Grant) -> None:
        """Observe how long a request waited."""
        band = self._bands[grant.request.band]
        self._queue_wait.labels(lane=grant.replica.lane, band=band).observe(grant.waited_s)
        self._tenant_wait.labels(tenant=self._tenants.label(grant.request.tenant)).observe(grant.waited_s)


class _CoreCollector(Collector):
    def __init__(
        self,
        core: SchedulerCore,
        lanes: Sequence[str],
        clock: Callable[[], float],
        tenants: TenantLabels,
    ) -> None:
        self._core = core
        self._lanes = lanes
        self._clock = clock
        self._tenants = tenants
        self._waited: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        refusals = CounterMetricFamily(names.REFUSALS.name, names.REFUSALS.help, labels=names.REFUSALS.labels)
        for lane in (*self._lanes, None):
            for reason in SCHEDULER_REASONS:
                refusals.add_metric([lane or ANY_LANE, reason], self._core.refusals_by_lane[lane, reason])
        waiting = _gauge(names.WAITING)
        counts = self._core.waiting_by_lane()
        for lane in (*self._lanes, None):
            waiting.add_metric([lane or ANY_LANE], counts.get(lane, 0))
        running, limit, tokens, ready = (
            _gauge(metric)
            for metric in (names.RUNNING, names.RUNNING_LIMIT, names.OUTSTANDING_TOKENS, names.REPLICA_READY)
        )
        breaker = _gauge(names.BREAKER)
        for replica in self._core.replicas():
            labels = [replica.info.lane, replica.info.replica_id]
            running.add_metric(labels, replica.load.running)
            limit.add_metric(labels, replica.info.max_running)
            tokens.add_metric(labels, replica.load.outstanding_tokens)
            ready.add_metric(labels, 1)
            breaker.add_metric(labels, BREAKER_VALUES[replica.breaker.state(self._clock())])
        by_band = _gauge(names.WAITING_BY_BAND)
        for band, count in self._core.waiting_by_band().items():
            by_band.add_metric([band], count)
        yield from (refusals, waiting, by_band, self._waiting_by_tenant())
        yield from (running, limit, tokens, ready, breaker)
        if adaptive := self._core.adaptive:
            yield from _adaptive(adaptive)
        if ceilings := kept():
            for metric, value in (
                (names.MACHINE_FLOPS, ceilings.flops_per_s),
                (names.MACHINE_COPY, ceilings.copy_bytes_per_s),
            ):
                family = _gauge(metric)
                family.add_metric([], value)
                yield family

    def _waiting_by_tenant(self) -> GaugeMetricFamily:
        counts: Counter[str] = Counter()
        for tenant, count in self._core.waiting_by_tenant().items():
            counts[self._tenants.label(tenant)] += count
        self._waited |= counts.keys()
        family = _gauge(names.WAITING_BY_TENANT)
        for tenant in sorted(self._waited):
            family.add_metric([tenant], counts[tenant])
        return family


def _adaptive(placement: Adaptive) -> Iterator[Metric]:
    choices = _counter(names.PLACEMENT_CHOICES)
    for (lane, kind, why), count in sorted(placement.choices.items()):
        choices.add_metric([lane, kind, why], count)
    corrections = _gauge(names.PLACEMENT_CORRECTION)
    for each in placement.corrections.all():
        corrections.add_metric([each.lane, str(each.batch)], each.factor)
    predicted, observed = (
        _counter(metric) for metric in (names.PREDICTED_ACCEPTED_TOKENS, names.OBSERVED_ACCEPTED_TOKENS)
    )
    for (lane, kind), sums in sorted(placement.accepted.items()):
        predicted.add_metric([lane, kind], sums.predicted)
        observed.add_metric([lane, kind], sums.observed)
    requests, drafted, accepted = (
        _counter(metric)
        for metric in (
            names.RELIABILITY_REQUESTS,
            names.RELIABILITY_DRAFT_TOKENS,
            names.RELIABILITY_ACCEPTED_TOKENS,
        )
    )
    for lane, reliability in sorted(placement.reliability.items()):
        for part in reliability.bins():
            labels = [lane, f"{part.low:.1f}"]
            requests.add_metric(labels, part.num_requests)
            drafted.add_metric(labels, part.draft_tokens)
            accepted.add_metric(labels, round(part.observed * part.draft_tokens))
    yield from (choices, corrections, predicted, observed, requests, drafted, accepted)


def _counter(metric: names.Metric) -> CounterMetricFamily:
    return CounterMetricFamily(metric.name, metric.help, labels=metric.labels)


def _gauge(metric: names.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
