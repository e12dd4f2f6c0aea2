"""Hashes of a prompt's beginning: equal as far as the beginnings are equal."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.prefix import BLOCK_BYTES, MAX_BLOCKS, prefix_blocks


def blocks(prompt: Any) -> tuple[int, ...]:
    return prefix_blocks({"prompt": prompt})


def test_there_is_one_for_each_whole_block() -> None:
    assert blocks("x" * (BLOCK_BYTES - 1)) == ()
    assert len(blocks("x" * BLOCK_BYTES)) == 1
    assert len(blocks("x" * (3 * BLOCK_BYTES + 1))) == 3


def test_a_long_prompt_gives_a_bounded_number() -> None:
    assert len(blocks("x" * 1_000_000)) == MAX_BLOCKS
    assert len(blocks("ü" * 1_000_000)) == MAX_BLOCKS


def test_equal_beginnings_have_equal_hashes_up_to_the_first_difference() -> None:
    shared = "s" * 2 * BLOCK_BYTES
    one, other = blocks(shared + "a" * BLOCK_BYTES), blocks(shared + "b" * BLOCK_BYTES)
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_a_hash_covers_all_before_it() -> None:
    tail = "t" * BLOCK_BYTES
    assert blocks("a" * BLOCK_BYTES + tail)[1] != blocks("b" * BLOCK_BYTES + tail)[1]


def test_messages_are_read_as_written() -> None:
    system = {"role": "system", "content": "s" * 2 * BLOCK_BYTES}
    one, other = (
        prefix_blocks({"messages": [system, {"role": "user", "content": word * BLOCK_BYTES}]})
        for word in "ab"
    )
    assert one[:2] == other[:2]
    assert one != other


def test_hashes_fit_a_json_number_that_any_reader_keeps() -> None:
    assert all(0 <= block < 2**56 for block in blocks("x" * 10_000))


@given(st.text(st.characters(codec=None), max_size=50), st.integers(1, 100))
def test_any_text_has_hashes(word: str, times: int) -> None:
    """Half a surrogate pair is valid JSON."""
    assert blocks(word * times) == blocks(word * times)


def test_any_value_has_hashes() -> None:
    for prompt in (None, 5, [1, 2, 3], [[1], [2]], {"a": 1}, "\ud800" * 600):
        assert len(blocks(prompt)) <= MAX_BLOCKS
    assert prefix_blocks({}) == ()
