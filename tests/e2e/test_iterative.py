"""The iterative lane: drafts out of the model's own guesses change no greedy answer, and some are right."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serving import model_store
from serving.core.speculation import SpeculationCounts, mean_acceptance_length
from serving.metrics import names
from serving.metrics.reading import samples_of
from tests.running_lab import RunningLab, running_lab

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[2] / "deploy" / "iterative.yaml"
MAX_MODEL_LEN = 256
MAX_STEP_TOKENS = 64  # of a step; longer prompts are read in parts, beside others' drafts
COPY = "Repeat this three times: the quick brown fox jumps over the lazy dog near the river bank."
LONG = "Say it again. " + " ".join(f"Item {number} costs {number * 7} coins." for number in range(20))


@pytest.fixture(scope="module")
def lab() -> Iterator[RunningLab]:
    model_store.prepare(print)
    config = yaml.safe_load(CONFIG.read_text())
    config["model"] |= {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    config["lanes"] = [lane for lane in config["lanes"] if lane["name"] != "pool"]
    for lane in config["lanes"]:
        lane["engine_args"] = {"max_num_batched_tokens": MAX_STEP_TOKENS}
    with running_lab(config) as started:
        yield started


def answers(lab: RunningLab, lane: str, asked: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    """Text, why it ended and tokens of each, all asked at once."""

    def ask(body: dict[str, Any]) -> tuple[str, str, int]:
        said = lab.post("/v1/completions", {"model": f"{lab.model}:{lane}", "temperature": 0} | body)
        assert said.status_code == 200, said.text
        (choice,) = said.json()["choices"]
        return choice["text"], choice["finish_reason"], said.json()["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))


def counts(lab: RunningLab, lane: str) -> SpeculationCounts:
    (replica,) = lab.replicas(lane)
    page = httpx.get(f"{replica['url']}/metrics", timeout=10).text
    wanted = (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_TOKENS)
    found = {sample.name: int(sample.value) for sample in samples_of(page, wanted)}
    return SpeculationCounts(*(found[name] for name in wanted))


@pytest.mark.parametrize("lane", ["iterative", "jacobi"])
def test_guesses_change_no_greedy_answer(lab: RunningLab, lane: str) -> None:
    asked: list[dict[str, Any]] = [
        {"prompt": COPY, "max_tokens": 40},
        {"prompt": "Once upon a time there was a fox who", "max_tokens": 40},
        {"prompt": LONG, "max_tokens": 24},
        {"prompt": "1 2 3 4 5 6 7", "max_tokens": 1},
        {"prompt": "1, 2, 3, 4, 5, 6, 7,", "max_tokens": 40, "stop": [" 15"]},
        {"prompt": "a b c a b c a b", "max_tokens": 23, "min_tokens": 23},
        {"prompt": "The capital of France is", "max_tokens": 24, "repetition_penalty": 1.3},
        # Up to the end of the model's length.
        {"prompt": LONG, "max_tokens": None, "ignore_eos": True},
    ]
    before = counts(lab, lane)
    plain, guessed = (answers(lab, name, asked) for name in ("batched", lane))
    assert guessed == plain
    assert plain[4][1] == "stop"
    assert [ends for _, ends, _ in plain[-2:]] == ["length", "length"]
    drafted = counts(lab, lane) - before
    length = mean_acceptance_length(drafted)
    assert length is not None
    # Tails alone give little.
    assert length > (1.3 if lane == "iterative" else 1)


def test_tails_are_drafted_for_in_every_step(lab: RunningLab) -> None:
    before = counts(lab, "jacobi")
    answers(lab, "jacobi", [{"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}])
    drafted = counts(lab, "jacobi") - before
    assert drafted.draft_tokens == 4 * drafted.num_drafts
    assert 4 <= drafted.num_drafts < 20
    assert drafted.num_drafts + drafted.accepted_tokens >= 19, "the prompt's step gave one, these the others"


def test_sampled_requests_are_answered_and_top_k_1_is_the_greedy_answer(lab: RunningLab) -> None:
    asked: list[dict[str, Any]] = [{"prompt": COPY, "max_tokens": 24}] * 2
    greedy, _ = answers(lab, "batched", asked)
    wild = {"prompt": COPY, "max_tokens": 24, "temperature": 1.0, "seed": 1, "top_p": 0.9}
    top, sampled = answers(lab, "iterative", [asked[0] | {"temperature": 1.5, "top_k": 1}, wild])
    assert top == greedy
    assert sampled[2] > 0
