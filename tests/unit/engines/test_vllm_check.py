"""Which lanes vLLM is asked about, what it is told, and what becomes of its answer. It is never imported here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import model_store
from serving.config import LabConfig, LaneConfig, ModelConfig, SimulatedProfile, SpeculationConfig
from serving.core.lane import Strategy
from serving.engines import vllm_check

PLAIN = LaneConfig(name="plain", strategy=Strategy.BATCHED)
TUNED = LaneConfig(name="tuned", strategy=Strategy.BATCHED, engine_args={"block_size": 32, "seed": "x"})
NGRAM = LaneConfig(name="ngram", strategy=Strategy.SPECULATIVE, speculation=SpeculationConfig())
MTP = LaneConfig(name="mtp", strategy=Strategy.SPECULATIVE, speculation=SpeculationConfig(method="mtp"))
SIMULATED = LaneConfig(
    name="sim", strategy=Strategy.BATCHED, engine="simulated", simulated=SimulatedProfile()
)


class Vllm:
    """Stands for the process that asks vLLM: notes the questions, gives the answers."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.questions: list[dict[str, Any]] = []
        self.variables: dict[str, str] = {}

    def __call__(self, questions: list[dict[str, Any]], variables: dict[str, str]) -> list[list[str]]:
        self.questions, self.variables = questions, variables
        return self._answers


def lab(*lanes: LaneConfig) -> LabConfig:
    return LabConfig(model=ModelConfig(device="cpu"), lanes=lanes)


def test_vllm_is_not_asked_about_lanes_that_are_judged_here() -> None:
    ask, said = Vllm(), list[str]()
    assert vllm_check.faults(lab(PLAIN, NGRAM, SIMULATED), said.append, ask) == []
    assert (ask.questions, said) == ([], [])


def test_each_lane_is_a_question_and_each_answer_is_given() -> None:
    ask, said = Vllm(["lanes[tuned].engine_args.seed: no"], ["lanes[mtp]: no"]), list[str]()
    assert vllm_check.faults(lab(PLAIN, TUNED, MTP), said.append, ask) == [
        "lanes[tuned].engine_args.seed: no",
        "lanes[mtp]: no",
    ]
    assert said == ["asking vLLM about the options of tuned, mtp"]
    tuned, mtp = ask.questions
    assert (tuned["lane"], mtp["lane"]) == ("lanes[tuned]", "lanes[mtp]")
    assert tuned["engine_args"] == [
        ("block_size", "32", ["--block-size=32"]),
        ("seed", '"x"', ["--seed=x"]),
    ]
    assert tuned["arguments"] == [*tuned["base"], "--block-size=32", "--seed=x"]
    assert "--speculative-config" in mtp["arguments"]
    assert mtp["given"] == 'speculation = {"method": "mtp"}'


def test_vllm_reads_the_environment_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OF_THE_USER", "1")
    ask = Vllm([])
    vllm_check.faults(lab(TUNED), lambda _: None, ask)
    assert (ask.variables["VLLM_OF_THE_USER"], ask.variables["HF_HUB_OFFLINE"]) == ("1", "1")


def test_what_needs_the_checkpoint_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "directory_of", lambda _: tmp_path)
    ask = Vllm([])
    for is_there in (False, True):
        vllm_check.faults(lab(TUNED), lambda _: None, ask)
        assert ask.questions[0]["has_checkpoint"] == is_there
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).touch()


def test_the_head_that_comes_with_tandem_is_there_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_store, "is_here", lambda path: path == "auto")
    speculation = SpeculationConfig(method="eagle3", model="auto", parallel_drafting=True)
    ask = Vllm([])
    lane = LaneConfig(name="learned", strategy=Strategy.SPECULATIVE, speculation=speculation)
    vllm_check.faults(lab(lane), lambda _: None, ask)
    assert ask.questions[0]["has_checkpoint"]
    assert str(model_store.SHIPPED_HEAD) in " ".join(ask.questions[0]["arguments"])


def test_what_needs_the_draft_waits_for_it(tmp_path: Path) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    speculation = SpeculationConfig(method="eagle3", model=str(head), parallel_drafting=True)
    lane = LaneConfig(name="learned", strategy=Strategy.SPECULATIVE, speculation=speculation)
    config = LabConfig(model=ModelConfig(path=str(model), device="cpu"), lanes=(lane,))
    ask = Vllm([])
    for directory, is_there in ((model, False), (head, True)):
        directory.mkdir()
        for name in ("config.json", "model.safetensors"):
            (directory / name).touch()
        vllm_check.faults(config, lambda _: None, ask)
        assert ask.questions[0]["has_checkpoint"] == is_there


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (
            subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no vllm\n"),
            "its process ended with exit code 1: ImportError: no vllm",
        ),
        (subprocess.CompletedProcess([], -9, "", ""), "its process ended with exit code -9: it says nothing"),
        (subprocess.TimeoutExpired("vllm", 300), "no answer within 300 s"),
    ],
)
def test_a_vllm_that_cannot_be_asked_is_a_fault(
    outcome: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    assert vllm_check.faults(lab(TUNED), lambda _: None) == [
        f"vLLM cannot be asked about the options of tuned: {fault}"
    ]


def test_the_module_does_not_import_vllm() -> None:
    code = "import sys, serving.engines.vllm_check; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
