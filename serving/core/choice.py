"""Why a request runs where it does, when the scheduler chose its lane by what it expects of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from serving.core.speculation.text_kind import TextKind


class Why(StrEnum):
    """What decided. Label `why` in metrics."""

    SCORE = "score"  # the best score
    KEPT = "kept"  # another was better, by less than the margin
    ONLY_CHOICE = "only_choice"  # all replicas that could take it are of one lane


@dataclass(frozen=True, slots=True)
class LaneScore:
    """What was expected of the best replica of a lane, with the request on it.

    Attributes:
        score: tokens/s that all who run there together gain by the request. Of lanes that share cores: over the
            best that those cores could give without it, so all but the best may be below 0.
        tokens_per_s: of all on the same cores then.
        batch: sequences that would decode together; on shared cores the mean of what the last requests found.
        context_tokens: their mean context.
        num_drafts: k at that batch.
        tokens_per_step: expected of this request.
        num_sharing: replicas that take turns on the same cores, this one included.
        correction: what the lane gave lately at such a batch, over what its profile says; in the figures above.
    """

    lane: str
    replica_id: str
    score: float
    tokens_per_s: float
    batch: float
    context_tokens: float
    num_drafts: int
    tokens_per_step: float
    num_sharing: int
    correction: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice between lanes; `scores` has the best replica of each that could take the request, best first.

    None of a lane that is the only one of its model and of which nothing was measured.
    """

    lane: str
    kind: TextKind
    why: Why
    scores: tuple[LaneScore, ...]

    def __str__(self) -> str:
        """In a line, as a header and a trace show it; scores in tokens/s."""
        by_lane = {each.lane: each.score for each in self.scores}
        others = ",".join(f"{lane}:{score:.1f}" for lane, score in by_lane.items() if lane != self.lane)
        parts = [f"lane={self.lane}"]
        parts += [f"score={by_lane[self.lane]:.1f}"] if by_lane else []
        parts += [f"other={others}"] if others else []
        return " ".join([*parts, f"kind={self.kind}", f"why={self.why}"])
