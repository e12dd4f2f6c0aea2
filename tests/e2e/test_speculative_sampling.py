"""Sampling options on a lane that speculates: none kills its engine, and drafts change no distribution."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.sampling_search import OUTSIDE_A_STEP, ask, batches, cases, table
from tests.running_lab import RunningLab

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

LANE = "speculative"
SEED = 1
ITSELF = {"$ref": "#"}


def rejection_sampler(which: str) -> dict[str, Any]:
    """What `speculative_distribution` says of vLLM's, `own` or `mended`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.speculative_distribution", which],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_still_needs_what_is_mended_and_refused() -> None:
    own = rejection_sampler("own")
    assert not own["lets_no_row_through"], "vllm_worker.apply_top_k_only is needed no more: take it away"
    assert not own["expands"], "vllm_worker.expand_batch_to_tokens is needed no more: take it away"
    assert not own["refuses_logprob_token_ids"], (
        "vllm_frontend refuses what vLLM refuses itself: take it away"
    )


def test_an_answer_with_drafts_has_the_distribution_that_was_asked_for() -> None:
    mended = rejection_sampler("mended")
    assert mended["lets_no_row_through"]
    assert mended["expands"]
    # Of 20,000 answers a share is within 0.018 of its chance but for one in a million.
    assert {case: error for case, error in mended["errors"].items() if error > 0.018} == {}


@pytest.mark.parametrize("top_k", [1, 50])
@pytest.mark.parametrize("max_tokens", [1, 12])
def test_top_k_alone_is_answered(lab: RunningLab, top_k: int, max_tokens: int) -> None:
    (before,) = lab.replicas(LANE)
    body = {"prompt": "a b a b a b a", "max_tokens": max_tokens, "top_k": top_k}
    answer = lab.post("/v1/completions", body | {"model": f"{lab.model}:{LANE}"})
    assert answer.status_code == 200, answer.text
    (after,) = lab.replicas(LANE)
    assert after["url"] == before["url"]


def test_with_top_k_1_every_answer_is_the_greedy_one_drafts_or_not(lab: RunningLab) -> None:
    body = {"model": f"{lab.model}:{LANE}", "prompt": "one two three one two three one two", "max_tokens": 24}
    greedy, top = (
        lab.post("/v1/completions", body | extra).json()["choices"][0]["text"]
        for extra in ({"temperature": 0}, {"top_k": 1, "temperature": 1.5})
    )
    assert top == greedy


def test_no_option_alone_breaks_the_engine(lab: RunningLab) -> None:
    """In batches of four that mix options and endpoints; with drafts where it matters, after a step without."""
    (replica,) = lab.replicas(LANE)
    asked = [case for case in cases(1) if case.has_drafts != (case.names[0] in OUTSIDE_A_STEP)]
    outcomes = asyncio.run(ask(replica["url"], lab.model, batches(asked, 4, SEED)))
    assert [outcome for outcome in outcomes if outcome.is_fault] == [], table(outcomes)
    assert len(outcomes) == len(asked)


def test_logprob_token_ids_are_refused_before_they_kill_the_engine(lab: RunningLab) -> None:
    (replica,) = lab.replicas(LANE)
    mixed = tuple(
        case
        for case in cases(1)
        if case.path == "/v1/completions" and case.has_drafts and "logprob" in case.names[0]
    )
    outcomes = asyncio.run(ask(replica["url"], lab.model, [mixed, mixed]))
    for outcome in outcomes:
        is_refused = outcome.case.names == ("logprob_token_ids",)
        assert outcome.status == (400 if is_refused else 200), outcome
        assert ("logprob_token_ids" in outcome.message) == is_refused


@pytest.mark.parametrize("lane", ["batched", LANE])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "mistake",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ITSELF}}},
        {"structured_outputs": {"json": {"anyOf": [ITSELF, ITSELF]}}},
        {"structured_outputs": {"grammar": "root ::= "}},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 3}}},  # not enforced by xgrammar
    ],
)
def test_a_grammar_that_cannot_be_kept_is_the_clients_mistake(
    lab: RunningLab, lane: str, is_stream: bool, mistake: dict[str, Any]
) -> None:
    body = {"model": f"{lab.model}:{lane}", "prompt": "Once", "max_tokens": 4, "stream": is_stream}
    answer = lab.post("/v1/completions", body | mistake)
    assert answer.status_code == 400, answer.text
    assert "grammar" in answer.json()["error"]["message"]


def test_a_stream_is_refused_as_an_answer_in_one_piece_is(lab: RunningLab) -> None:
    body = {"model": f"{lab.model}:{LANE}", "prompt": "Once", "max_tokens": 4, "min_p": 0.1}
    whole, streamed = (
        lab.post("/v1/completions", body | {"stream": is_stream}) for is_stream in (False, True)
    )
    assert (whole.status_code, streamed.status_code) == (400, 400)
    assert streamed.json() == whole.json()
