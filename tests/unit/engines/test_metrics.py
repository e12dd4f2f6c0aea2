"""What a replica exports of its own: memory is measured while the engine works."""

from __future__ import annotations

import psutil
import pytest

from serving.engines import metrics
from serving.engines.base import EngineTally
from serving.engines.metrics import MAX_RESTS, ReplicaCollector

pytestmark = pytest.mark.anyio


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[psutil.Process]:
    """Grows with each measurement."""
    calls: list[psutil.Process] = []

    def memory_bytes(process: psutil.Process) -> int:
        calls.append(process)
        return len(calls)

    monkeypatch.setattr(metrics, "memory_bytes", memory_bytes)
    return calls


async def test_memory_is_measured_after_work_and_not_at_rest(measured: list[psutil.Process]) -> None:
    tally = EngineTally()
    collector = ReplicaCollector("batched", "b-1", tally)
    await collector.refresh_memory()
    await collector.look()
    assert len(measured) == 1
    tally.step(running=0, waiting=0, ended_at_s=1.0)  # one step between pauses is work too
    for _ in range(2):
        await collector.look()
    assert len(measured) == 2


async def test_memory_at_rest_is_measured_now_and_then(measured: list[psutil.Process]) -> None:
    collector = ReplicaCollector("batched", "b-1", EngineTally())
    for _ in range(2 * (MAX_RESTS + 1)):
        await collector.look()
    assert len(measured) == 2
