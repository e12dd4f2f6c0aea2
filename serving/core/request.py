"""A request, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended; each ends in exactly one. Label `outcome` in metrics."""

    COMPLETED = "completed"
    REJECTED = "rejected"  # refused by Tandem, or a 4xx from the engine
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"  # the engine broke, or answered 5xx


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """What the scheduler needs to know to queue and place a request.

    Attributes:
        request_id: unique among live requests.
        lane: the lane the client pinned, or None to let the scheduler choose.
        prompt_tokens: estimate of the prompt's length, >= 0.
        max_output_tokens: the most the answer may hold, >= 1.
        needs_plain_decoding: True when it uses sampling options that a speculating engine refuses.
    """

    request_id: str
    lane: str | None
    prompt_tokens: int
    max_output_tokens: int
    needs_plain_decoding: bool = False

    @property
    def reserved_tokens(self) -> int:
        """Tokens booked on a replica while the request runs: prompt + maximum output."""
        return self.prompt_tokens + self.max_output_tokens
