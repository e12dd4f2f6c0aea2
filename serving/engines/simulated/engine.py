"""A simulated engine: the OpenAI API with known times, for tests and policy studies only.

It computes nothing. Its words are made up, its times follow `SimulatedProfile`, and every figure it gives
can therefore be predicted. Its version string and its answers say that it is simulated.
`serving.engines.simulated.server` runs it without Ray.
"""

from __future__ import annotations

import asyncio

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from serving.config import LaneConfig
from serving.core.lane import EngineFacts
from serving.engines.base import EngineTally
from serving.engines.simulated.api import SimulatedApi
from serving.engines.simulated.batch import SimulatedBatch
from serving.engines.steps.log import StepLog


class SimulatedEngine:
    """The batch behind its HTTP side; see `SimulatedProfile` for the times."""

    def __init__(self, lane: LaneConfig, served_names: list[str], max_model_len: int) -> None:
        assert lane.simulated is not None, "config checks this"
        self._batch = SimulatedBatch(
            lane.simulated, lane.max_num_seqs, kv_tokens=lane.max_num_seqs * max_model_len
        )
        self._api = SimulatedApi(
            self._batch, self.check, served_names, max_model_len, lane.simulated.killed_by
        )
        self._stepper: asyncio.Task[None] | None = None

    @property
    def tally(self) -> EngineTally:
        return self._batch.tally

    @property
    def step_log(self) -> StepLog:
        return self._batch.step_log

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts("simulated", "simulated 1", has_model=False, device="none", dtype="none")

    @property
    def registry(self) -> CollectorRegistry:
        return self._batch.metrics.registry

    async def start(self) -> ASGIApp:
        self._stepper = asyncio.create_task(self._batch.step_forever())
        return self._api.app()

    def served_by(self, server: uvicorn.Server) -> None:
        pass

    def check(self) -> None:
        if self._stepper is not None and self._stepper.done():
            raise RuntimeError(f"the simulated engine's stepper ended: {self._stepper}")

    def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
        self._batch.step_log.close()
