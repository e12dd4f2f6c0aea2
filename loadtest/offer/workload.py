"""What is asked of the model: prompts from texts of our own or of yours, answers of a fixed length.

chat, rag, copy, edit, story, shared-prefix, multi-turn     texts of our own: `loadtest.offer.prompts`
mixed, mixed:chat=3,copy=1                                  each request from one of several, drawn by weight
file:PATH.jsonl                                             your own prompts: `loadtest.offer.prompt_files`
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from loadtest.offer import prompts
from loadtest.offer.load import Arrival
from loadtest.offer.prompt_files import Prompt, read_prompt_file
from loadtest.offer.prompt_tokens import BYTE_ESTIMATE, TokenCounter
from loadtest.offer.prompts import Slot
from loadtest.offer.request_body import ChatRequest, Dialect, Message, build_body

DEFAULT_OUTPUT_TOKENS = 48
MAX_SIZE_TOKENS = 1_000_000
MAX_WEIGHT = 1000
MIXED_WEIGHTS = {"chat": 4, "rag": 2, "edit": 2, "story": 2}


@dataclass(frozen=True, slots=True)
class Workload:
    """Numbered requests in an order that the seed decides.

    Attributes:
        prompt_tokens: size of a prompt by `counter`, chat template left out; None: as long as its text is.
        output_tokens: length of an answer where nothing else says it.
        counter: counts tokens.
        write: makes the prompt of a slot; None when the workload is mixed of others.
        parts: what it is mixed of, with weights.
        notes: what of a file is not sent, a line each.
    """

    name: str
    prompt_tokens: int | None
    output_tokens: int
    counter: TokenCounter
    write: Callable[[Slot], Prompt] | None = None
    parts: tuple[tuple[Workload, int], ...] = ()
    notes: tuple[str, ...] = ()

    def request(self, seed: int, number: int, arrival: Arrival | None = None) -> ChatRequest:
        """Request `number` (>= 0) in the order of `seed`; the lengths of `arrival`, if it has any, win."""
        if self.write is None:
            return self.part(seed, number).request(seed, number, arrival)
        arrival = arrival or Arrival(0)
        slot = Slot(seed, number, self.counter, self.prompt_tokens, arrival.prompt_tokens)
        prompt = self.write(slot)
        output_tokens = arrival.output_tokens or prompt.output_tokens or self.output_tokens
        return ChatRequest(prompt.messages, output_tokens, prompt.tools)

    def part(self, seed: int, number: int) -> Workload:
        """Of a mixed workload, the one that request `number` is drawn from; else itself."""
        if not self.parts:
            return self
        parts, weights = zip(*self.parts, strict=True)
        (part,) = random.Random(f"{self.name}/{seed}/{number}").choices(parts, weights)
        found: Workload = part
        return found

    def body(
        self,
        *,
        model: str,
        seed: int,
        number: int,
        arrival: Arrival | None = None,
        dialect: Dialect = Dialect.TANDEM,
        salt: str = "",
        salts_text: bool = False,
    ) -> dict[str, Any]:
        """The body to send for `request` of the same arguments; the others are those of `build_body`."""
        return build_body(
            self.request(seed, number, arrival),
            model=model,
            seed=seed,
            dialect=dialect,
            salt=salt,
            salts_text=salts_text,
        )


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A workload of ours; `prompt_tokens` None: as long as its text is, unless a size is asked for."""

    write: Callable[[Slot], tuple[Message, ...]]
    prompt_tokens: int | None
    output_tokens: int


_BUILT_IN = {
    "chat": _BuiltIn(prompts.chat, 128, DEFAULT_OUTPUT_TOKENS),
    "rag": _BuiltIn(prompts.rag, 1024, 32),
    "copy": _BuiltIn(prompts.copy, None, DEFAULT_OUTPUT_TOKENS),
    "edit": _BuiltIn(prompts.edit, 256, 96),
    "story": _BuiltIn(prompts.story, None, DEFAULT_OUTPUT_TOKENS),
    "shared-prefix": _BuiltIn(prompts.shared_prefix, 512, 32),
    "multi-turn": _BuiltIn(prompts.multi_turn, 640, DEFAULT_OUTPUT_TOKENS),
}
WORKLOAD_NAMES = (*_BUILT_IN, "mixed")


@cache
def load_workload(
    name: str,
    *,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    counter: TokenCounter = BYTE_ESTIMATE,
) -> Workload:
    """The workload of that name: one of `WORKLOAD_NAMES`, `mixed:NAME=WEIGHT,...` or `file:PATH.jsonl`.

    Args:
        prompt_tokens: size of a prompt, instead of the workload's own.
        output_tokens: length of an answer, instead of the workload's own; rows of a file and traces keep theirs.

    Raises:
        ValueError: there is none, its file cannot be read, or a size is out of bounds.
    """
    for size, tokens in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if tokens is not None and not 1 <= tokens <= MAX_SIZE_TOKENS:
            raise ValueError(f"{size}={tokens} must be in 1..{MAX_SIZE_TOKENS}")
    kind, _, rest = name.partition(":")
    if kind == "file":
        if prompt_tokens is not None:
            raise ValueError(
                f"workload {name!r}: prompt_tokens={prompt_tokens}, but a file's prompts are sent as they are"
            )
        found = read_prompt_file(Path(rest))

        def drawn(slot: Slot) -> Prompt:
            return found.prompts[prompts.place_in_order(rest, slot, len(found.prompts))]

        return Workload(name, None, output_tokens or DEFAULT_OUTPUT_TOKENS, counter, drawn, notes=found.notes)
    if kind == "mixed":
        load = partial(
            load_workload, prompt_tokens=prompt_tokens, output_tokens=output_tokens, counter=counter
        )
        parts = tuple((load(part), weight) for part, weight in _weights(name, rest).items())
        return Workload(name, prompt_tokens, output_tokens or DEFAULT_OUTPUT_TOKENS, counter, parts=parts)
    if name not in _BUILT_IN:
        raise ValueError(
            f"workload {name!r} is unknown; there are {', '.join(WORKLOAD_NAMES)}, file:PATH.jsonl"
        )
    built_in = _BUILT_IN[name]

    def write(slot: Slot) -> Prompt:
        return Prompt(built_in.write(slot))

    return Workload(
        name, prompt_tokens or built_in.prompt_tokens, output_tokens or built_in.output_tokens, counter, write
    )


def _weights(name: str, text: str) -> Mapping[str, int]:
    if not text:
        return MIXED_WEIGHTS
    weights = {}
    for entry in text.split(","):
        part, _, weight = entry.partition("=")
        if part not in _BUILT_IN or part in weights:
            raise ValueError(f"workload {name!r}: {part!r} must be one of {', '.join(_BUILT_IN)}, each once")
        if not (weight.isascii() and weight.isdigit() and 1 <= int(weight[:9]) <= MAX_WEIGHT):
            raise ValueError(
                f"workload {name!r}: weight {weight!r} of {part} must be a whole number in 1..{MAX_WEIGHT}"
            )
        weights[part] = int(weight)
    return weights
