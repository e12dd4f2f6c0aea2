"""What can be told of an answer's guessability before it is written: cheap features of the prompt, and a kind.

Drafts are guessed from what is there: an answer that repeats the prompt is easy, an invented one is hard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_CHARS = 16_384  # looked at: half from the beginning, half from the end, where tasks stand
NGRAM = 3  # words
TASK_WORDS = 20  # at both ends of a prompt in which a task is looked for
MIN_COPIED_WORDS = 15  # below this there is nothing to copy
MIN_GROUNDS_WORDS = 60  # of a prompt that brings its material along
MIN_RECURRING_SHARE = 0.2
MIN_QUOTED_SHARE = 0.3

_WORD = re.compile(r"\w+")
# None of them may look further from each place of a text that a client made for it.
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_QUOTED = re.compile(r"^>.*$|\"[^\"\n]{20,}\"|“[^“”]{20,}”", re.MULTILINE)
_COPY_TASK = re.compile(
    r"\b(?:repeat|copy|rewrite|reproduce|retype|proofread|correct|fix|edit|refactor|rename|reformat|verbatim|"
    r"word for word)\b",
    re.IGNORECASE,
)


class TextKind(StrEnum):
    """Classes of requests by how guessable their answers are; few, so that each is soon learnt."""

    COPY = "copy"  # the answer repeats most of the prompt
    CODE = "code"
    REPETITIVE = "repetitive"  # the prompt repeats itself, and so may the answer
    GROUNDED = "grounded"  # the prompt brings the material that the answer is made from
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """Shares are 0 to 1.

    Attributes:
        num_words: of what was looked at.
        recurring_share: of the prompt's n-grams of `NGRAM` words, those that stood in it before.
        quoted_share: of its characters, those in quotes of a sentence or more, or in quoted lines.
        has_code: a fence of code.
        asks_to_copy: a word at its beginning or end asks for a text to be given back.
    """

    num_words: int
    recurring_share: float
    quoted_share: float
    has_code: bool
    asks_to_copy: bool

    @property
    def kind(self) -> TextKind:
        """The first that fits, the most telling first."""
        if self.asks_to_copy and self.num_words >= MIN_COPIED_WORDS:
            return TextKind.COPY
        if self.has_code:
            return TextKind.CODE
        if self.recurring_share >= MIN_RECURRING_SHARE:
            return TextKind.REPETITIVE
        if self.num_words >= MIN_GROUNDS_WORDS or self.quoted_share >= MIN_QUOTED_SHARE:
            return TextKind.GROUNDED
        return TextKind.OPEN


def features_of(prompt: str) -> PromptFeatures:
    """Features of a prompt, all messages of a conversation together; at most `MAX_CHARS` are looked at."""
    half = MAX_CHARS // 2
    text = prompt if len(prompt) <= MAX_CHARS else f"{prompt[:half]}\n{prompt[-half:]}"
    words = _WORD.findall(text.lower())
    ends = text if len(words) <= 2 * TASK_WORDS else _ends(text)
    return PromptFeatures(
        num_words=len(words),
        recurring_share=_recurring_share(words),
        quoted_share=sum(len(quoted) for quoted in _QUOTED.findall(text)) / max(1, len(text)),
        has_code=_FENCE.search(text) is not None,
        asks_to_copy=_COPY_TASK.search(ends) is not None,
    )


def _recurring_share(words: list[str]) -> float:
    ngrams = list(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def _ends(text: str) -> str:
    """The words of both ends, where tasks stand; what is between them is material."""
    parts = text.split(maxsplit=TASK_WORDS)
    return " ".join(parts[:TASK_WORDS]) + "\n" + " ".join(text.rsplit(maxsplit=TASK_WORDS)[1:])
