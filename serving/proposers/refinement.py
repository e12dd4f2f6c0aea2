"""Drafts out of a model's own guesses: Jacobi tails and a pool of n-grams. Pure.

A step verifies a draft d_1..d_k behind a text and has the model's own token p_i after d_i, and p_0 after the text.
Where the first j of the draft are right, d_i = p_(i-1), the text grows by p_0..p_j. p_(j+1)..p_k, the *tail*, came
after wrong tokens and are thrown away elsewhere; here they are guesses at what comes next.

- Jacobi: the tail is the next draft. Source: Santilli et al., arXiv 2305.10427.
- Lookahead: what followed what is remembered, in the text and in the guesses, and a draft is looked up token by
  token. Guesses of one step that followed those of the step before make the n-grams of Fu et al., arXiv 2402.02057,
  without that paper's own window of guesses and with one candidate for a step.

Verification is the engine's own, so whatever is drafted here changes no answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from serving.config import RefinementConfig


class NgramPool:
    """The token that followed last after each run of `lookup_min`..`lookup_max` tokens.

    It holds at most `max_ngrams`; those that were not met again for longest go first.
    """

    def __init__(self, lookup_min: int, lookup_max: int, max_ngrams: int) -> None:
        self._lengths = range(lookup_max, lookup_min - 1, -1)
        self._max_ngrams = max_ngrams
        self._next: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def learn(self, tokens: Sequence[int], following: Sequence[int]) -> None:
        """Note what followed the last so many of these tokens: the last of `following` came after all of them."""
        first = len(tokens) - len(following) + 1
        for end, token in enumerate(following, start=first):
            for length in self._lengths:
                if length <= end:
                    key = tuple(tokens[end - length : end])
                    self._next[key] = token
                    self._next.move_to_end(key)
        while len(self._next) > self._max_ngrams:
            self._next.popitem(last=False)

    def next(self, tokens: Sequence[int]) -> int | None:
        """What followed last after the longest known end of these tokens; None where none is known."""
        for length in self._lengths:
            if length <= len(tokens) and (token := self._next.get(tuple(tokens[-length:]))) is not None:
                return token
        return None


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step said of one row.

    Attributes:
        drafted: tokens that were verified, none where nothing was drafted.
        predicted: the model's own token after the text and after each of them, one more than `drafted`; empty
            where nothing was drafted for any row.
        num_new: tokens that the text grew by, at least 1.
    """

    drafted: Sequence[int]
    predicted: Sequence[int]
    num_new: int


class Row:
    """What is remembered of one running request."""

    def __init__(self, settings: RefinementConfig) -> None:
        self._settings = settings
        self._pool = NgramPool(settings.lookup_min, settings.lookup_max, settings.max_ngrams)
        self._recent: list[int] = []
        self.num_tokens = 0  # of the text, as far as it was told

    @property
    def num_ngrams(self) -> int:
        """How many n-grams are remembered."""
        return len(self._pool)

    def draft(self, more: Sequence[int], verified: Verified, max_tokens: int) -> list[int]:
        """The next guesses, at most `max_tokens`.

        Args:
            more: tokens of the text that the row was not told yet; the last `verified.num_new` of them are new.
        """
        text = [*self._recent, *more]
        self.num_tokens += len(more)
        if self._settings.pool:
            self._learn(text, len(more), verified)
        tail = verified.predicted[verified.num_new :] if self._settings.tails else ()
        self._recent = text[-self._settings.lookup_max :]
        return self._merge(tail, max_tokens)

    def _learn(self, text: list[int], num_more: int, verified: Verified) -> None:
        before = text[: len(text) - verified.num_new]
        if guessed := verified.predicted[verified.num_new :]:
            self._pool.learn([*before, *verified.drafted], guessed)
        # The text comes last: what it says counts more than a guess.
        self._pool.learn(text[:-1], text[-num_more:][-self._settings.max_ngrams :])

    def _merge(self, tail: Sequence[int], max_tokens: int) -> list[int]:
        """For each place what the pool knows, else what the tail has, else the token before it."""
        tokens = list(self._recent)
        known = len(tokens)
        for place in range(max_tokens):
            token = self._pool.next(tokens)
            if token is None and self._settings.tails:
                token = tail[place] if place < len(tail) else tokens[-1]
            if token is None:
                break
            tokens.append(token)
        return tokens[known:]


class Rows:
    """The requests of an engine's step, in its order. One that is not in a step is forgotten."""

    def __init__(self, settings: RefinementConfig) -> None:
        self._settings = settings
        self._rows: dict[str, Row] = {}
        self._verified: list[tuple[list[int], list[int]]] = []

    def see(
        self, request_ids: Sequence[str], num_drafts: Sequence[int], drafted: list[int], predicted: list[int]
    ) -> None:
        """Take a step that is about to be verified.

        Args:
            num_drafts: drafted tokens of each request; empty where none has any.
            drafted: those tokens, request after request.
            predicted: the model's own after each request's text and each of its drafted tokens.
        """
        rows = self._rows
        self._rows = {name: rows.get(name) or Row(self._settings) for name in request_ids}
        self._verified = []
        start = 0
        for before, count in enumerate(num_drafts):
            end = start + count
            self._verified.append((drafted[start:end], predicted[start + before : end + before + 1]))
            start = end
        if not num_drafts:
            self._verified = [([], [])] * len(request_ids)

    def __iter__(self) -> Iterator[tuple[Row, list[int], list[int]]]:
        """Each with what was drafted for it, and what the model predicted."""
        for row, (drafted, predicted) in zip(self._rows.values(), self._verified, strict=True):
            yield row, drafted, predicted
