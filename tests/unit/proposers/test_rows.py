from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serving.proposers.rows import Rows


class Batch:
    """Rows as vLLM has them: one array, whose unused part holds anything."""

    def __init__(self, *rows: list[int]) -> None:
        self.ids = np.full((8, 64), 99, dtype=np.int32)
        self.lengths = np.zeros(8, dtype=np.int32)
        for place, tokens in enumerate(rows):
            self.put(place, tokens)

    def put(self, place: int, tokens: list[int]) -> None:
        self.ids[place, : len(tokens)] = tokens
        self.lengths[place] = len(tokens)


@pytest.fixture
def rows() -> Rows[list[int]]:
    return Rows(lambda tokens: [int(token) for token in tokens])


def test_a_row_begins_with_its_prompt_and_goes_on(rows: Rows[list[int]]) -> None:
    (first,) = rows.follow([[7]], *parts(Batch([1, 2, 3, 7])))
    assert first == [1, 2, 3]
    (again,) = rows.follow([[8, 9]], *parts(Batch([1, 2, 3, 7, 8, 9])))
    assert again is first


def test_rows_may_change_places(rows: Rows[list[int]]) -> None:
    a, b = rows.follow([[7], [7]], *parts(Batch([1, 2, 7], [4, 5, 7])))
    assert rows.follow([[8], [8]], *parts(Batch([4, 5, 7, 8], [1, 2, 7, 8]))) == [b, a]


def test_rows_that_end_alike_are_apart_by_their_length(
    rows: Rows[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.proposers.rows.TAIL_TOKENS", 2)
    a, b = rows.follow([[7], [7]], *parts(Batch([5, 5, 7], [5, 5, 5, 7])))
    found = rows.follow([[8], [8]], *parts(Batch([5, 5, 7, 8], [5, 5, 5, 7, 8])))
    assert found[0] is a
    assert found[1] is b


def test_rows_that_are_the_same_have_a_state_each(rows: Rows[list[int]]) -> None:
    a, b = rows.follow([[7], [7]], *parts(Batch([1, 7], [1, 7])))
    found = rows.follow([[8], [8]], *parts(Batch([1, 7, 8], [1, 7, 8])))
    assert a is not b
    assert found[0] is a
    assert found[1] is b


def test_rows_of_one_length_with_one_question_at_the_end_are_apart(rows: Rows[list[int]]) -> None:
    question = [9] * 40
    a, b, c = rows.follow([[7]] * 3, *parts(Batch(*([first, *question, 7] for first in (1, 2, 3)))))
    found = rows.follow([[8]] * 3, *parts(Batch(*([first, *question, 7, 8] for first in (3, 1, 2)))))
    assert found == [c, a, b]


def test_a_row_within_its_prompt_has_none(rows: Rows[list[int]]) -> None:
    assert rows.follow([[], [7]], *parts(Batch([1, 2], [3, 7]))) == [None, [3]]


def test_a_row_that_left_is_forgotten(rows: Rows[list[int]]) -> None:
    (first,) = rows.follow([[7]], *parts(Batch([1, 7])))
    rows.follow([], *parts(Batch()))
    (later,) = rows.follow([[8]], *parts(Batch([1, 7, 8])))
    assert later is not first


def parts(batch: Batch) -> tuple[list[int], Any]:
    return batch.lengths.tolist(), batch.ids
