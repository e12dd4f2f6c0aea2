"""Training text that the target writes itself, prompts included, and prompts that are held out.

Two kinds of rows: long ones hold several turns, texts to copy and questions about texts; short ones hold one prompt
and the beginning of its answer, so that many beginnings are seen: most answers of a load test are no longer.
"""

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .target import ANSWER, LENGTHENED, USER, ChatFormat, Target, Writer

STORY_OPENINGS = (
    "Write a story about",
    "Write a story about a",
    "Write a long story about",
    "Write a short story about",
    "Tell a story about",
    "Tell me a story about",
    "Tell the story of",
    "Write about",
    "Describe",
    "Describe the",
    "Invent",
    "Imagine",
)
QUESTION_OPENINGS = (
    "What is",
    "What are",
    "How do",
    "How can",
    "Why",
    "Explain",
    "Give me",
    "List",
    "Can you",
    "Who",
    "Write a",
    "Write an email",
    "Help me",
    "I am",
    "Suggest",
    "Compare",
)
COPY_REQUESTS = (
    "Repeat the following text exactly, word for word:\n\n{}",
    "Copy the following text exactly, without changing a word:\n\n{}",
    "Repeat this text:\n\n{}",
    "Write this out again exactly as it is:\n\n{}",
    "Copy word for word:\n\n{}",
    "{}\n\nRepeat the text above exactly.",
)
QUESTIONS = (
    "What is this text about?",
    "Sum it up in two sentences.",
    "What would you answer to this?",
    "Say the same in simpler words.",
    "Which facts does it name?",
    "Do you agree with it, and why?",
    "How could it go on?",
    "What follows from this?",
    "Find a title for it.",
    "What is left unsaid here?",
    "Who might have written this, and for whom?",
    "What should be done first?",
)
HELD_OUT_COPY = COPY_REQUESTS[:2]
QUESTIONED_PASSAGES = 3  # of each held-out question
OWN_TEXTS_KEPT = 40_000


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Greedy answers of the target to prompts that training never sees."""

    kinds: list[str]
    prompt_tokens: list[int]
    tokens: Tensor  # [rows, length]


@dataclass(frozen=True, slots=True)
class Pool:
    """What one kind of rows is."""

    name: str
    rows: int  # written at once
    length: int  # tokens
    greedy: float  # share of rows answered at temperature 0; the others at 0.7
    min_answer: int  # tokens; a row with less is dropped
    drawn: tuple[float, float, float, float]  # shares of copies, questions about texts, stories, questions


LONG = (0.22, 0.20, 0.33, 0.17)  # the rest: whatever the target asks by itself
SHORT = (0.0, 0.0, 0.76, 0.14)


def load_lab_prompts(texts: Path) -> list[tuple[str, str]]:
    """(kind, user turn) of the load lab's texts: stories, chat questions about a passage, copied passages."""
    passages = [
        p.strip()
        for file in sorted(texts.glob("passages_*.txt"))
        for p in file.read_text().split("\n\n")
        if p.strip()
    ]
    stories = [x for x in (texts / "story_prompts.txt").read_text().splitlines() if x.strip()]
    questions = [x for x in (texts / "chat_questions.txt").read_text().splitlines() if x.strip()]
    asked = [(q, passages[(i * QUESTIONED_PASSAGES + j) % len(passages)])
             for i, q in enumerate(questions) for j in range(QUESTIONED_PASSAGES)]  # fmt: skip
    chats = [f"A text:\n\n{passage}\n\n{question}" for question, passage in asked]
    copies = [request.format(p) for request in HELD_OUT_COPY for p in passages]
    kinds = (("story", stories), ("chat", chats), ("copy", copies))
    return [(kind, turn) for kind, turns in kinds for turn in turns]


def answer_held_out(
    target: Target, tokenizer: Any, form: ChatFormat, prompts: list[tuple[str, str]], answer_tokens: int
) -> HeldOut:
    """Let the target answer each held-out prompt greedily, ``answer_tokens`` each."""
    rows = [(kind, user_turn(tokenizer, form, turn)) for kind, turn in prompts]
    n = len(rows)
    length = max(len(ids) for _, ids in rows) + answer_tokens
    writer = Writer(target, form, n, length, cuda_graphs=False)
    tokens, _ = writer.write([ids for _, ids in rows], [True] * n, [0.0] * n, [length] * n)
    return HeldOut([kind for kind, _ in rows], [len(ids) for _, ids in rows], tokens)


