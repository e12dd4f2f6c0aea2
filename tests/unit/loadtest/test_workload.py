from __future__ import annotations

import pytest

from loadtest.workload import COPY_TASKS, WORKLOAD_NAMES, load_workload, passages


def test_passages_are_many_and_longer_than_an_answer() -> None:
    texts = passages()
    assert len(texts) >= 30
    assert len(set(texts)) == len(texts)
    # 80 words are over 100 tokens: an answer of 48 never runs out of text to copy.
    assert all(80 <= len(text.split()) <= 140 for text in texts)


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_same_seed_and_number_give_the_same_prompt(name: str) -> None:
    workload = load_workload(name)
    assert [workload.prompt(7, n) for n in range(20)] == [workload.prompt(7, n) for n in range(20)]
    assert [workload.prompt(7, n) for n in range(20)] != [workload.prompt(8, n) for n in range(20)]


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_no_prompt_comes_back_before_all_were_used(name: str) -> None:
    workload = load_workload(name)
    count = len(workload.prompts)
    assert count >= 33  # the demo's levels and the warm-up use 33
    assert {workload.prompt(3, n) for n in range(count)} == set(workload.prompts)
    assert workload.prompt(3, count) == workload.prompt(3, 0)


def test_copy_prompts_hold_the_text_to_copy() -> None:
    prompt = load_workload("copy").prompt(0, 0)
    assert any(text in prompt for text in passages())
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
    assert body["stream_options"] == {"include_usage": True}


def test_unknown_workload_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"workload 'chat' is unknown; there are copy, story"):
        load_workload("chat")
