"""What a replica exports beside its engine's own metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.engines.base import EngineTally
from serving.metrics import names

MEMORY_REFRESH_S = 10.0


class ReplicaCollector(Collector):
    """Engine counts as they are when scraped, and memory as of the last refresh."""

    def __init__(self, lane: str, replica_id: str, tally: EngineTally) -> None:
        self._labels = [lane, replica_id]
        self._tally = tally
        self._process = psutil.Process()
        self._memory_bytes = 0

    async def refresh_memory(self) -> None:
        """Measure once. In a thread: the kernel walks every page, and streams must not wait for that."""
        self._memory_bytes = await asyncio.to_thread(memory_bytes, self._process)

    async def keep_memory_fresh(self) -> None:
        """Measure for ever, every `MEMORY_REFRESH_S`."""
        while True:
            await asyncio.sleep(MEMORY_REFRESH_S)
            await self.refresh_memory()

    def collect(self) -> Iterator[Metric]:
        for metric, value in (
            (names.ENGINE_RUNNING, self._tally.running),
            (names.ENGINE_WAITING, self._tally.waiting),
            (names.REPLICA_MEMORY, self._memory_bytes),
        ):
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            family.add_metric(self._labels, value)
            yield family
        for metric, total in (
            (names.ENGINE_STEPS, self._tally.num_steps),
            (names.ENGINE_BUSY, self._tally.busy_s),
        ):
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            counter.add_metric(self._labels, total)
            yield counter


def memory_bytes(process: psutil.Process) -> int:
    """Proportional set size of a process and its descendants: shared pages are counted once between them."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # it ended between the listing and the look
    return total
