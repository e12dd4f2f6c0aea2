from __future__ import annotations

import pytest

from loadtest.offer.load import Arrival
from loadtest.offer.request_body import ChatRequest, Dialect, build_body
from loadtest.offer.workload import load_workload

QUESTION = ChatRequest(({"role": "user", "content": "Why?"},), 48)


@pytest.mark.parametrize("dialect", [Dialect.TANDEM, Dialect.VLLM])
def test_answers_have_one_length_and_no_chance(dialect: Dialect) -> None:
    body = build_body(QUESTION, model="m:batched", seed=5, dialect=dialect)
    cache_salt = body.pop("cache_salt")
    assert isinstance(cache_salt, str)
    assert body == {
        "model": "m:batched",
        "messages": [{"role": "user", "content": "Why?"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0,
        "seed": 5,
        "min_tokens": 48,
        "max_tokens": 48,
        "ignore_eos": True,
    }


def test_openai_gets_only_what_its_api_has() -> None:
    assert build_body(QUESTION, model="m", seed=5, dialect=Dialect.OPENAI) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Why?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "seed": 5,
        "max_completion_tokens": 48,
    }


def test_another_run_has_another_cache() -> None:
    def salt(seed: int, salt: str = "") -> str:
        return str(build_body(QUESTION, model="m", seed=seed, salt=salt)["cache_salt"])

    assert salt(1) == salt(1)
    assert len({salt(1), salt(2), salt(1, "repeat 2"), salt(1, "a/b@c")}) == 4
    # What vLLM 0.32 accepts: at most 128 characters, none of @ / \ and NUL.
    assert salt(1, "a/b@c" * 100).isalnum()
    assert len(salt(1, "a/b@c" * 100)) <= 128


def test_a_salted_text_begins_otherwise_and_says_the_same() -> None:
    system = ChatRequest(({"role": "system", "content": "Be kind."}, *QUESTION.messages), 8)
    first, second = (
        build_body(system, model="m", seed=seed, dialect=Dialect.OPENAI, salts_text=True)["messages"]
        for seed in (1, 2)
    )
    assert first[0]["content"] != second[0]["content"]
    assert first[0]["content"].endswith(".\nBe kind.")
    assert first[1:] == second[1:] == list(QUESTION.messages)
    assert system.messages[0]["content"] == "Be kind."


def test_a_workload_s_body_is_that_of_its_request() -> None:
    load = load_workload("story")
    request = load.request(3, 4, Arrival(0, output_tokens=9))
    assert load.body(
        model="m", seed=3, number=4, arrival=Arrival(0, output_tokens=9), dialect=Dialect.OPENAI
    ) == build_body(request, model="m", seed=3, dialect=Dialect.OPENAI)


def test_requests_that_ask_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="without messages"):
        ChatRequest((), 5)
    with pytest.raises(ValueError, match="output_tokens=0 must be at least 1"):
        ChatRequest(QUESTION.messages, 0)
