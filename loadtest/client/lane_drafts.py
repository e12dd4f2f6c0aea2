"""What lanes draft, by the config that a lab shows of them; a lab of another version may show other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def chooses_drafts(lane: Mapping[str, Any]) -> bool:
    """Whether the lane of that config drafts more or fewer tokens as the load is."""
    speculation = lane.get("speculation") or {}
    return (
        speculation.get("method") == "adaptive"
        or speculation.get("num_speculative_tokens_per_batch_size") is not None
    )


def num_drafts_of(lane: Mapping[str, Any]) -> int:
    """Draft tokens of a step, of the lane of that config, at most; 0 where it has none."""
    drafts = lane.get("speculation") or lane.get("refinement") or {}
    return int(drafts.get("num_speculative_tokens") or 0)


def drafts_by(lane: Mapping[str, Any]) -> str:
    """The method that makes the drafts of the lane of that config; empty where it has none."""
    speculation = lane.get("speculation") or {}
    return str(speculation.get("drafter" if speculation.get("method") == "adaptive" else "method", ""))
