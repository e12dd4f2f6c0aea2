"""A simulated replica: continuous batching by the formula of the simulated engine, in virtual time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from serving.config import ROUNDING_S, SimulatedProfile


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """How fast a simulated replica is.

    Attributes:
        profile: times of a step and of the first token, as in the lab's config.
        max_num_seqs: requests in one step at most.
        prefill_ms_per_prompt_token: added to `profile.ttft_ms` for each token of the prompt.
    """

    profile: SimulatedProfile
    max_num_seqs: int
    prefill_ms_per_prompt_token: float = 0.0

    def __post_init__(self) -> None:
        if self.profile.num_speculative_tokens:
            raise ValueError(
                f"a simulated replica drafts nothing: num_speculative_tokens="
                f"{self.profile.num_speculative_tokens} must be 0"
            )

    def step_s(self, batch: int) -> float:
        """Seconds of a step that decodes `batch` requests, >= 1."""
        return (self.profile.step_ms + self.profile.step_ms_per_request * (batch - 1)) / 1000

    def prefill_s(self, prompt_tokens: int) -> float:
        """Seconds from the start of a request to its first token, before rounding up to whole steps."""
        return (self.profile.ttft_ms + self.prefill_ms_per_prompt_token * prompt_tokens) / 1000

    def held_when_full_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds a request holds its slot when all slots are taken all the time."""
        step_s = self.step_s(self.max_num_seqs)
        first_token_steps = max(1, math.ceil((self.prefill_s(prompt_tokens) - ROUNDING_S) / step_s))
        return (first_token_steps + output_tokens - 1) * step_s


@dataclass(eq=False, slots=True)
class EngineSequence:
    """A request in a simulated engine."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    made: int = 0
    first_token_due_s: float = math.inf

    @property
    def is_done(self) -> bool:
        return self.made >= self.output_tokens


@dataclass(eq=False)
class SimulatedReplica:
    """The engine's state between steps. The caller keeps the time: `start_step`, and `end_step` when it says."""

    model: ReplicaModel
    is_stepping: bool = False
    _waiting: deque[EngineSequence] = field(default_factory=deque)
    _running: list[EngineSequence] = field(default_factory=list)

    def join(self, sequence: EngineSequence) -> None:
        """A request arrives; it takes part from the next step on."""
        self._waiting.append(sequence)

    def start_step(self, now_s: float) -> float | None:
        """Begin a step; the instant of its end, or None when there is nothing to do."""
        while self._waiting and len(self._running) < self.model.max_num_seqs:
            sequence = self._waiting.popleft()
            sequence.first_token_due_s = now_s + self.model.prefill_s(sequence.prompt_tokens) - ROUNDING_S
            self._running.append(sequence)
        self.is_stepping = bool(self._running)
        return now_s + self.model.step_s(len(self._running)) if self._running else None

    def end_step(self, now_s: float) -> list[EngineSequence]:
        """End the step; the requests that got a token. Those that are done have left."""
        served = [
            sequence for sequence in self._running if sequence.made or now_s >= sequence.first_token_due_s
        ]
        for sequence in served:
            sequence.made += 1
        self._running = [sequence for sequence in self._running if not sequence.is_done]
        self.is_stepping = False
        return served
