"""The wordings of each workload, around texts of our own.

A prompt is a pure function of (workload, seed, number, size), so each lane can be given the same work.
Each number gets a passage of its own until all were used, then sentences from all over in an order of its own:
two prompts of a run share a beginning only where their workload says so.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

from loadtest.offer.prompt_tokens import TokenCounter, fill
from loadtest.offer.request_body import Message

Choice = TypeVar("Choice")

TEXTS = Path(__file__).parent / "texts"

# The wordings that the default model, of 135M parameters, obeys best: it then repeats nearly word for word.
COPY_TASKS = (
    "Repeat the following text exactly, word for word:\n\n{text}",
    "Copy the following text exactly, without changing a word:\n\n{text}",
    "Repeat the following text exactly, word for word, and sign it with the name Ada at the end:\n\n{text}",
)
SENTENCES_PER_PASSAGE = 6
QUESTIONS_PER_CONTEXT = 4  # of `rag`: requests that ask about the same sources
SHARED_SHARE = 7 / 8  # of a `shared-prefix` prompt
TURNS = 5  # of a `multi-turn` conversation
CONVERSATIONS_AT_ONCE = 8  # a turn comes this many requests after the turn before it
ANSWER_SHARE = 0.4  # of what a further turn adds: the scripted answer; the rest is the next question


@dataclass(frozen=True, slots=True)
class Slot:
    """Which prompt is wanted.

    Attributes:
        tokens: the workload's size of a prompt; None: as long as its text is.
        recorded_tokens: size of this one prompt, from a recorded trace.
    """

    seed: int
    number: int
    counter: TokenCounter
    tokens: int | None = None
    recorded_tokens: int | None = None

    @property
    def size_tokens(self) -> int | None:
        return self.recorded_tokens or self.tokens


@cache
def passages() -> tuple[str, ...]:
    """Every passage of the texts, one paragraph each."""
    files = sorted(TEXTS.glob("passages_*.txt"))
    return tuple(part.strip() for file in files for part in file.read_text().split("\n\n") if part.strip())


@cache
def code_snippets() -> tuple[str, ...]:
    """Functions and classes, each of which begins with its name at the margin."""
    text = (TEXTS / "code_snippets.txt").read_text()
    return tuple(part.strip() for part in re.split(r"\n\n(?=def |class )", text))


def copy(slot: Slot) -> tuple[Message, ...]:
    """Repeat a text. Passages are longer than a usual answer, so copying does not run out."""
    tasks = [(task, text) for task in COPY_TASKS for text in passages()]
    lap, (task, text) = _draw("copy", slot, tasks)
    key = f"copy/{slot.seed}/{slot.number}"
    return _user(_sized(slot, lambda body: task.format(text=body), _loose(key) if lap else _then(text, key)))


def story(slot: Slot) -> tuple[Message, ...]:
    """Open-ended answers, which an n-gram draft can hardly guess."""
    lap, task = _draw("story", slot, _lines("story_prompts"))
    if lap:
        # All were used once: the same tale in another place, with another name.
        settings = [(place, name) for place in _lines("places") for name in _lines("names")]
        place, name = settings[_shuffled("story setting", len(settings), slot.seed)[lap % len(settings)]]
        task = f"{task} It is set in {place}, and somebody in it is called {name}."
    if slot.size_tokens is None:
        return _user(task)
    return _user(
        _sized(slot, lambda body: f"{task} Let it begin like this:\n\n{body}", _prose("story", slot))
    )


def chat(slot: Slot) -> tuple[Message, ...]:
    """A short text and a question about it."""
    _, question = _draw("chat question", slot, _lines("chat_questions"))
    return _user(_sized(slot, lambda body: f"A text:\n\n{body}\n\n{question}", _prose("chat", slot)))


def rag(slot: Slot) -> tuple[Message, ...]:
    """Long sources and a question; each `QUESTIONS_PER_CONTEXT` requests share their sources."""
    sources = _prose("rag", replace(slot, number=slot.number // QUESTIONS_PER_CONTEXT))
    _, question = _draw("rag question", slot, _lines("source_questions"))
    question = f"Question: {question} Answer in one or two sentences, from the sources only."
    return _user(_sized(slot, lambda body: f"Sources:\n\n{body}\n\n{question}", sources))


def edit(slot: Slot) -> tuple[Message, ...]:
    """Code to be written out again with one name changed."""
    lap, code = _draw("edit", slot, code_snippets())
    old = re.split(r"[ (:]", code)[1]
    names = _lines("new_names")
    # Each lap over the code takes the next name for it; when all were used, the names get a number.
    new = names[(lap + slot.number % len(code_snippets())) % len(names)]
    new += f"_{lap // len(names) + 1}" if lap >= len(names) else ""
    task = f"Repeat the following code exactly, with the name `{old}` changed to `{new}`:"
    others = _shuffled_forever(code_snippets(), f"edit/{slot.seed}/{slot.number}")
    return _user(
        _sized(slot, lambda body: f"{task}\n\n```python\n{body}\n```", itertools.chain((code,), others))
    )


def shared_prefix(slot: Slot) -> tuple[Message, ...]:
    """One long system prompt for all requests of a seed, then a short text and a question."""
    assert slot.tokens is not None
    size_tokens = slot.size_tokens or slot.tokens
    shared_tokens = int(min(size_tokens, slot.tokens) * SHARED_SHARE)
    system, system_tokens = _shared_system(slot.seed, shared_tokens, slot.counter)
    _, question = _draw("shared-prefix question", slot, _lines("chat_questions"))
    asked = _fit(slot.counter, size_tokens - system_tokens, _asking(question), _prose("shared-prefix", slot))
    return {"role": "system", "content": system}, *_user(asked)


@lru_cache(maxsize=64)
def _shared_system(seed: int, tokens: int, counter: TokenCounter) -> tuple[str, int]:
    texts = _shuffled_forever(passages(), f"shared-prefix/{seed}")
    system = _fit(counter, tokens, lambda body: f"You answer visitors. Handbook:\n\n{body}", texts)
    return system, counter.count(system)


def multi_turn(slot: Slot) -> tuple[Message, ...]:
    """A scripted conversation whose turns grow: a turn's messages begin with those of the turn before.

    The size is that of the last turn; a trace's is that of the turn itself.
    The answers in it are scripted and not the model's, so that each lane does the same work.
    """
    assert slot.tokens is not None
    batch, place = divmod(slot.number, TURNS * CONVERSATIONS_AT_ONCE)
    turn, place_in_batch = divmod(place, CONVERSATIONS_AT_ONCE)
    conversation = replace(slot, number=batch * CONVERSATIONS_AT_ONCE + place_in_batch)
    step_tokens = slot.recorded_tokens / (turn + 1) if slot.recorded_tokens else slot.tokens / TURNS
    messages, _ = _conversation(conversation, turn, step_tokens)
    return messages


@lru_cache(maxsize=1024)
def _conversation(slot: Slot, turn: int, step_tokens: float) -> tuple[tuple[Message, ...], int]:
    """The messages of a conversation up to its question `turn`, and their tokens."""
    counter = slot.counter
    messages, used_tokens = _conversation(slot, turn - 1, step_tokens) if turn else ((), 0)
    # What is left of the whole, not of this turn: faults of a token or two do not add up.
    room_tokens = round(step_tokens * (turn + 1)) - used_tokens
    texts = _prose(f"multi-turn {turn}", slot)
    answer_tokens = 0
    if turn:
        answer = fill(counter, texts, max(1, round(room_tokens * ANSWER_SHARE)))
        messages = (*messages, {"role": "assistant", "content": answer})
        answer_tokens = counter.count(answer)
    _, question = _draw(f"multi-turn question {turn}", slot, _lines("chat_questions"))
    asked = _fit(counter, room_tokens - answer_tokens, _asking(question), texts)
    return (*messages, *_user(asked)), used_tokens + answer_tokens + counter.count(asked)


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _asking(question: str) -> Callable[[str], str]:
    return lambda body: f"{body}\n\n{question}"


def _sized(slot: Slot, wording: Callable[[str], str], texts: Iterator[str]) -> str:
    if slot.size_tokens is None:
        return wording(next(texts))
    return _fit(slot.counter, slot.size_tokens, wording, texts)


def _fit(counter: TokenCounter, tokens: int, wording: Callable[[str], str], texts: Iterator[str]) -> str:
    """The wording around as much text as makes it that long; the text alone where not even the wording fits."""
    room_tokens = tokens - counter.count(wording(""))
    return (
        wording(fill(counter, texts, room_tokens))
        if room_tokens > 0
        else fill(counter, texts, max(1, tokens))
    )


def _draw(name: str, slot: Slot, choices: Sequence[Choice]) -> tuple[int, Choice]:
    """How often all choices were used before this number, and this number's choice.

    Args:
        name: of this draw and no other: draws of one name come in one order.
    """
    return slot.number // len(choices), choices[place_in_order(name, slot, len(choices))]


def place_in_order(name: str, slot: Slot, count: int) -> int:
    """A place in 0..count-1; none comes back before all were used."""
    return _shuffled(name, count, slot.seed)[slot.number % count]


def _prose(name: str, slot: Slot) -> Iterator[str]:
    """Endless prose for a number: its own passage and then others, or loose sentences once all were used."""
    lap, passage = _draw(name, slot, passages())
    key = f"{name}/{slot.seed}/{slot.number}"
    return _loose(key) if lap else _then(passage, key)


def _then(passage: str, key: str) -> Iterator[str]:
    return itertools.chain((passage,), _shuffled_forever(passages(), key))


def _loose(key: str) -> Iterator[str]:
    """Passages of sentences from all over. No two keys give the same, as good as surely."""
    sentences = _shuffled_forever(_sentences(), f"{key}/sentences")
    while True:
        yield " ".join(itertools.islice(sentences, SENTENCES_PER_PASSAGE))


def _shuffled_forever(texts: Sequence[str], key: str) -> Iterator[str]:
    rng = random.Random(key)
    while True:
        yield from rng.sample(texts, len(texts))


@cache
def _sentences() -> tuple[str, ...]:
    return tuple(sentence for text in passages() for sentence in re.split(r"(?<=[.!?]) ", text))


@cache
def _lines(name: str) -> tuple[str, ...]:
    return tuple((TEXTS / f"{name}.txt").read_text().splitlines())


@lru_cache(maxsize=4096)
def _shuffled(name: str, count: int, seed: int) -> tuple[int, ...]:
    numbers = list(range(count))
    random.Random(f"{name}/{seed}").shuffle(numbers)
    return tuple(numbers)
