"""The EAGLE-3 head that comes with Tandem: what it guesses, and that it changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
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

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[2] / "deploy" / "eagle3.yaml"
LANES = ("batched", "speculative")
STORIES = [
    f"Write a short story about {what}."
    for what in (
        "a lighthouse keeper who collects lost letters",
        "two sisters who repair an old boat",
        "a fox that learns to read",
        "a clockmaker in a town without time",
        "the last train to the coast",
        "a gardener who talks to rain",
    )
]
MAX_TOKENS = 48
# A bfloat16 has 8 bits of mantissa: logits between 16 and 32 lie 1/8 apart, and two sums may each be off by one.
NEAR_TIE = 0.26


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def lab(request: pytest.FixtureRequest) -> Iterator[RunningLab]:
    model_store.prepare(print)
    config = yaml.safe_load(CONFIG.read_text())
    config["model"]["dtype"] = request.param
    config["lanes"] = [lane for lane in config["lanes"] if lane["name"] in LANES]
    with running_lab(config) as started:
        yield started


def answer(lab: RunningLab, lane: str, story: str) -> list[tuple[str, dict[str, float]]]:
    """The tokens of a greedy answer, each with the log-probabilities of the two likeliest."""
    body = {
        "model": f"{lab.model}:{lane}",
        "messages": [{"role": "user", "content": story}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    said = lab.post("/v1/chat/completions", body)
    assert said.status_code == 200, said.text
    tokens: list[dict[str, Any]] = said.json()["choices"][0]["logprobs"]["content"]
    return [(one["token"], {top["token"]: top["logprob"] for top in one["top_logprobs"]}) for one in tokens]


def counts(lab: RunningLab) -> SpeculationCounts:
    (replica,) = lab.replicas("speculative")
    page = httpx.get(f"{replica['url']}/metrics", timeout=10).text
    wanted = (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_TOKENS)
    found = {sample.name: int(sample.value) for sample in samples_of(page, wanted)}
    return SpeculationCounts(*(found[name] for name in wanted))


def test_the_learned_eagle_draft_changes_no_greedy_answer_but_at_near_ties(
    lab: RunningLab, request: pytest.FixtureRequest
) -> None:
    is_exact = "float32" in request.node.name
    before = counts(lab)
    parted = 0
    for story in STORIES:
        plain, drafted = (answer(lab, lane, story) for lane in LANES)
        at = next((i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a[0] != b[0]), None)
        if at is None:
            assert len(plain) == len(drafted)
            continue
        parted += 1
        (chosen, likeliest), (other, _) = plain[at], drafted[at]
        assert other in likeliest, f"{story}: {other!r} is none of the two likeliest {likeliest}"
        assert likeliest[chosen] - likeliest[other] <= NEAR_TIE, f"{story}: no near-tie: {likeliest}"
    assert parted == 0 or not is_exact, "in float32 the texts are equal"
    length = mean_acceptance_length(counts(lab) - before)
    assert length is not None
    assert length > 2.2, "most first drafts on stories are right"
