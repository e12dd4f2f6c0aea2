"""Speculative decoding in figures: what engines count, what a step costs, and when drafts pay. Pure."""

from serving.core.speculation.counts import (
    SpeculationCounts,
    acceptance_rate,
    mean_acceptance_length,
    passes_per_token,
)

__all__ = ["SpeculationCounts", "acceptance_rate", "mean_acceptance_length", "passes_per_token"]
