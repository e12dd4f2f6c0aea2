"""Which lanes count the same tokens, and how each is asked and its prompts are sized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from loadtest.client.lane_models import LaneModel, alike, counters_of_lanes, lane_models, other_names
from loadtest.offer.prompt_tokens import ByteEstimate
from loadtest.run.plan import Plan
from loadtest.run.sender import Sender
from tests.unit.loadtest.runs import stage_plan

CONFIG: dict[str, Any] = {
    "model": {"name": "plain", "path": "/plain"},
    "lanes": [
        {"name": "batched"},
        {"name": "speculative", "model": None},
        {"name": "quantised", "model": {"name": None, "path": "/quantised"}},
        {"name": "other", "model": {"name": "other", "path": "/other"}},
    ],
}


def told(**tokenizers: str) -> dict[str, LaneModel]:
    return lane_models(CONFIG, [{"lane": lane, "tokenizer": one} for lane, one in tokenizers.items()])


def test_a_lane_serves_the_labs_model_or_its_own() -> None:
    assert {lane: (one.name, one.path) for lane, one in told().items()} == {
        "batched": ("plain", "/plain"),
        "speculative": ("plain", "/plain"),
        "quantised": ("plain", "/quantised"),
        "other": ("other", "/other"),
    }
    assert other_names(CONFIG) == {"other": "other"}


@pytest.mark.parametrize(
    ("tokenizers", "groups"),
    [
        ({}, [("batched", "speculative"), ("quantised",), ("other",)]),
        # One replica tells for all lanes of its model.
        ({"batched": "a", "quantised": "a"}, [("batched", "speculative", "quantised"), ("other",)]),
        (
            {"speculative": "a", "quantised": "a", "other": "b"},
            [("batched", "speculative", "quantised"), ("other",)],
        ),
        (
            {"batched": "a", "quantised": "", "other": "a"},
            [("batched", "speculative", "other"), ("quantised",)],
        ),
    ],
)
def test_lanes_are_alike_by_tokenizer_and_where_none_is_told_by_model(
    tokenizers: dict[str, str], groups: list[tuple[str, ...]]
) -> None:
    assert list(alike(told(**tokenizers))) == groups


def test_a_lab_of_before_is_one_group() -> None:
    assert alike(lane_models({"lanes": [{"name": "a"}, {"name": "b"}]}, [{"lane": "a"}])) == (("a", "b"),)


def test_a_lane_of_another_model_has_a_counter_of_its_own(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    lanes = [*CONFIG["lanes"][:3], {"name": "other", "model": {"name": "other", "path": str(tmp_path)}}]
    counters = counters_of_lanes(CONFIG | {"lanes": lanes})
    assert {lane: one.name for lane, one in counters.items()} == {
        "quantised": "estimate: bytes/4",
        "other": f"tokenizer: {tmp_path}/tokenizer.json",
    }
    assert counters["other"].count("any text that it holds is one word") == 1


class TwiceAsMany(ByteEstimate):
    """A tokenizer whose tokens are half as long."""

    def count(self, text: str) -> int:
        return 2 * super().count(text)

    def cut(self, text: str, tokens: int) -> str:
        return super().cut(text, max(1, tokens // 2))


def test_prompts_are_sized_by_the_lanes_own_tokenizer_and_sent_to_its_own_name() -> None:
    stages = (stage_plan("batched", "chat", 1), stage_plan("other", "chat", 1))
    plan = Plan("http://h:1", "plain", stages, seed=3, prompt_tokens=200, models=other_names(CONFIG))
    sender = Sender(plan, "run", "run", lambda: 0.0, counters={"other": TwiceAsMany()})
    bodies = [sender.request(stage, 0).body for stage in stages]
    assert [body["model"] for body in bodies] == ["plain:batched", "other:other"]
    ours, theirs = (sum(len(message["content"]) for message in body["messages"]) for body in bodies)
    assert 0.4 < theirs / ours < 0.6
