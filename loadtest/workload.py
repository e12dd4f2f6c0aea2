"""What is asked of the model: prompts from texts of our own, answers of a fixed length.

A prompt is a pure function of (workload, seed, number), so each lane can be given the same work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "texts"
DEFAULT_OUTPUT_TOKENS = 48

# The wordings that the default model, of 135M parameters, obeys best: it then repeats nearly word for word.
COPY_TASKS = (
    "Repeat the following text exactly, word for word:\n\n{text}",
    "Copy the following text exactly, without changing a word:\n\n{text}",
    "Repeat the following text exactly, word for word, and sign it with the name Ada at the end:\n\n{text}",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of prompts in a fixed order; the seed decides in which order they are used."""

    name: str
    prompts: tuple[str, ...]

    def prompt(self, seed: int, number: int) -> str:
        """Prompt `number` (>= 0) in the order of `seed`; none comes back before all were used."""
        return self.prompts[self._order(seed)[number % len(self.prompts)]]

    def body(self, *, model: str, seed: int, number: int, output_tokens: int) -> dict[str, Any]:
        """A streaming chat request whose answer is exactly `output_tokens` long, decoded greedily."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt(seed, number)}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "seed": seed,
            "min_tokens": output_tokens,
            "max_tokens": output_tokens,
            "ignore_eos": True,
        }

    def _order(self, seed: int) -> tuple[int, ...]:
        return _shuffled(self.name, len(self.prompts), seed)


@cache
def _shuffled(name: str, count: int, seed: int) -> tuple[int, ...]:
    numbers = list(range(count))
    random.Random(f"{name}/{seed}").shuffle(numbers)
    return tuple(numbers)


def passages() -> tuple[str, ...]:
    """Every passage of the texts, one paragraph each."""
    files = sorted(TEXTS.glob("passages_*.txt"))
    return tuple(part.strip() for file in files for part in file.read_text().split("\n\n") if part.strip())


def _copy() -> Workload:
    """Answers that repeat their prompt. Passages are longer than an answer, so copying does not run out."""
    return Workload("copy", tuple(task.format(text=text) for task in COPY_TASKS for text in passages()))


def _story() -> Workload:
    """Open-ended answers, which an n-gram draft can hardly guess."""
    return Workload("story", tuple((TEXTS / "story_prompts.txt").read_text().splitlines()))


_BUILDERS: dict[str, Callable[[], Workload]] = {"copy": _copy, "story": _story}
WORKLOAD_NAMES = tuple(_BUILDERS)


@cache
def load_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: there is none; the text lists those there are.
    """
    if name not in _BUILDERS:
        raise ValueError(f"workload {name!r} is unknown; there are {', '.join(WORKLOAD_NAMES)}")
    return _BUILDERS[name]()
