from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from serving.proposers import oracle
from serving.proposers.oracle import Oracle, Replay, with_errors

VOCABULARY = 100


def made(rates: list[float], seed: int = 0) -> Oracle:
    config: Any = SimpleNamespace(
        additional_config={"tandem_proposer": {"rates": rates, "seed": seed}},
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
    )
    return Oracle(config)


def replay(oracle: Oracle, prompt: list[int], answer: list[int]) -> list[list[int]]:
    """The drafts of an answer that is written token by token."""
    ids = np.zeros((1, 64), dtype=np.int32)
    drafts = []
    for num in range(1, len(answer) + 1):
        text = prompt + answer[:num]
        ids[0, : len(text)] = text
        drafts += oracle.propose([[answer[num - 1]]], np.array([len(text)]), ids)
    return drafts


def test_what_was_answered_once_is_guessed_the_next_time() -> None:
    oracle = made([1.0, 1.0])
    assert replay(oracle, [1, 2], [5, 6, 7, 8]) == [[], [], [], []]
    assert replay(oracle, [1, 2], [5, 6, 7, 8]) == [[6, 7], [7, 8], [8], []]
    assert replay(oracle, [1, 3], [5, 6]) == [[], []]


def test_an_answer_that_goes_on_is_learnt_further() -> None:
    oracle = made([1.0])
    replay(oracle, [1, 2], [5, 6])
    assert replay(oracle, [1, 2], [5, 6, 7]) == [[6], [], []]
    assert replay(oracle, [1, 2], [5, 6, 7]) == [[6], [7], []]


def test_an_answer_that_differs_replaces_what_was_known() -> None:
    oracle = made([1.0])
    replay(oracle, [1, 2], [5, 6, 7])
    assert replay(oracle, [1, 2], [5, 9]) == [[6], []]
    assert replay(oracle, [1, 2], [5, 9]) == [[9], []]


def test_accepted_drafts_are_followed() -> None:
    row = Replay([5, 6, 7, 8])
    row.follow([5, 6, 7])
    assert row.next(4) == [8]


def test_a_row_ahead_of_what_another_wrote_anew_writes_nothing_out_of_place() -> None:
    answer: list[int] = []
    ahead, behind = Replay(answer), Replay(answer)
    ahead.follow([5, 6, 7])
    behind.follow([9])
    ahead.follow([8])
    assert answer == [9]
    assert ahead.next(2) == []


def test_a_row_within_its_prompt_gets_no_draft() -> None:
    assert made([1.0]).propose([[]], np.array([2]), np.zeros((1, 8), dtype=np.int32)) == [[]]


def test_the_longest_unasked_answer_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MAX_ANSWERS", 2)
    one = made([1.0])
    for prompt in ([1], [2], [1], [3]):
        replay(one, prompt, [5, 6])
    assert replay(one, [1], [5, 6]) == [[6], []]
    assert replay(one, [2], [5, 6]) == [[], []]


@pytest.mark.parametrize("rates", [(0.8, 0.4, 0.1), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 0.5, 0.5)])
def test_the_first_tokens_are_right_as_often_as_asked(rates: tuple[float, ...]) -> None:
    rng = random.Random(0)
    drafts = [with_errors([97, 98, 99], rates, VOCABULARY, rng) for _ in range(20_000)]
    for position, rate in enumerate(rates, start=1):
        right = sum(draft[:position] == [97, 98, 99][:position] for draft in drafts)
        assert right / len(drafts) == pytest.approx(rate, abs=0.02)
    assert all(0 <= token < VOCABULARY for draft in drafts for token in draft)
    assert {len(draft) for draft in drafts} == {3}


def test_the_same_seed_makes_the_same_errors() -> None:
    answer = list(range(5, 45))
    told = []
    for seed in (1, 1, 2):
        one = made([0.5, 0.25], seed)
        replay(one, [1], answer)
        told.append(replay(one, [1], answer))
    assert told[0] == told[1] != told[2]
