"""Prometheus collectors made from the one list of metrics."""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from serving.metrics.names import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def gauge(metric: Metric, registry: CollectorRegistry) -> Gauge:
    return Gauge(metric.name, metric.help, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus' text format."""
    return generate_latest(registry)
