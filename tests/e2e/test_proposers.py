"""Drafts of our own making on the real engine: as many as they should be, and no answer changed by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving import model_store
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from tests.profiles import lane_profile, write_profile

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

STORIES = [
    f"Write a short story about {what}."
    for what in (
        "a lighthouse keeper who collects lost letters",
        "two sisters who repair an old boat",
        "a fox that learns to read",
    )
]
COPY = (
    "Repeat this text word for word, three times: the boat lay on its side in the grass behind a house that nobody "
    "had painted for years, and no one asked whose it was."
)
# All stories alone, twice: an oracle guesses only what it has heard before.
GROUPS = [*([story] for story in STORIES), *([story] for story in STORIES), [COPY], [*STORIES, COPY]]
FIRST, AGAIN, COPIED, TOGETHER = slice(0, 3), slice(3, 6), slice(6, 7), slice(7, 8)
MAX_TOKENS = 48
RATES = [1.0, 0.5, 0.0]
BASE = {
    "strategy": "speculative",
    "max_num_seqs": len(GROUPS[-1]),
    "kv_cache_gib": 0.1,
    "takes_unpinned": False,
}
# By the profile drafts pay for up to two requests.
TABLE = {
    "num_speculative_tokens_per_batch_size": "auto",
    "profile": {"path": "p.json", "lane": "measured", "workload": "story"},
}
DRAFTED: dict[str, dict[str, Any]] = {
    "oracle": {"method": "oracle", "num_speculative_tokens": 3, "acceptance": RATES},
    "table": {"method": "ngram", "num_speculative_tokens": 4, **TABLE},
    "head-table": {"method": "eagle3", "model": "auto", "num_speculative_tokens": 2, **TABLE},
    # A word that was there before is enough for a draft, and a third of them must be right to pay for themselves.
    "adaptive": {
        "method": "adaptive",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "costs": {"fixed_s": 1, "token_s": 0.5},
    },
    # Alone a draft pays if a third are right, of four at once if two thirds are.
    "head-adaptive": {
        "method": "adaptive",
        "drafter": "eagle3",
        "model": "auto",
        "num_speculative_tokens": 3,
        "costs": {"fixed_s": 1, "token_s": 0.4, "draft_pass_s": 0.02},
    },
}


@dataclass(frozen=True)
class Drafts:
    """Of some groups of prompts; `accepted` are tokens by position, shape (k,)."""

    drafts: int
    tokens: int
    accepted: tuple[int, ...]


class Told:
    """What `proposers_in_vllm` said of each lane."""

    def __init__(self, found: dict[str, list[dict[str, Any]]]) -> None:
        self._found = found

    def answers(self, lane: str, groups: slice) -> list[list[list[int]]]:
        return [group["answers"] for group in self._found[lane][groups]]

    def drafts(self, lane: str, groups: slice) -> Drafts:
        chosen = self._found[lane][groups]
        by_position = zip(*(group["accepted"] for group in chosen), strict=True)
        return Drafts(
            sum(group["drafts"] for group in chosen),
            sum(group["draft_tokens"] for group in chosen),
            tuple(map(sum, by_position)),
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    model_store.prepare(print)
    folder: Path = tmp_path_factory.mktemp("lab")
    rates = {"story": (0.5, 0.25, 0.125, 0.0625), "copy": (0.9, 0.8, 0.7, 0.6)}
    write_profile(folder / "p.json", lane_profile("measured", LinearStepTime(1, 0.45, 0), DraftCost(), rates))
    lanes = [{**BASE, "name": "batched", "strategy": "batched", "takes_unpinned": True}]
    lanes += [{**BASE, "name": name, "speculation": drafts} for name, drafts in DRAFTED.items()]
    model = {"path": "auto", "dtype": "float32", "max_model_len": 512}
    (folder / "lab.yaml").write_text(yaml.safe_dump({"model": model, "lanes": lanes}))
    return Told({str(lane["name"]): ask(folder / "lab.yaml", str(lane["name"])) for lane in lanes})


def ask(config: Path, lane: str) -> list[dict[str, Any]]:
    """Each lane in a process of its own: where vLLM has drafted by n-grams it starts no further engine."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.proposers_in_vllm", str(config), lane, str(MAX_TOKENS)],
        input=json.dumps(GROUPS),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("lane", DRAFTED)
def test_no_greedy_answer_is_changed_in_float32(told: Told, lane: str) -> None:
    everything = slice(None)
    assert told.answers(lane, everything) == told.answers("batched", everything)


def test_an_oracle_is_right_as_often_as_it_should_be_at_each_position(told: Told) -> None:
    found = told.drafts("oracle", AGAIN)
    # A step gives 2.5 tokens.
    assert found.drafts == pytest.approx(len(STORIES) * MAX_TOKENS / 2.5, rel=0.15)
    first, second, third = (accepted / found.drafts for accepted in found.accepted)
    assert first == pytest.approx(RATES[0], abs=0.05)
    assert second == pytest.approx(RATES[1], abs=0.15)
    assert third == RATES[2]


def test_what_an_oracle_has_not_heard_it_does_not_guess(told: Told) -> None:
    assert told.drafts("oracle", FIRST).tokens == 0


@pytest.mark.parametrize("lane", ["table", "head-table"])
def test_a_table_of_a_profile_drafts_for_few_and_not_for_many(told: Told, lane: str) -> None:
    assert told.drafts(lane, COPIED).tokens > MAX_TOKENS / 4
    # But in the steps after the first have ended.
    assert told.drafts(lane, TOGETHER).tokens < told.drafts(lane, COPIED).tokens / 2


def test_a_row_gets_drafts_where_they_are_right_and_none_where_they_are_not(told: Told) -> None:
    assert sum(told.drafts("adaptive", COPIED).accepted) > MAX_TOKENS / 4
    # Each step that repeats a word could have up to four.
    assert told.drafts("adaptive", AGAIN).tokens < len(STORIES) * MAX_TOKENS / 8


def test_a_learned_draft_is_asked_for_less_in_a_large_batch(told: Told) -> None:
    alone, together = told.drafts("head-adaptive", AGAIN), told.drafts("head-adaptive", TOGETHER)
    assert sum(alone.accepted) > len(STORIES) * MAX_TOKENS / 4
    in_batch = together.tokens / len(GROUPS[-1])
    assert in_batch < alone.tokens / len(STORIES) / 2
