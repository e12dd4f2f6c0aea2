"""Training text that the target writes itself, prompts included, and prompts that are held out."""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .target import ANSWER, ChatFormat, chat_format, write

STORY_OPENINGS = ("Write a story about", "Tell me a story about", "Write about", "Describe", "Tell a tale of")
QUESTION_OPENINGS = ("What is", "How do", "Why", "Explain", "Give me", "List", "Can you", "Who", "Write a")
COPY_REQUESTS = ("Repeat this text:\n\n", "Write this out again exactly as it is:\n\n", "Copy word for word:\n\n")
HELD_OUT_COPY = "Repeat the following text exactly, word for word:\n\n"
HELD_OUT_PASSAGES = 24
MAX_COPIED_TOKENS = 140


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Greedy answers of the target to prompts that training never sees."""

    kinds: list[str]
    prompt_tokens: list[int]
    tokens: Tensor  # [rows, length]


def load_lab_prompts(texts: Path) -> list[tuple[str, str]]:
    """(kind, user turn) of the load lab's texts: stories, chat questions about a passage, copied passages."""
    passages = [
        p.strip()
        for file in sorted(texts.glob("passages_*.txt"))
        for p in file.read_text().split("\n\n")
        if p.strip()
    ][:HELD_OUT_PASSAGES]
    stories = [x for x in (texts / "story_prompts.txt").read_text().splitlines() if x.strip()]
    questions = [x for x in (texts / "chat_questions.txt").read_text().splitlines() if x.strip()]
    chats = [f"A text:\n\n{passages[i % len(passages)]}\n\n{q}" for i, q in enumerate(questions)]
    copies = [HELD_OUT_COPY + p for p in passages]
    kinds = (("story", stories), ("chat", chats), ("copy", copies))
    return [(kind, turn) for kind, turns in kinds for turn in turns]


def answer_held_out(model: Any, tokenizer: Any, prompts: list[tuple[str, str]], length: int) -> HeldOut:
    """Let the target answer each held-out prompt greedily; prompts without room for 48 more tokens are left out."""
    form = chat_format(tokenizer)
    rows = [(kind, _prompt(tokenizer, form, turn)) for kind, turn in prompts]
    rows = [(kind, ids) for kind, ids in rows if len(ids) + 48 <= length]
    n = len(rows)
    tokens, _ = write(
        model,
        form,
        [ids for _, ids in rows],
        in_answer=torch.ones(n, dtype=torch.bool),
        temperature=torch.zeros(n),
        min_answer=torch.full((n,), length),
        length=length,
    )
    return HeldOut([kind for kind, _ in rows], [len(ids) for _, ids in rows], tokens)


def write_training_text(
    model: Any,
    tokenizer: Any,
    *,
    rows: int,
    length: int,
    budget_s: float,
    seed: int,
    keep: Callable[[Tensor, Tensor, int], None],
    say: Callable[[str], None],
) -> None:
    """Write batches of ``rows`` until the next would pass ``budget_s`` seconds (at least one); ``keep`` each."""
    form = chat_format(tokenizer)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    own: list[str] = []
    began = time.monotonic()
    longest_s = 0.0
    batch = 0
    while batch == 0 or time.monotonic() - began + longest_s < budget_s:
        started = time.monotonic()
        prompts, open_answer = [], []
        for _ in range(rows):
            ids, answer = _draw_prompt(tokenizer, form, draw, own)
            prompts.append(ids)
            open_answer.append(answer)
        heat = torch.tensor([0.0 if draw.random() < 0.6 else 0.7 for _ in range(rows)])
        least = torch.tensor([draw.choice((0, draw.randrange(48, 256))) for _ in range(rows)])
        tokens, writer = write(
            model,
            form,
            prompts,
            in_answer=torch.tensor(open_answer),
            temperature=heat,
            min_answer=least,
            length=length,
        )
        keep(tokens, writer, batch)
        own = (own + _paragraphs(tokenizer, tokens, writer))[-20_000:]
        longest_s = max(longest_s, time.monotonic() - started)
        batch += 1
        rate = rows * length / (time.monotonic() - started)
        say(f"data: batch {batch}, {rate:,.0f} tokens/s, {len(own):,} own paragraphs to copy")


def _prompt(tokenizer: Any, form: ChatFormat, turn: str) -> list[int]:
    words = tokenizer.encode(turn, add_special_tokens=False)
    return [*form.before_user, *words, form.end, *form.before_answer]


def _draw_prompt(
    tokenizer: Any, form: ChatFormat, draw: random.Random, own: list[str]
) -> tuple[list[int], bool]:
    kind = draw.random()
    if own and kind < 0.25:
        return _prompt(tokenizer, form, draw.choice(COPY_REQUESTS) + draw.choice(own)), True
    opening = ""
    if kind < 0.65:
        opening = draw.choice(STORY_OPENINGS)
    elif kind < 0.85:
        opening = draw.choice(QUESTION_OPENINGS)
    return [*form.before_user, *tokenizer.encode(opening, add_special_tokens=False)], False


def _paragraphs(tokenizer: Any, tokens: Tensor, writer: Tensor) -> list[str]:
    found = []
    for row, by in zip(tokens[:512], writer[:512], strict=True):
        text = tokenizer.decode(row[by == ANSWER].tolist(), skip_special_tokens=True)
        found += [p.strip() for p in re.split(r"\n\n", text) if 150 <= len(p.strip()) <= 4 * MAX_COPIED_TOKENS]
    return found
