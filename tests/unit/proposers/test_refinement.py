"""Guesses that refine themselves, on a model that is a function of the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.config import RefinementConfig
from serving.proposers.refinement import NgramPool, Row, Rows, Verified

Model = Callable[[Sequence[int]], int]
NOTHING = Verified((), (), 1)
TAILS = RefinementConfig(pool=False)
POOL = RefinementConfig(tails=False)
BOTH = RefinementConfig()


def by_last(text: Sequence[int]) -> int:
    """One that looks at the last token alone: wrong tokens before it do not matter."""
    return (7 * text[-1] + 3) % 101


def by_three(text: Sequence[int]) -> int:
    return random.Random(f"{text[-3:]}").randrange(40)


def by_all(text: Sequence[int]) -> int:
    return random.Random(f"{list(text)}").randrange(1000)


@dataclass
class Answer:
    text: list[int]
    steps: int
    drafts: list[list[int]]


def decode(model: Model, prompt: list[int], num_tokens: int, settings: RefinementConfig | None) -> Answer:
    """Greedy decoding, each step with the drafts of a row; None: without drafts."""
    row = Row(settings) if settings else None
    text, draft, drafts, steps = list(prompt), list[int](), list[list[int]](), 0
    while len(text) < len(prompt) + num_tokens:
        predicted = [model(text + draft[:i]) for i in range(len(draft) + 1)]
        right = next((i for i, token in enumerate(draft) if token != predicted[i]), len(draft))
        text += predicted[: right + 1]
        steps += 1
        if row is not None and settings is not None:
            told = Verified(draft, predicted if draft else (), right + 1)
            draft = row.draft(text[row.num_tokens :], told, settings.num_speculative_tokens)
            assert row.num_tokens == len(text)
            drafts.append(draft)
    return Answer(text[: len(prompt) + num_tokens], steps, drafts)


@pytest.mark.parametrize("settings", [TAILS, POOL, BOTH])
@pytest.mark.parametrize("model", [by_last, by_three, by_all])
def test_the_text_is_that_without_drafts(model: Model, settings: RefinementConfig) -> None:
    prompt = [3, 1, 4, 1, 5]
    plain, drafted = (decode(model, prompt, 200, each) for each in (None, settings))
    assert drafted.text == plain.text
    assert drafted.steps <= plain.steps


def test_what_came_after_the_first_wrong_guess_is_guessed_next() -> None:
    row = Row(TAILS)
    assert row.draft([5, 6, 7], NOTHING, 4) == [7, 7, 7, 7], "nothing is known yet"
    # Of four drafts the first is right: two new tokens, and what was said after wrong ones is the tail.
    verified = Verified([7, 7, 7, 7], [7, 21, 22, 23, 24], num_new=2)
    assert row.draft([7, 21], verified, 4) == [22, 23, 24, 24]


def test_tails_converge_where_a_token_depends_on_few_before_it() -> None:
    """A wrong guess spoils only what depends on it: the guesses after it come right in the next step."""

    def counting(text: Sequence[int]) -> int:
        return len(text)

    # Every other step has nothing but wrong guesses, and finds four right ones for the next.
    assert decode(counting, [0], 100, TAILS).steps < 40
    # A model whose every token depends on all before it is right by chance alone.
    assert decode(by_all, [0], 100, TAILS).steps > 95


def test_the_pool_drafts_what_the_text_said_before_and_nothing_else() -> None:
    row = Row(POOL)
    assert row.draft([1, 2, 3, 4, 5, 1, 2], NOTHING, 4) == [3, 4, 5, 1]
    assert Row(POOL).draft([1, 2, 3], NOTHING, 4) == [], "an unknown token ends a draft"


def test_the_longest_run_counts_then_the_latest() -> None:
    pool = NgramPool(1, 2, 100)
    pool.learn([1, 2, 3, 9, 2], [2, 3, 9, 2, 4])
    assert pool.next([9, 2]) == 4
    assert pool.next([1, 2]) == 3
    assert pool.next([8, 2]) == 4, "of the short ones the latest"
    assert pool.next([8]) is None
    assert NgramPool(2, 2, 100).next([2]) is None


def test_a_guess_after_a_wrong_draft_is_remembered() -> None:
    row = Row(POOL)
    row.draft([1, 2, 3], NOTHING, 4)
    # 50 was wrong after 3; what the model said after it comes back when 50 does.
    row.draft([60], Verified([50], [60, 51], num_new=1), 4)
    assert row.draft([50], NOTHING, 4) == [51]


def test_in_a_draft_the_pool_comes_first_then_the_tail() -> None:
    row = Row(BOTH)
    row.draft([1, 2, 3, 4], NOTHING, 3)
    verified = Verified([9, 9, 9], [1, 31, 32, 33], num_new=1)
    # The pool knows what followed 1; after 4 it knows 1, too.
    assert row.draft([1], verified, 5) == [2, 3, 4, 1, 2]
    unknown = Verified([9, 9], [70, 31, 32], num_new=1)
    assert row.draft([70], unknown, 3) == [31, 32, 32]


def test_the_pool_finds_a_repeated_text_in_few_steps() -> None:
    def copying(text: Sequence[int]) -> int:
        return text[-20]

    prompt = list(range(100, 120))
    assert decode(copying, prompt, 100, POOL).steps <= 100 / 5 + 5
    other = [*range(100, 119), 100]
    assert decode(by_all, other, 100, POOL).steps > 90, "a text that repeats nothing"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 20))
def test_no_more_is_remembered_than_allowed(text: list[int], max_ngrams: int) -> None:
    row = Row(RefinementConfig(max_ngrams=max_ngrams))
    for token in text:
        row.draft([token, token + 1], Verified([token], [token + 1, 3], num_new=1), 4)
        assert row.num_ngrams <= max_ngrams


def test_a_long_prompt_leaves_its_end_in_the_pool() -> None:
    row = Row(RefinementConfig(tails=False, max_ngrams=3, lookup_min=1, lookup_max=1))
    row.draft(list(range(1000)), NOTHING, 4)
    assert row.num_ngrams == 3
    assert row.draft([998], NOTHING, 4) == [999, 998, 999, 998]


@pytest.mark.parametrize("settings", [TAILS, POOL, BOTH])
def test_no_draft_is_longer_than_there_is_room(settings: RefinementConfig) -> None:
    row = Row(settings)
    row.draft([1, 2, 1, 2], NOTHING, 4)
    assert len(row.draft([1], NOTHING, 2)) == 2


def test_each_request_gets_its_own_part_of_a_step() -> None:
    rows = Rows(BOTH)
    rows.see(["a", "b", "c"], [2, 0, 1], [11, 12, 31], [101, 102, 103, 201, 301, 302])
    seen = [(drafted, predicted) for _, drafted, predicted in rows]
    assert seen == [([11, 12], [101, 102, 103]), ([], [201]), ([31], [301, 302])]
    rows.see(["a", "b"], [], [], [])
    assert [(drafted, predicted) for _, drafted, predicted in rows] == [([], []), ([], [])]


def test_a_request_is_remembered_where_it_moves_and_forgotten_when_it_ends() -> None:
    rows = Rows(BOTH)
    rows.see(["a", "b"], [], [], [])
    (a, *_), (b, *_) = rows
    rows.see(["b", "c"], [], [], [])
    (first, *_), (second, *_) = rows
    assert first is b
    assert second not in (a, b)
    rows.see(["a"], [], [], [])
    ((again, *_),) = rows
    assert again is not a
    rows.see([], [], [], [])
    assert list(rows) == []
