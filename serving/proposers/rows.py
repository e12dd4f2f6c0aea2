"""Which row of this step was which of the last: vLLM gives a proposer its rows, and no names of requests.

A row goes on from where it ended: as many tokens, the last of them and some of all the same. Requests of one size
often end with the same question, so the end alone would mix them up. Of rows that are alike the first stays first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

TAIL_TOKENS = 32
SPREAD_TOKENS = 64  # fewer than these, evenly over the text: what a step looks at is bounded

State = TypeVar("State")
_Mark = tuple[int, bytes]


class Rows(Generic[State]):
    """The state of each row, as long as it is in every step.

    Args:
        begin: the state of a row that begins with these tokens, a numpy array of shape (tokens,).
    """

    def __init__(self, begin: Callable[[Any], State]) -> None:
        self._begin = begin
        self._ended: dict[_Mark, list[State]] = {}

    def follow(
        self, sampled: Sequence[Sequence[int]], num_tokens: Sequence[int], token_ids: Any
    ) -> list[State | None]:
        """The states of a step's rows; None for a row that got no token, as within its prompt.

        Args:
            sampled: the tokens that this step gave each row.
            num_tokens: tokens of each row, those included; it may have more entries.
            token_ids: numpy array whose rows begin with them, shape (at least rows, at least tokens).
        """
        ended: dict[_Mark, list[State]] = {}
        states: list[State | None] = []
        for row, new in enumerate(sampled):
            if not new:
                states.append(None)
                continue
            tokens = token_ids[row, : int(num_tokens[row])]
            before = tokens[: len(tokens) - len(new)]
            known = self._ended.get(_mark(before))
            state = known.pop(0) if known else self._begin(before)
            ended.setdefault(_mark(tokens), []).append(state)
            states.append(state)
        self._ended = ended
        return states


def _mark(tokens: Any) -> _Mark:
    spread = tokens[:: 1 + len(tokens) // SPREAD_TOKENS]
    return len(tokens), tokens[-TAIL_TOKENS:].tobytes() + spread.tobytes()
