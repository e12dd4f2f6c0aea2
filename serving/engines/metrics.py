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
MAX_RESTS = 30  # refreshes left out in a row: others that come and go share pages with an engine that rests


class ReplicaCollector(Collector):
    """Engine counts as they are when scraped, and memory as of the last refresh."""

    def __init__(self, lane: str, replica_id: str, tally: EngineTally) -> None:
        self._labels = [lane, replica_id]
        self._tally = tally
        self._process = psutil.Process()
        self._memory_bytes = 0
        self._num_steps = 0  # of the engine, when its memory was measured
        self._num_rests = 0  # looks since then that found no step more

    async def refresh_memory(self) -> None:
        """Measure once. In a thread: the kernel walks every page, and streams must not wait for that."""
        self._num_steps, self._num_rests = self._tally.num_all_steps, 0
        self._memory_bytes = await asyncio.to_thread(memory_bytes, self._process)

    async def keep_memory_fresh(self) -> None:
        """Look for ever, every `MEMORY_REFRESH_S`."""
        while True:
            await asyncio.sleep(MEMORY_REFRESH_S)
            await self.look()

    async def look(self) -> None:
        """Measure if the engine has worked since it was measured, and else seldom."""
        self._num_rests += 1
        if self._tally.num_all_steps != self._num_steps or self._num_rests > MAX_RESTS:
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
