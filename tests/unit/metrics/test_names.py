"""The one list of metrics: conventions that dashboards and rules rely on."""

from __future__ import annotations

from itertools import pairwise

import pytest
from annotated_types import Le
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from serving.config import GatewayConfig, SchedulerConfig
from serving.metrics import registry as make
from serving.metrics.names import LATENCY_BUCKETS_S, METRICS, Metric

# `tenant` is capped by serving/metrics/tenant_label.py; a workload is one of the load tool's own.
# A kind is one of `TextKind`, a bin one of ten, a batch a power of 2.
CLOSED_SETS = {
    "lane", "replica", "outcome", "reason", "band", "tenant", "result", "figure", "workload", "kind", "why", "bin",
    "batch",
}  # fmt: skip


def test_names_are_distinct() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_conventions(metric: Metric) -> None:
    assert metric.name.startswith("tandem_")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert "_ms" not in metric.name, "base units only"
    assert set(metric.labels) <= CLOSED_SETS, "never a request, a user or a prompt"
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    if metric.kind == "histogram":
        assert metric.name.endswith(("_seconds", "_bytes"))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_exported_under_its_own_name(metric: Metric) -> None:
    registry = CollectorRegistry()
    collector = getattr(make, metric.kind)(metric, registry)
    child = collector.labels(*["x"] * len(metric.labels)) if metric.labels else collector
    child.observe(1) if metric.kind == "histogram" else child.inc()
    text = make.exposition(registry).decode()
    suffix = "_bucket" if metric.kind == "histogram" else ""
    assert f"\n{metric.name}{suffix}" in text


def longest_s(config: type[BaseModel], setting: str) -> float:
    """The bound of a setting."""
    (bound,) = [one.le for one in config.model_fields[setting].metadata if isinstance(one, Le)]
    assert isinstance(bound, int | float)
    return bound


def test_what_a_config_lets_a_first_token_take_lies_within_the_buckets() -> None:
    # An attempt, and one more on another replica.
    attempts_s = 2 * (
        longest_s(GatewayConfig, "connect_timeout_s") + longest_s(GatewayConfig, "first_byte_timeout_s")
    )
    assert LATENCY_BUCKETS_S[-1] >= longest_s(SchedulerConfig, "max_queue_wait_s") + attempts_s


def test_buckets_rise_and_hold_the_usual_slo_edges() -> None:
    assert all(low < high for low, high in pairwise(LATENCY_BUCKETS_S))
    assert set(LATENCY_BUCKETS_S) >= {0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10}
