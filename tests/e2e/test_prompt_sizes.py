"""Sizes of prompts by the tokenizer of the model that the default lab serves."""

from __future__ import annotations

import pytest

from loadtest.offer.prompt_tokens import token_counter, tokenizer_of
from loadtest.offer.workload import WORKLOAD_NAMES, load_workload
from serving import model_store

pytestmark = pytest.mark.model


@pytest.mark.parametrize("asked", [100, 600, 1900])
@pytest.mark.parametrize("name", [name for name in WORKLOAD_NAMES if name != "multi-turn"])
def test_prompts_are_as_long_as_asked_by_the_served_tokenizer(name: str, asked: int) -> None:
    model_store.prepare(print)
    counter = token_counter(tokenizer_of("auto"))
    assert counter.name.endswith("tokenizer.json")
    load = load_workload(name, prompt_tokens=asked, counter=counter)
    for number in range(40):
        size = sum(counter.count(message["content"]) for message in load.request(1, number).messages)
        assert abs(size - asked) <= max(4, 0.02 * asked)
