"""Engines of other shapes in one lab: a model in 8 bits beside its original, an engine of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.quantise.__main__ import quantise
from serving import model_store
from tests.running_lab import RunningLab, running_lab

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

CONFIG = Path(__file__).parents[2] / "deploy" / "quantised.yaml"
NUM_RANKS = 3  # the default model has 9 heads, and 3 of its keys
STORY: list[Any] = [{"role": "user", "content": "Write a story about a fox."}]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLab]:
    """The example, and a lane spread over three ranks."""
    config = yaml.safe_load(CONFIG.read_text())
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "int8"
    assert quantise(model_store.prepare(print), checkpoint) == 30 * 7, "layers, matrices of each"
    config["model"]["dtype"] = "float32"
    batched, int8 = config["lanes"]
    int8["model"]["path"] = str(checkpoint)
    config["lanes"].append(batched | {"name": "spread", "tensor_parallel_size": NUM_RANKS})
    with running_lab(config) as started:
        yield started


def story(lab: RunningLab, model: str) -> tuple[str, str]:
    """Lane and text of a greedy answer."""
    body = {"model": model, "messages": STORY, "max_tokens": 24, "temperature": 0}
    answer = lab.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-tandem-lane"], answer.json()["choices"][0]["message"]["content"]


def test_a_model_in_8_bits_serves_beside_its_original(lab: RunningLab) -> None:
    lane, rounded = story(lab, "smollm2-135m-int8")
    _, exact = story(lab, f"{lab.model}:batched")
    assert lane == "int8"
    assert rounded != exact, "its weights are others"
    assert "fox" in rounded
    assert len(set(rounded.split())) > 10, "words, not one over and over"


def test_an_engine_of_several_ranks_says_what_one_of_one_rank_does(lab: RunningLab) -> None:
    assert story(lab, f"{lab.model}:spread") == ("spread", story(lab, f"{lab.model}:batched")[1])
    titles = [" ".join(process.cmdline()) for process in lab.processes()]
    assert sum("Worker_TP" in title for title in titles) == NUM_RANKS, titles


def test_their_options_are_told(lab: RunningLab) -> None:
    arguments = {replica["lane"]: replica["arguments"] for replica in lab.get("/lab")["replicas"]}
    at = arguments["spread"].index("--tensor-parallel-size")
    assert arguments["spread"][at + 1] == str(NUM_RANKS)
    assert "--tensor-parallel-size" not in arguments["int8"]
