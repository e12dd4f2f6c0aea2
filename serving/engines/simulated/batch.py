"""Continuous batching over imaginary steps, on the schedule of a `SimulatedProfile`."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serving.config import ROUNDING_S, SimulatedProfile
from serving.engines.base import EngineTally, FinishedRequest
from serving.engines.simulated.metrics import SimulatedMetrics
from serving.engines.steps.log import RequestStep, StepLog, StepWriter

KILLED_STATUS = 70  # of a process that a request killed


class Chunk(NamedTuple):
    """What a step made of one choice: so many tokens, and whether they are its last."""

    choice: int
    tokens: int
    is_last: bool


@dataclass(eq=False)
class SimulatedRequest:
    """One choice of an answer, which is what the engine computes.

    Attributes:
        choice: its index in the answer.
        chunks: gets each chunk as it is made; all choices of an answer have the same.
        next_due_s: no token before the first step that is due then.
        kills: its first step ends the engine's process.
    """

    request_id: str
    choice: int
    prompt_tokens: int
    max_tokens: int
    rng: random.Random
    chunks: asyncio.Queue[Chunk]
    made: int = 0
    prefilled: int = 0  # of the prompt, before the step of the first token
    started_at_s: float = 0.0
    next_due_s: float = 0.0
    kills: bool = False

    def emit(self, tokens: int) -> None:
        tokens = min(tokens, self.max_tokens - self.made)
        self.made += tokens
        self.chunks.put_nowait(Chunk(self.choice, tokens, self.is_done))

    @property
    def is_done(self) -> bool:
        return self.made >= self.max_tokens


@dataclass
class SimulatedAnswer:
    """What one HTTP request asks for: `num_choices` answers to each prompt.

    Attributes:
        prompts: tokens of each prompt.
        choices: those of the first prompt, then those of the next.
        chunks: of all choices, in the order they are made.
    """

    request_id: str
    prompts: Sequence[int]
    choices: list[SimulatedRequest]
    chunks: asyncio.Queue[Chunk]


class SimulatedBatch:
    """The requests inside the engine, waiting and running, and the steps that serve them.

    Attributes:
        tally: the engine's own counts.
        metrics: what it exports.
        step_log: its steps, for recordings.
    """

    def __init__(self, profile: SimulatedProfile, max_num_seqs: int, kv_tokens: int) -> None:
        self._profile = profile
        self._max_num_seqs = max_num_seqs
        self.tally = EngineTally()
        self.metrics = SimulatedMetrics(kv_tokens, profile.num_speculative_tokens)
        self.step_log = StepLog()
        self._waiting: deque[SimulatedRequest] = deque()
        self._running: list[SimulatedRequest] = []
        self._work = asyncio.Event()
        self._serial = itertools.count()
        self._steps = itertools.count(1)
        self._step_writer = StepWriter(self.step_log.path)

    def answer(
        self,
        request_id: str | None,
        prompts: Sequence[int],
        num_choices: int,
        max_tokens: int,
        *,
        kills: bool = False,
    ) -> SimulatedAnswer:
        """An answer of that size, not yet in the engine."""
        serials = [next(self._serial) for _ in range(len(prompts) * num_choices)]
        request_id = request_id or f"simulated-{serials[0]}"
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        choices = [
            SimulatedRequest(
                request_id if len(serials) == 1 else f"{choice}_{request_id}",
                choice,
                prompts[choice // num_choices],
                max_tokens,
                random.Random(f"{self._profile.seed}-{serial}"),
                chunks,
                kills=kills,
            )
            for choice, serial in enumerate(serials)
        ]
        return SimulatedAnswer(request_id, prompts, choices, chunks)

    def join(self, answer: SimulatedAnswer) -> None:
        """Let its choices wait for room in the batch."""
        self._waiting.extend(answer.choices)
        self._work.set()

    def abort(self, answer: SimulatedAnswer) -> None:
        """Take its choices out, wherever they are; nothing happens to those that have ended."""
        for request in answer.choices:
            for place in (self._running, self._waiting):
                if request in place:
                    place.remove(request)
        self.tally.load(len(self._running), len(self._waiting))
        self._show_load()

    async def step_forever(self) -> None:
        """The engine at work; never returns."""
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
            rows = [row for request in batch if (row := self._step(request, due_at_s)) is not None]
            step = next(self._steps)
            if rows and self._step_writer.is_on:
                self._step_writer.write(step, started_ns, ended_ns, rows)
            self.metrics.stepped(len(batch), sum(row.emitted_tokens for row in rows))
            self.tally.step(len(self._running), len(self._waiting), ended_at_s=time.monotonic())

    def _step_s(self, batch: int) -> float:
        return (self._profile.step_ms + self._profile.step_ms_per_request * (batch - 1)) / 1000

    def _schedule(self, due_at_s: float) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting.popleft()
            request.started_at_s = time.monotonic()
            # By the steps' own schedule, not by late wake-ups: the first token's step is then always the same one.
            request.next_due_s = due_at_s + self._profile.ttft_ms / 1000 - ROUNDING_S
            self._running.append(request)
            self.metrics.started(request.prompt_tokens)
        self.tally.load(len(self._running), len(self._waiting))
        self._show_load()

    def _show_load(self) -> None:
        held_tokens = sum(request.prompt_tokens + request.made for request in self._running)
        self.metrics.load(len(self._running), len(self._waiting), held_tokens)

    def _step(self, request: SimulatedRequest, due_at_s: float) -> RequestStep | None:
        """Give a request its tokens, if they are due; what the step did for it, None in a stall."""
        if request.kills:
            os._exit(KILLED_STATUS)
        before = request.made
        if due_at_s < request.next_due_s:
            if before:
                return None
            # A prompt is computed a token a step, and the rest with the first token of the answer.
            request.prefilled += 1
            return RequestStep(request.request_id, True, 1, 0, 0, 0)
        drafted = self._profile.num_speculative_tokens if before else 0
        accepted = self._accepted_drafts(request.rng) if before else 0
        request.emit(self._profile.tokens_per_chunk + accepted)
        if before < self._profile.stall_after_tokens <= request.made:
            request.next_due_s = due_at_s + self._profile.stall_ms / 1000 - ROUNDING_S
        if request.is_done:
            self._end(request)
        scheduled = (
            self._profile.tokens_per_chunk + drafted
            if before
            else max(1, request.prompt_tokens - request.prefilled)
        )
        emitted = request.made - before
        return RequestStep(request.request_id, not before, scheduled, drafted, accepted, emitted)

    def _accepted_drafts(self, rng: random.Random) -> int:
        k = self._profile.num_speculative_tokens
        if k == 0:
            return 0
        accepted = 0
        while accepted < k and rng.random() < self._profile.acceptance_rate:
            accepted += 1
        self.metrics.verified(accepted)
        return accepted

    def _end(self, request: SimulatedRequest) -> None:
        self._running.remove(request)
        ended_at_s = time.time()
        lasted_s = time.monotonic() - request.started_at_s
        self.tally.finish(
            [
                FinishedRequest(
                    request_id=request.request_id,
                    started_at_s=ended_at_s - lasted_s,
                    ended_at_s=ended_at_s,
                    prompt_tokens=request.prompt_tokens,
                    output_tokens=request.made,
                )
            ]
        )
