"""A histogram that takes all values of a request at once: a thousand one by one would hold up every stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from serving.metrics.names import Metric


class LaneHistogram(Collector):
    """Values by lane, in the buckets of one metric with that label alone."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._bounds = tuple(bound for bound in metric.buckets if bound != float("inf"))
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        registry.register(self)

    def observe(self, lane: str, values: Sequence[float]) -> None:
        """Count values, in the metric's unit."""
        if not values:
            return
        counts = self._counts.setdefault(lane, [0] * (len(self._bounds) + 1))
        bounds = self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sums[lane] = self._sums.get(lane, 0.0) + sum(values)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """What Prometheus gets."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for lane, counts in self._counts.items():
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric([lane], buckets, self._sums[lane])
        return [family]
