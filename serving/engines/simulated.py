"""A simulated engine: the OpenAI API with known times, for tests and policy studies only.

It computes nothing. Its words are made up, its times follow `SimulatedProfile`, and every figure it gives
can therefore be predicted. Its version string and its answers say that it is simulated.
`serving.engines.simulated_server` runs it without Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from serving.config import LaneConfig, SimulatedProfile
from serving.engines.base import EngineFacts, EngineTally, FinishedRequest
from serving.engines.simulated_api import WORD, SimulatedApi
from serving.engines.simulated_metrics import SimulatedMetrics
from serving.engines.step_log import RequestStep, StepLog, StepWriter

__all__ = ["WORD", "Sequence", "SimulatedEngine"]

ROUNDING_S = 1e-6  # three steps of 10 ms are 30 ms, whatever floating point says


@dataclass(eq=False)
class Sequence:
    """One request inside the engine.

    Attributes:
        next_due_s: no token before the first step that is due then.
        chunks: tokens of each chunk, put in as it is made; None at the end.
    """

    request_id: str
    prompt_tokens: int
    max_tokens: int
    rng: random.Random
    made: int = 0
    prefilled: int = 0  # of the prompt, before the step of the first token
    started_at_s: float = 0.0
    next_due_s: float = 0.0
    chunks: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    def emit(self, tokens: int) -> None:
        tokens = min(tokens, self.max_tokens - self.made)
        self.made += tokens
        self.chunks.put_nowait(tokens)

    @property
    def is_done(self) -> bool:
        return self.made >= self.max_tokens


class SimulatedEngine:
    """Continuous batching over imaginary steps; see `SimulatedProfile` for the times."""

    def __init__(self, lane: LaneConfig, served_names: list[str], max_model_len: int) -> None:
        assert lane.simulated is not None, "config checks this"
        self._profile: SimulatedProfile = lane.simulated
        self._max_num_seqs = lane.max_num_seqs
        self._tally = EngineTally()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._work = asyncio.Event()
        self._serial = itertools.count()
        self._stepper: asyncio.Task[None] | None = None
        self._metrics = SimulatedMetrics(
            lane.max_num_seqs * max_model_len, self._profile.num_speculative_tokens
        )
        self._step_log = StepLog()
        self._step_writer = StepWriter(self._step_log.path)
        self._steps = itertools.count(1)
        self._api = SimulatedApi(self, served_names, max_model_len)

    @property
    def tally(self) -> EngineTally:
        return self._tally

    @property
    def step_log(self) -> StepLog:
        return self._step_log

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(name="simulated", version="simulated 1", device="none", dtype="none")

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    async def start(self) -> ASGIApp:
        self._stepper = asyncio.create_task(self._step_forever())
        return self._api.app()

    def served_by(self, server: uvicorn.Server) -> None:
        pass

    def check(self) -> None:
        if self._stepper is not None and self._stepper.done():
            raise RuntimeError(f"the simulated engine's stepper ended: {self._stepper}")

    def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
        self._step_log.close()

    def sequence(self, request_id: str | None, prompt_tokens: int, max_tokens: int) -> Sequence:
        """A request of that size, not yet in the engine."""
        serial = next(self._serial)
        rng = random.Random(f"{self._profile.seed}-{serial}")
        return Sequence(request_id or f"simulated-{serial}", prompt_tokens, max_tokens, rng)

    def join(self, sequence: Sequence) -> None:
        """Let it wait for room in the batch."""
        self._waiting.append(sequence)
        self._work.set()

    def abort(self, sequence: Sequence) -> None:
        """Take it out, wherever it is; nothing happens when it has ended."""
        for place in (self._running, self._waiting):
            if sequence in place:
                place.remove(sequence)
        self._tally.load(len(self._running), len(self._waiting))
        self._show_load()

    async def _step_forever(self) -> None:
        due_at_s = time.monotonic()
        while True:
            # Whole steps are not made up for: an engine that was held up goes on at its pace and not in a burst.
            due_at_s = max(due_at_s, time.monotonic() - self._profile.step_ms / 1000)
            self._schedule(due_at_s)
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due_at_s = time.monotonic()
                continue
            step_s = self._step_s(len(self._running))
            due_at_s += step_s  # an absolute schedule: late wake-ups do not add up
            started_ns = time.monotonic_ns()
            await asyncio.sleep(max(0.0, due_at_s - time.monotonic()))
            ended_ns, batch = time.monotonic_ns(), list(self._running)
            rows = [row for sequence in batch if (row := self._step(sequence, due_at_s)) is not None]
            step = next(self._steps)
            if rows and self._step_writer.is_on:
                self._step_writer.write(step, started_ns, ended_ns, rows)
            self._metrics.stepped(len(batch), sum(row.emitted_tokens for row in rows))
            self._tally.step(len(self._running), len(self._waiting), ended_at_s=time.monotonic())

    def _step_s(self, batch: int) -> float:
        return (self._profile.step_ms + self._profile.step_ms_per_request * (batch - 1)) / 1000

    def _schedule(self, due_at_s: float) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.popleft()
            sequence.started_at_s = time.monotonic()
            # By the steps' own schedule, not by late wake-ups: the first token's step is then always the same one.
            sequence.next_due_s = due_at_s + self._profile.ttft_ms / 1000 - ROUNDING_S
            self._running.append(sequence)
            self._metrics.started(sequence.prompt_tokens)
        self._tally.load(len(self._running), len(self._waiting))
        self._show_load()

    def _show_load(self) -> None:
        held_tokens = sum(sequence.prompt_tokens + sequence.made for sequence in self._running)
        self._metrics.load(len(self._running), len(self._waiting), held_tokens)

    def _step(self, sequence: Sequence, due_at_s: float) -> RequestStep | None:
        """Give a request its tokens, if they are due; what the step did for it, None in a stall."""
        before = sequence.made
        if due_at_s < sequence.next_due_s:
            if before:
                return None
            # A prompt is computed a token a step, and the rest with the first token of the answer.
            sequence.prefilled += 1
            return RequestStep(sequence.request_id, True, 1, 0, 0, 0)
        drafted = self._profile.num_speculative_tokens if before else 0
        accepted = self._accepted_drafts(sequence.rng) if before else 0
        sequence.emit(self._profile.tokens_per_chunk + accepted)
        if before < self._profile.stall_after_tokens <= sequence.made:
            sequence.next_due_s = due_at_s + self._profile.stall_ms / 1000 - ROUNDING_S
        if sequence.is_done:
            self._end(sequence)
        scheduled = (
            self._profile.tokens_per_chunk + drafted
            if before
            else max(1, sequence.prompt_tokens - sequence.prefilled)
        )
        emitted = sequence.made - before
        return RequestStep(sequence.request_id, not before, scheduled, drafted, accepted, emitted)

    def _accepted_drafts(self, rng: random.Random) -> int:
        k = self._profile.num_speculative_tokens
        if k == 0:
            return 0
        accepted = 0
        while accepted < k and rng.random() < self._profile.acceptance_rate:
            accepted += 1
        self._metrics.verified(accepted)
        return accepted

    def _end(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.chunks.put_nowait(None)
        ended_at_s = time.time()
        lasted_s = time.monotonic() - sequence.started_at_s
        self._tally.finish(
            [
                FinishedRequest(
                    request_id=sequence.request_id,
                    started_at_s=ended_at_s - lasted_s,
                    ended_at_s=ended_at_s,
                    prompt_tokens=sequence.prompt_tokens,
                    output_tokens=sequence.made,
                )
            ]
        )
