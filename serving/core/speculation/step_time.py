"""How long a step of an engine takes: two forms, both of the positions it computes and the KV cache it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self


class StepTime(Protocol):
    """Seconds of a step by what is in it."""

    def step_s(self, tokens: float, kv_tokens: float) -> float:
        """Seconds of one step.

        Args:
            tokens: positions it computes: prompts, one for each sequence that decodes, and drafts to verify.
            kv_tokens: positions in the KV cache of all its sequences together.
        """
        ...

    @property
    def knee_tokens(self) -> float:
        """Positions at which what they add has grown to what all of a step share: from there width costs."""
        ...


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """t = a + b * tokens + c * kv_tokens, as it is fitted to a machine.

    Source: the batch time of SmartSpec (arXiv 2406.14066), with context and batched tokens as its two variables.
    """

    fixed_s: float
    token_s: float
    kv_token_s: float

    def __post_init__(self) -> None:
        _check_times(fixed_s=self.fixed_s, token_s=self.token_s, kv_token_s=self.kv_token_s)

    def step_s(self, tokens: float, kv_tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens + self.kv_token_s * kv_tokens

    @property
    def knee_tokens(self) -> float:
        """a / b; infinite where a token costs nothing."""
        return _ratio(self.fixed_s, self.token_s)


@dataclass(frozen=True, slots=True)
class RooflineStepTime:
    """t = c * kv_tokens + max(read, b * tokens): weights are read while positions are computed, KV is not hidden.

    Attention at decoding reads about as many bytes as it computes operations, so it stays bound by bandwidth.

    Attributes:
        read_s: to read all weights once.
        token_s: to compute one position.
        kv_token_s: to read the KV cache of one position.

    Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter on inference; Pope et al., arXiv
        2211.05102. That the k + 1 positions of a draft share one read of KV: MagicDec, arXiv 2408.11049.
    """

    read_s: float
    token_s: float
    kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        _check_times(read_s=self.read_s, token_s=self.token_s, kv_token_s=self.kv_token_s)

    @classmethod
    def of_hardware(
        cls,
        *,
        parameters: float,
        weights_bytes: float,
        flops_per_s: float,
        bytes_per_s: float,
        kv_bytes_per_token: float = 0.0,
    ) -> Self:
        """Of a model on a machine; two operations a parameter and position. Rates are those that are reached."""
        return cls(
            weights_bytes / bytes_per_s, 2 * parameters / flops_per_s, kv_bytes_per_token / bytes_per_s
        )

    def step_s(self, tokens: float, kv_tokens: float) -> float:
        return self.kv_token_s * kv_tokens + max(self.read_s, self.token_s * tokens)

    @property
    def knee_tokens(self) -> float:
        """Where reading and arithmetic take equally long, the critical batch; infinite where a token is free."""
        return _ratio(self.read_s, self.token_s)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What making drafts adds to a step: s + passes * (p + q * sequences); nothing without a pass.

    Attributes:
        step_s: once a step, such as the draft's own pass over what was accepted.
        pass_s, pass_sequence_s: of each pass, which gives all drafts one token more, and of one sequence in it.
        least_passes: of a step that drafts nothing; 1 for a learned draft, which keeps a KV cache of its own.
    """

    step_s: float = 0.0
    pass_s: float = 0.0
    pass_sequence_s: float = 0.0
    least_passes: int = 0

    def __post_init__(self) -> None:
        _check_times(step_s=self.step_s, pass_s=self.pass_s, pass_sequence_s=self.pass_sequence_s)
        if self.least_passes not in (0, 1):
            raise ValueError(f"least_passes={self.least_passes} must be 0 or 1")

    def draft_s(self, num_drafts: int, sequences: float) -> float:
        """Seconds to draft k tokens for each of so many sequences."""
        passes = max(num_drafts, self.least_passes)
        if passes == 0 or sequences == 0:
            return 0.0
        return self.step_s + passes * (self.pass_s + self.pass_sequence_s * sequences)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What a step takes longer that computes prompts, beyond its positions.

    Attributes:
        step_s: once a step, such as one without a CUDA graph.
        token_s: of each position of prompts, such as a learned draft that reads them too.
        alone_s: of a step of prompts alone: they come to an engine that was idle.
    """

    step_s: float = 0.0
    token_s: float = 0.0
    alone_s: float = 0.0

    def __post_init__(self) -> None:
        _check_times(step_s=self.step_s, token_s=self.token_s, alone_s=self.alone_s)

    def prompt_s(self, prompt_tokens: float, *, are_alone: bool) -> float:
        """Seconds that a step with so many positions of prompts takes longer."""
        if not prompt_tokens:
            return 0.0
        return self.step_s + self.token_s * prompt_tokens + (self.alone_s if are_alone else 0.0)


def _ratio(shared_s: float, each_s: float) -> float:
    return shared_s / each_s if each_s else float("inf")


def _check_times(**times_s: float) -> None:
    for name, value_s in times_s.items():
        if not 0 <= value_s < float("inf"):
            raise ValueError(f"{name}={value_s:g} must be a number of seconds of at least 0")


FREE_DRAFTS = DraftCost()
FREE_PROMPTS = PromptCost()
