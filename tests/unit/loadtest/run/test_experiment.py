from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.offer.load import ClosedLoop
from loadtest.run import experiment
from loadtest.run.experiment import Experiment

ROOT = Path(__file__).parents[4]
LAB = {
    "config": {
        "lanes": [{"name": name, "strategy": name} for name in ("sequential", "batched", "speculative")]
    },
    "model": {"name": "m"},
}


def checked(**keys: Any) -> Experiment:
    return experiment.check(keys, "here")


def test_without_a_word_it_is_each_lane_at_three_levels_with_a_fresh_seed() -> None:
    plan = experiment.make_plan(checked(), "http://h:1", LAB, seed=99)
    assert plan.lanes == ("sequential", "batched", "speculative")
    assert {stage.load for stage in plan.stages} == {ClosedLoop(1), ClosedLoop(4), ClosedLoop(8)}
    assert {stage.workload for stage in plan.stages} == {"copy", "story"}
    assert (plan.seed, plan.slo, plan.model) == (99, None, "m")


def test_a_file_says_it_all(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(
        "name: mine\nlanes: [batched]\nworkloads: [copy]\nloads: [2, 'poisson:4/s,20s']\nconcurrency: [16]\n"
        "repeats: 2\noutput_tokens: 8\nseed: 3\nslo: ttft_p95<2s\nstop_early: true\nwarmup_s: 5\n"
    )
    plan = experiment.make_plan(
        experiment.check(experiment.read_file(path), "e.yaml"), "http://h:1", LAB, seed=99
    )
    assert [stage.load.label for stage in plan.stages] == ["16 users", "2 users", "poisson 4 req/s"] * 2
    assert (plan.name, plan.seed, plan.slo, plan.output_tokens) == ("mine", 3, "ttft_p95<2s", 8)
    assert all(stage.stop_early for stage in plan.stages)
    assert plan.stages[2].warmup_requests > 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lane": ["a"]}, r"here: lane: unknown key \(value \['a'\]\)"),
        ({"concurrency": [0]}, r"here: concurrency\.0 = 0: must be greater than or equal to 1"),
        ({"concurrency": [1025]}, r"concurrency\.0 = 1025: must be less than or equal to 1024"),
        ({"concurrency": [True]}, r"concurrency\.0 = True: must be a valid integer"),
        ({"concurrency": ["4"]}, r"concurrency\.0 = '4': must be a valid integer"),
        ({"concurrency": 4}, r"concurrency = 4: must be a list"),
        ({"workloads": []}, r"workloads = \[\]: "),
        ({"workloads": ["chess"]}, r"workloads = \['chess'\]: workload 'chess' is unknown"),
        ({"loads": ["poison:4/s"]}, r"loads = \['poison:4/s'\]: .*'?poison"),
        ({"repeats": 0}, r"repeats = 0: must be greater"),
        ({"output_tokens": 1}, r"output_tokens = 1: must be greater"),
        ({"seed": -1}, r"seed = -1: must be greater"),
        ({"slo": "fast"}, r"slo = 'fast': "),
        ({"max_stage_s": float("nan")}, r"max_stage_s = nan: must be "),
        ({"max_stage_s": 10**6}, r"max_stage_s = 1000000: must be less than or equal to 86400"),
        ({"name": "a/b"}, r"name = 'a/b': "),
    ],
)
def test_each_fault_names_key_value_and_bound(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment.check(keys, "here")


def test_a_lane_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lane 'warp' is not in the lab, which has sequential, batched"):
        experiment.make_plan(checked(lanes=["warp"]), "http://h:1", LAB, seed=1)


def test_lane_any_is_the_bare_name_where_a_lane_takes_such_requests() -> None:
    plan = experiment.make_plan(checked(lanes=["batched", "any"]), "http://h:1", LAB, seed=1)
    assert {stage.lane for stage in plan.stages} == {"batched", "any"}
    assert "any" not in {
        stage.lane for stage in experiment.make_plan(checked(), "http://h:1", LAB, seed=1).stages
    }
    config: Any = LAB["config"]
    lanes = [lane | {"takes_unpinned": False} for lane in config["lanes"]]
    pinned_only = LAB | {"config": config | {"lanes": lanes}}
    with pytest.raises(
        ValueError, match=r"lane 'any' is not in the lab, which has sequential, batched[^;]*\(lanes\)$"
    ):
        experiment.make_plan(checked(lanes=["any"]), "http://h:1", pinned_only, seed=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", r"e\.yaml: aliases"),
        ("[1, 2]", r"e\.yaml: expected keys and values"),
        ("a: [", r"e\.yaml: not YAML: "),
        ("!!python/object/apply:os.system [ls]", r"e\.yaml: not YAML: "),
        ("a: " + "x" * 70_000, r"e\.yaml: 70003 bytes; the limit is 65536"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        experiment.read_file(path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy/experiments").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_experiments_that_are_shipped_make_plans(path: Path) -> None:
    asked = experiment.check(experiment.read_file(path), path.name)
    plan = experiment.make_plan(asked, "http://h:1", LAB, seed=1)
    assert plan.stages
    assert plan.name == path.stem, "`name` is that of the file"


def test_the_parts_of_a_mixture_are_one_workload() -> None:
    assert experiment.split_names("copy,mixed:chat=3,copy=1,story") == (
        "copy",
        "mixed:chat=3,copy=1",
        "story",
    )


def test_stopping_early_needs_an_objective() -> None:
    with pytest.raises(ValueError, match="stop_early needs an objective"):
        experiment.check({"stop_early": True}, "flags")
