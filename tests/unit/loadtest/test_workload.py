from __future__ import annotations

import pytest

from loadtest.workload import COPY_TASKS, WORKLOAD_NAMES, load_workload, passages


def test_passages_are_many_and_longer_than_an_answer() -> None:
    texts = passages()
    assert len(texts) >= 30
    assert len(set(texts)) == len(texts)
    # 80 words are over 100 tokens: an answer of 48 never runs out of text to copy.
    assert all(80 <= len(text.split()) <= 140 for text in texts)


def text(name: str, seed: int, number: int) -> str:
    return load_workload(name).request(seed, number).messages[-1]["content"]


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_same_seed_and_number_give_the_same_prompt(name: str) -> None:
    assert [text(name, 7, n) for n in range(20)] == [text(name, 7, n) for n in range(20)]
    assert [text(name, 7, n) for n in range(20)] != [text(name, 8, n) for n in range(20)]


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_different_numbers_are_different_prompts(name: str) -> None:
    assert len({text(name, 3, n) for n in range(40)}) == 40  # the demo's levels and the warm-up use 33


def test_copy_prompts_hold_the_text_to_copy() -> None:
    prompt = text("copy", 0, 0)
    assert any(passage in prompt for passage in passages())
    assert any(prompt.startswith(task.partition("{")[0]) for task in COPY_TASKS)


def test_answers_have_one_length_and_no_chance() -> None:
    body = load_workload("story").body(model="m:batched", seed=5, number=2, output_tokens=48)
    assert body["model"] == "m:batched"
    assert (body["min_tokens"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == (
        48,
        48,
        True,
        0,
    )
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_unknown_workload_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"workload 'chat' is unknown; there are copy, story"):
        load_workload("chat")
