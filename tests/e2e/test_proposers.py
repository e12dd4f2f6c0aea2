"""Drafts of our own making on the real engine: as many as they should be, and no answer changed by them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from serving import model_store
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.metrics import names
from serving.metrics.reading import samples_of
from tests.profiles import lane_profile, write_profile
from tests.running_lab import RunningLab, running_lab

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

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
COPY = (
    "Repeat this text word for word, three times: the boat lay on its side in the grass behind a house that nobody "
    "had painted for years, and no one asked whose it was."
)
MAX_TOKENS = 64
BATCH = 8
RATES = [1.0, 0.5, 0.0]
SMALL = {"strategy": "speculative", "max_num_seqs": BATCH, "kv_cache_gib": 0.1, "takes_unpinned": False}
DRAFTED = {
    "oracle": {"method": "oracle", "num_speculative_tokens": 3, "acceptance": RATES},
    "table": {"method": "ngram", "num_speculative_tokens": 4},
    "head-table": {"method": "eagle3", "model": "auto", "num_speculative_tokens": 2},
    # A word that was there before is enough for a draft, and half of them must be right to pay for themselves.
    "adaptive": {
        "method": "adaptive",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "costs": {"fixed_s": 1, "token_s": 0.5},
    },
    # Alone a draft pays if a fifth are right, at 8 together hardly ever.
    "head-adaptive": {
        "method": "adaptive",
        "drafter": "eagle3",
        "model": "auto",
        "num_speculative_tokens": 3,
        "costs": {"fixed_s": 1, "token_s": 0.3, "draft_pass_s": 0.02},
    },
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab]:
    model_store.prepare(print)
    rates = (0.5, 0.25, 0.125, 0.0625)
    measured = lane_profile(
        "ngram", LinearStepTime(1, 0.3, 0), DraftCost(), {"story": rates, "copy": (0.9, 0.8, 0.7, 0.6)}
    )
    path = write_profile(tmp_path_factory.mktemp("profile") / "p.json", measured)
    table = {
        "num_speculative_tokens_per_batch_size": "auto",
        "profile": {"path": str(path), "lane": "ngram", "workload": "story"},
    }
    lanes: list[dict[str, Any]] = [{"name": "batched", "strategy": "batched", **SMALL}]
    lanes[0] |= {"strategy": "batched", "takes_unpinned": True}
    for name, speculation in DRAFTED.items():
        lanes.append({"name": name, **SMALL, "speculation": speculation | (table if "table" in name else {})})
    model = {"name": "smollm2-135m", "path": "auto", "dtype": "float32", "max_model_len": 1024}
    with running_lab({"model": model, "lanes": lanes}) as started:
        yield started


@dataclass(frozen=True)
class Counts:
    """Of one lane since its start; `by_position` are accepted tokens, shape (k,)."""

    drafts: int
    draft_tokens: int
    by_position: tuple[int, ...]

    def __sub__(self, other: Counts) -> Counts:
        by_position = tuple(a - b for a, b in zip(self.by_position, other.by_position, strict=True))
        return Counts(self.drafts - other.drafts, self.draft_tokens - other.draft_tokens, by_position)


def counts(lab: RunningLab, lane: str) -> Counts:
    (replica,) = lab.replicas(lane)
    page = httpx.get(f"{replica['url']}/metrics", timeout=10).text
    wanted = (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_BY_POSITION)
    samples = list(samples_of(page, wanted))
    values = {sample.name: int(sample.value) for sample in samples}
    by_position = {
        int(sample.labels["position"]): int(sample.value)
        for sample in samples
        if sample.name == names.VLLM_ACCEPTED_BY_POSITION
    }
    return Counts(values[wanted[0]], values[wanted[1]], tuple(by_position[at] for at in sorted(by_position)))


def answer(lab: RunningLab, lane: str, prompt: str) -> str:
    body = {
        "model": f"{lab.model}:{lane}",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    said = lab.post("/v1/chat/completions", body)
    assert said.status_code == 200, said.text
    text: str = said.json()["choices"][0]["message"]["content"]
    return text


def drafted_alone(lab: RunningLab, lane: str, prompts: Sequence[str]) -> Counts:
    before = counts(lab, lane)
    for prompt in prompts:
        answer(lab, lane, prompt)
    return counts(lab, lane) - before


def drafted_together(lab: RunningLab, lane: str, prompts: Sequence[str]) -> Counts:
    before = counts(lab, lane)
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: answer(lab, lane, prompt), prompts))
    return counts(lab, lane) - before


def test_no_greedy_answer_is_changed_in_float32(lab: RunningLab) -> None:
    for prompt in (*STORIES[:3], COPY):
        plain = answer(lab, "batched", prompt)
        # Twice: the oracle guesses only what it has heard before.
        said = {lane: [answer(lab, lane, prompt) for _ in range(2)] for lane in DRAFTED}
        assert said == {lane: [plain, plain] for lane in DRAFTED}


def test_an_oracle_is_right_as_often_as_it_should_be_at_each_position(lab: RunningLab) -> None:
    drafted_alone(lab, "oracle", STORIES)
    found = drafted_alone(lab, "oracle", STORIES)
    # A step gives 2.5 tokens.
    assert found.drafts == pytest.approx(len(STORIES) * MAX_TOKENS / 2.5, rel=0.15)
    first, second, third = (accepted / found.drafts for accepted in found.by_position)
    assert first > 0.97, "but for the last drafts, which reach beyond what was asked"
    assert second == pytest.approx(0.5, abs=0.12)
    assert third == 0


@pytest.mark.parametrize("lane", ["table", "head-table"])
def test_a_table_of_a_profile_is_in_effect_and_shown(lab: RunningLab, lane: str) -> None:
    (configured,) = [entry for entry in lab.get("/lab")["config"]["lanes"] if entry["name"] == lane]
    table = configured["speculation"]["num_speculative_tokens_per_batch_size"]
    assert table[0][:1] == [1]
    assert table[0][2] > 0
    assert table[-1][2] == 0
    alone = drafted_alone(lab, lane, [COPY])
    assert alone.draft_tokens > 0
    assert alone.draft_tokens <= alone.drafts * table[0][2]
    together = drafted_together(lab, lane, [f"{story} Begin with {COPY}" for story in STORIES] + [COPY, COPY])
    # Steps in which not all are there have a few.
    assert together.draft_tokens < BATCH * MAX_TOKENS / 4


def test_a_row_gets_drafts_where_they_are_right_and_none_where_they_are_not(lab: RunningLab) -> None:
    copied = drafted_alone(lab, "adaptive", [COPY])
    assert sum(copied.by_position) > MAX_TOKENS / 4
    made_up = drafted_alone(lab, "adaptive", STORIES)
    # Nearly each step could have four.
    assert made_up.draft_tokens < len(STORIES) * MAX_TOKENS / 4


def test_a_learned_draft_is_asked_for_less_in_a_large_batch(lab: RunningLab) -> None:
    alone = drafted_alone(lab, "head-adaptive", STORIES[:2])
    assert alone.draft_tokens > 2 * MAX_TOKENS / 4
    assert sum(alone.by_position) > alone.draft_tokens / 4
    together = drafted_together(lab, "head-adaptive", [*STORIES, COPY, COPY + "."])
    per_token = together.draft_tokens / (BATCH * MAX_TOKENS)
    assert per_token < alone.draft_tokens / (2 * MAX_TOKENS) / 2
