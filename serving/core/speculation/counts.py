"""Figures of speculative decoding, from the engine's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Counters of one engine, or their difference over a window.

    Attributes:
        num_drafts: speculative steps, one per request and engine step that carried a draft.
        draft_tokens: tokens proposed in those steps.
        accepted_tokens: proposed tokens that the model confirmed.
    """

    num_drafts: int
    draft_tokens: int
    accepted_tokens: int

    def __post_init__(self) -> None:
        if not 0 <= self.accepted_tokens <= self.draft_tokens:
            raise ValueError(
                f"accepted_tokens={self.accepted_tokens} is outside 0..draft_tokens={self.draft_tokens}"
            )

    def __sub__(self, earlier: SpeculationCounts) -> SpeculationCounts:
        return SpeculationCounts(
            self.num_drafts - earlier.num_drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
        )


def acceptance_rate(counts: SpeculationCounts) -> float | None:
    """Accepted draft tokens / draft tokens, in [0, 1]; None when nothing was drafted."""
    return counts.accepted_tokens / counts.draft_tokens if counts.draft_tokens else None


def mean_acceptance_length(counts: SpeculationCounts) -> float | None:
    """Tokens per speculative step: 1 + accepted / drafts, the model's own token counted; None without drafts.

    Source: vLLM's definition of mean acceptance length.
    """
    return 1 + counts.accepted_tokens / counts.num_drafts if counts.num_drafts else None


def passes_per_token(counts: SpeculationCounts) -> float | None:
    """Passes of the model for a token of one answer, in steps with a draft: 1 / `mean_acceptance_length`.

    In (0, 1]; plain decoding has 1. None without drafts. Steps without a draft are not among those counted.
    """
    length = mean_acceptance_length(counts)
    return None if length is None else 1 / length