def write_pool(
    target: Target,
    tokenizer: Any,
    form: ChatFormat,
    pool: Pool,
    *,
    own: list[str],
    until: float,
    seed: int,
    cuda_graphs: bool,
    keep: Callable[[Tensor, Tensor, int], None],
    say: Callable[[str], None],
) -> list[str]:
    """Write batches until the next would end after ``until`` (of the monotonic clock), at least one; ``keep`` each.

    Returns ``own``, paragraphs of the target that may be copied and asked about, with those of this pool.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    started = time.monotonic()
    writer = Writer(target, form, pool.rows, pool.length, cuda_graphs=cuda_graphs)
    say(
        f"data: {pool.name}: {pool.rows} rows of {pool.length} prepared in {time.monotonic() - started:.1f} s"
    )
    batch, kept, longest_s = 0, 0, 0.0
    while batch == 0 or time.monotonic() + longest_s < until:
        began = time.monotonic()
        turns = [draw_prompt(pool, draw, own) for _ in range(pool.rows)]
        words = tokenizer([text for text, _ in turns], add_special_tokens=False)["input_ids"]
        prompts = [
            [*form.before_user, *ids, *([form.end, *form.before_answer] if whole else [])]
            for ids, (_, whole) in zip(words, turns, strict=True)
        ]
        wrote = time.monotonic()
        tokens, by = writer.write(
            prompts,
            [whole for _, whole in turns],
            [0.0 if draw.random() < pool.greedy else 0.7 for _ in prompts],
            [draw.choice((0, draw.randrange(48, 256))) for _ in prompts],
        )
        device_s = time.monotonic() - wrote
        answered = (by == ANSWER) | (by == LENGTHENED)
        use = answered.sum(1) >= pool.min_answer
        tokens, by, answered = tokens[use], by[use], answered[use]
        keep(tokens, by, batch)
        own = (own + own_paragraphs(tokenizer, tokens, by, draw))[-OWN_TEXTS_KEPT:]
        longest_s = max(longest_s, time.monotonic() - began)
        batch += 1
        kept += tokens.numel()
        say(
            f"data: {pool.name} {batch}: {pool.rows * pool.length / device_s:,.0f} tokens/s written, "
            f"{len(tokens)} rows kept, {answered.float().mean():.2f} of them answers, {longest_s:.1f} s a batch, "
            f"{kept / 1e6:.2f} M tokens, {max(until - time.monotonic(), 0):.0f} s left, {len(own):,} own texts"
        )
    return own


def user_turn(tokenizer: Any, form: ChatFormat, turn: str) -> list[int]:
    """Token ids of a chat up to the beginning of its first answer."""
    words = tokenizer.encode(turn, add_special_tokens=False)
    return [*form.before_user, *words, form.end, *form.before_answer]


def draw_prompt(pool: Pool, draw: random.Random, own: list[str]) -> tuple[str, bool]:
    """The beginning of a user's turn, and whether it is whole; what is not, the target goes on with."""
    copies, about_texts, stories, questions = pool.drawn
    kind = draw.random()
    if kind < copies + about_texts and own:
        text = draw.choice(own)
        if draw.random() < 0.35:  # sentences of several texts: only copying can tell what comes next
            parts = [s for t in draw.sample(own, min(4, len(own))) for s in re.split(r"(?<=[.!?])\s+", t)]
            text = " ".join(draw.sample(parts, min(len(parts), draw.randrange(3, 8))))
        if kind < copies:
            return draw.choice(COPY_REQUESTS).format(text), True
        return f"A text:\n\n{text}\n\n{draw.choice(QUESTIONS)}", True
    kind -= copies + about_texts
    if kind < stories:
        return draw.choice(STORY_OPENINGS), False
    if kind < stories + questions:
        return draw.choice(QUESTION_OPENINGS), False
    return "", False


def own_paragraphs(
    tokenizer: Any, tokens: Tensor, by: Tensor, draw: random.Random, rows: int = 1500
) -> list[str]:
    """Paragraphs of 120 to 700 characters out of some rows, of answers and of user turns."""
    found: list[str] = []
    chosen = draw.sample(range(len(tokens)), min(rows, len(tokens)))
    parts = []
    for row in chosen:
        written = by[row]
        mask = written == USER if draw.random() < 0.3 else (written == ANSWER) | (written == LENGTHENED)
        parts.append(tokens[row][mask].tolist())
    for text in tokenizer.batch_decode(parts, skip_special_tokens=True):
        found += [p.strip() for p in text.split("\n\n") if 120 <= len(p.strip()) <= 700]
    return found
