"""What is asked of the model: prompts from texts of our own, answers of a fixed length.

A prompt is a pure function of (workload, seed, number), so each lane can be given the same work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from loadtest.load import Arrival
from loadtest.prompt_tokens import BYTE_ESTIMATE, TokenCounter
from loadtest.request_body import ChatRequest, Dialect, Message, build_body

TEXTS = Path(__file__).parent / "texts"
DEFAULT_OUTPUT_TOKENS = 48

# The wordings that the default model, of 135M parameters, obeys best: it then repeats nearly word for word.
COPY_TASKS = (
    "Repeat the following text exactly, word for word:\n\n{text}",
    "Copy the following text exactly, without changing a word:\n\n{text}",
    "Repeat the following text exactly, word for word, and sign it with the name Ada at the end:\n\n{text}",
)


Write = Callable[[int, int, int | None], tuple[tuple[Message, ...], int | None]]
"""From seed, number and prompt tokens to messages, and to an output length where the text itself has one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Numbered requests in an order that the seed decides.

    Attributes:
        prompt_tokens: size of a prompt by `counter`, chat template left out; None: as long as its text is.
        output_tokens: length of an answer, where the text or a trace does not give its own.
        counter: counts tokens.
        write: makes the messages.
    """

    name: str
    prompt_tokens: int | None
    output_tokens: int
    counter: TokenCounter
    write: Write

    def request(self, seed: int, number: int, arrival: Arrival | None = None) -> ChatRequest:
        """Request `number` (>= 0) in the order of `seed`; the lengths of `arrival`, if it has any, win."""
        arrival = arrival or Arrival(0)
        messages, own_output = self.write(seed, number, arrival.prompt_tokens or self.prompt_tokens)
        return ChatRequest(messages, arrival.output_tokens or own_output or self.output_tokens)

    def body(
        self,
        *,
        model: str,
        seed: int,
        number: int,
        output_tokens: int | None = None,
        arrival: Arrival | None = None,
        dialect: Dialect = Dialect.TANDEM,
        salt: str = "",
        salts_text: bool = False,
    ) -> dict[str, Any]:
        """The body to send; see `build_body`. `output_tokens`, if given, wins over every other length."""
        request = self.request(seed, number, arrival)
        if output_tokens is not None:
            request = replace(request, output_tokens=output_tokens)
        return build_body(request, model=model, seed=seed, dialect=dialect, salt=salt, salts_text=salts_text)


@cache
def _shuffled(name: str, count: int, seed: int) -> tuple[int, ...]:
    numbers = list(range(count))
    random.Random(f"{name}/{seed}").shuffle(numbers)
    return tuple(numbers)


def passages() -> tuple[str, ...]:
    """Every passage of the texts, one paragraph each."""
    files = sorted(TEXTS.glob("passages_*.txt"))
    return tuple(part.strip() for file in files for part in file.read_text().split("\n\n") if part.strip())


def _listed(name: str, prompts: tuple[str, ...]) -> Write:
    def write(seed: int, number: int, prompt_tokens: int | None) -> tuple[tuple[Message, ...], int | None]:
        prompt = prompts[_shuffled(name, len(prompts), seed)[number % len(prompts)]]
        return ({"role": "user", "content": prompt},), None

    return write


def _copy() -> Write:
    """Answers that repeat their prompt. Passages are longer than an answer, so copying does not run out."""
    return _listed("copy", tuple(task.format(text=text) for task in COPY_TASKS for text in passages()))


def _story() -> Write:
    """Open-ended answers, which an n-gram draft can hardly guess."""
    return _listed("story", tuple((TEXTS / "story_prompts.txt").read_text().splitlines()))


_BUILDERS: dict[str, Callable[[], Write]] = {"copy": _copy, "story": _story}
WORKLOAD_NAMES = tuple(_BUILDERS)


@cache
def load_workload(
    name: str,
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    counter: TokenCounter = BYTE_ESTIMATE,
) -> Workload:
    """The workload of that name, with sizes other than its own where given.

    Raises:
        ValueError: there is none, or a size is out of bounds.
    """
    if name not in _BUILDERS:
        raise ValueError(f"workload {name!r} is unknown; there are {', '.join(WORKLOAD_NAMES)}")
    return Workload(name, prompt_tokens, output_tokens or DEFAULT_OUTPUT_TOKENS, counter, _BUILDERS[name]())
