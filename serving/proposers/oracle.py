"""Drafts with the acceptance that a study wants: a remembered greedy answer, with errors put in. For studies only.

The first time a prompt is asked its answer is remembered; from then on drafts are taken from it. Only greedy
answers are the same again. vLLM finds `Oracle` by name: `method: custom_class`.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from serving.proposers.rows import Rows
from serving.proposers.settings import settings_of

MAX_ANSWERS = 10_000


@dataclass(slots=True)
class Replay:
    """An answer that is written, perhaps again.

    Attributes:
        answer: what is known of it, shared by all rows with its prompt.
        num_written: tokens of it that this row has.
    """

    answer: list[int] = field(default_factory=list)
    num_written: int = 0

    def follow(self, new: Sequence[int]) -> None:
        """The row got these tokens; where they are not those that were known, they are now."""
        end = self.num_written + len(new)
        # Not behind a gap: another row with this prompt may have said something else, and be behind.
        is_in_place = self.num_written <= len(self.answer)
        if is_in_place and self.answer[self.num_written : end] != list(new):
            self.answer[self.num_written :] = new
        self.num_written = end

    def next(self, num_tokens: int) -> list[int]:
        """What is known to follow, so many tokens at most."""
        return self.answer[self.num_written : self.num_written + num_tokens]


def with_errors(
    draft: Sequence[int], rates: Sequence[float], vocabulary_size: int, rng: random.Random
) -> list[int]:
    """A right draft made wrong as often as asked.

    Args:
        rates: share of drafts whose first i tokens are to be right, i = 1, 2, ...; at least as many as
            the draft has.
    """
    made = []
    before = 1.0
    for token, rate in zip(draft, rates, strict=False):
        is_right = rng.random() * before < rate
        made.append(token if is_right else (token + 1) % vocabulary_size)
        before = rate
    return made


class Oracle:
    """vLLM's interface of a proposer."""

    def __init__(self, vllm_config: Any) -> None:
        settings = settings_of(vllm_config)
        self._rates: list[float] = settings["rates"]
        self._rng = random.Random(settings["seed"])
        self._vocabulary_size = vllm_config.model_config.get_vocab_size()
        self._answers: OrderedDict[bytes, list[int]] = OrderedDict()
        self._rows = Rows(self._begin)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none; vLLM's CPU engine calls it all the same."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row; rows are as `Rows.follow` has them."""
        drafts: list[list[int]] = []
        rows = self._rows.follow(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        for new, replay in zip(sampled_token_ids, rows, strict=True):
            if replay is None:
                drafts.append([])
                continue
            replay.follow(new)
            right = replay.next(len(self._rates))
            drafts.append(with_errors(right, self._rates, self._vocabulary_size, self._rng))
        return drafts

    def _begin(self, prompt: Any) -> Replay:
        key = blake2b(prompt.tobytes(), digest_size=16).digest()
        answer = self._answers.setdefault(key, [])
        self._answers.move_to_end(key)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)  # asked longest ago
        return Replay(answer)
