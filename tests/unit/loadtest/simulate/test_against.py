"""A run that was made by simulation itself comes out as it was measured."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest.client.record import RequestLabel, RequestRecord
from loadtest.offer.load import OpenLoop, RateSegment
from loadtest.offer.recorded_trace import MAX_TOKENS
from loadtest.run.plan import StagePlan
from loadtest.simulate import against
from loadtest.simulate.__main__ import main
from loadtest.simulate.against import FIGURES, Compared, capacities, compare_with_run
from loadtest.simulate.lanes import TextMix, candidates
from loadtest.simulate.offered import mean_lengths
from loadtest.simulate.tables import print_compared
from serving.calibration.profile import save
from serving.config import SchedulerConfig
from serving.core.request import Outcome
from serving.simulation.planned_lab import Offered, PlannedLab
from tests.unit.loadtest.runs import record, run_file, stage_run, write_whole_run
from tests.unit.loadtest.simulate.profiles import profile

USERS = 4


def records_of(
    lane: str, slower: float = 1.0, lengths: tuple[int, int] = (5, 60), apart_s: float = 0.0
) -> list[RequestRecord]:
    """What a closed loop of the profile's own lane would have measured; `slower` stretches its times.

    Args:
        apart_s: how long after one another its users begin.
    """
    rng = random.Random(4)
    offered = [Offered(apart_s * number, 100, rng.randint(*lengths)) for number in range(200)]
    candidate = candidates(profile(), (lane,), TextMix(("copy",), (1.0,)), mean_lengths(offered))[0]
    run = PlannedLab(SchedulerConfig(), [(candidate.model, 1)], offered, num_users=USERS, seed=11).run()
    return [
        record(
            lane,
            USERS,
            number,
            scheduled_at_s=slower * float(run.arrived_at_s[number]),
            ttft_s=slower * float(run.ttft_s[number]),
            gap_s=slower * float(run.tpot_s[number]),
            chunks=request.output_tokens,
        )
        for number, request in enumerate(offered)
    ]


def written(directory: Path, records: list[RequestRecord]) -> Path:
    directory.mkdir()
    write_whole_run(directory, run_file([stage_run(records)]), records)
    return directory


@pytest.mark.parametrize("lane", ["batched", "speculative"])
def test_what_the_profile_says_is_what_was_measured(lane: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "run", records_of(lane))
    (compared,) = compare_with_run(directory, profile(), SchedulerConfig(), lambda _: None, seed=0)
    assert (compared.lane, compared.workload, compared.load) == (lane, "copy", "4 users")
    assert (compared.num_requests, compared.num_left_out) == (200, 0)
    for figure in FIGURES:
        # TTFT is some whole steps: a median may be one more in one draw than in another.
        within = 0.25 if figure == "ttft_p50_s" else 0.05
        assert compared.error(figure) == pytest.approx(0, abs=within), figure


def test_users_begin_as_they_did_and_what_does_not_count_is_load(tmp_path: Path) -> None:
    records = records_of("batched", lengths=(40, 40), apart_s=0.1)[: 4 * USERS]
    came = [replace(each, label=replace(each.label, is_warmup=True)) for each in records[:USERS]]
    cut_off = [
        replace(
            each,
            label=replace(each.label, is_tail=True),
            outcome=Outcome.CANCELLED,
            prompt_tokens=None,
            output_tokens=None,
            asked_output_tokens=None,
            chunk_at_s=each.chunk_at_s[:5],
        )
        for each in records[-USERS:]
    ]
    directory = written(tmp_path / "run", [*came, *records[USERS:-USERS], *cut_off])
    (compared,) = compare_with_run(directory, profile(), SchedulerConfig(), lambda _: None, seed=0)
    assert (compared.num_requests, compared.num_left_out) == (2 * USERS, 0)
    # One prompt of its own in a step; four that come at once take 220 ms.
    assert compared.measured["ttft_p50_s"] == pytest.approx(0.073, abs=0.001)
    for figure in FIGURES:
        assert compared.error(figure) == pytest.approx(0, abs=0.02), figure


def test_figures_are_the_mean_of_as_many_requests_as_were_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path / "run", records_of("batched")[: 2 * USERS])
    (plain, drafting) = profile().lanes
    noisy = msgspec.structs.replace(plain, residuals=replace(plain.residuals, noise=0.5))
    known = msgspec.structs.replace(profile(), lanes=(noisy, drafting))

    def simulated(draws: int, seed: int) -> dict[str, float]:
        monkeypatch.setattr(against, "NUM_SIMULATED", draws)
        (compared,) = compare_with_run(directory, known, SchedulerConfig(), lambda _: None, seed=seed)
        return compared.simulated

    single = [simulated(1, seed) for seed in range(10)]
    assert len({each["ttft_p95_s"] for each in single}) == 10
    for figure, value in simulated(10, 0).items():
        assert value == pytest.approx(fmean(each[figure] for each in single))


def test_a_machine_that_was_slower_is_an_error_below_0(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", records_of("batched", slower=2.0))
    (compared,) = compare_with_run(directory, profile(), SchedulerConfig(), lambda _: None, seed=0)
    assert compared.error("tpot_p50_s") == pytest.approx(-0.5, abs=0.03)
    assert compared.error("output_tokens_per_s") == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"prompt_tokens": 10**12},
            "request 'batched-4-3': prompt_tokens is 1000000000000, must be in 0..10000000",
        ),
        ({"output_tokens": -5}, "request 'batched-4-3': output_tokens is -5, must be in 0..10000000"),
        ({"asked_output_tokens": 10**9}, "asked_output_tokens is 1000000000, must be in 0..10000000"),
        ({"chunk_tokens": (-1, 1)}, "the least of chunk_tokens is -1, must be in"),
        ({"chunk_tokens": (10**9, 1)}, "the sum of chunk_tokens is 1000000001, must be in"),
        (
            {"scheduled_at_s": 1e308},
            "requests.jsonl:4: not a request record: scheduled_at_s: Input should be less",
        ),
        (
            {"finished_at_s": 0.0},
            "requests.jsonl:4: not a request record: sent_at_s, chunk_at_s and finished_at_s are out of order: 0",
        ),
        (
            {"label": RequestLabel("batched-4-2", "batched", "copy", "batched/copy/4 users", 3)},
            "'batched-4-2' is there twice",
        ),
    ],
)
def test_what_cannot_be_of_a_request_is_named_and_not_reckoned_with(
    changes: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    records = records_of("batched", lengths=(2, 2))[:20]
    records[3] = replace(records[3], **changes)
    (tmp_path / "run").mkdir()
    write_whole_run(tmp_path / "run", run_file([stage_run(records_of("batched")[:20])]), records)
    with pytest.raises(ValueError, match=re.escape(fault)) as refused:
        compare_with_run(tmp_path / "run", profile(), SchedulerConfig(), lambda _: None, seed=0)
    assert str(refused.value).startswith(f"{tmp_path}/run/requests.jsonl")


def test_what_failed_may_have_any_count(tmp_path: Path) -> None:
    """A server that counts what cannot be makes a request fail, and is no fault of the file."""
    records = records_of("batched")[:20]
    records[3] = replace(records[3], outcome=Outcome.FAILED, reason="bad_stream", output_tokens=10**12)
    (compared,) = compare_with_run(
        written(tmp_path / "run", records), profile(), SchedulerConfig(), lambda _: None, seed=0
    )
    assert (compared.num_requests, compared.num_left_out) == (19, 1)


def test_the_longest_answer_that_may_be_needs_no_memory_of_its_own(tmp_path: Path) -> None:
    records = [
        replace(each, output_tokens=MAX_TOKENS, asked_output_tokens=None)
        for each in records_of("batched")[:8]
    ]
    directory = written(tmp_path / "run", records)
    tracemalloc.start()
    compare_with_run(directory, profile(), SchedulerConfig(), lambda _: None, seed=0)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 50e6, "a number for each token would be 80 MB an answer"


def test_a_stage_in_which_nothing_ended_in_time_has_no_capacity_to_be_wrong_about(tmp_path: Path) -> None:
    """In an open loop no answer may be whole when its load ends: tokens/s are then not known."""
    records = records_of("batched", apart_s=0.0)[:USERS]
    plan = StagePlan("batched", "copy", OpenLoop((RateSegment(0.001, 4000, 4000),)), USERS)
    records = [replace(each, label=replace(each.label, stage=plan.key)) for each in records]
    (tmp_path / "run").mkdir()
    write_whole_run(tmp_path / "run", run_file([stage_run(records, plan=plan)]), records)
    compared = compare_with_run(tmp_path / "run", profile(), SchedulerConfig(), lambda _: None, seed=0)
    (found,) = capacities(compared)
    assert (found.measured_tokens_per_s, found.error) == (0, None)
    console = Console(record=True, width=140)
    print_compared(console, compared)
    assert "batched on copy 0 / 0, –; within 15% in 0 of 0" in console.export_text()


def test_a_run_of_another_model_is_said_once(tmp_path: Path) -> None:
    by_lane = {lane: records_of(lane)[:20] for lane in ("batched", "speculative")}
    stages = [stage_run(records) for records in by_lane.values()]
    run = run_file(stages)
    save(profile(), tmp_path / "profile.json")
    options = ["--profile", str(tmp_path / "profile.json"), "--runs-dir", str(tmp_path / "runs")]
    warned = {}
    for model in ("smollm2-135m", "any-model"):
        (tmp_path / model).mkdir()
        named = replace(run, run=replace(run.run, model=run.run.model | {"name": model}))
        write_whole_run(tmp_path / model, named, [each for records in by_lane.values() for each in records])
        done = CliRunner().invoke(main, [*options, "--against", str(tmp_path / model)])
        assert done.exit_code == 0, done.output
        warned[model] = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert warned["any-model"] == []
    assert warned["smollm2-135m"] == [
        f"warning: {tmp_path}/smollm2-135m: was measured with model smollm2-135m, the profile with any-model: "
        "what the simulation is off by is between two models"
    ]


def test_repeats_of_a_stage_are_one_and_by_how_much_they_differ_is_said(tmp_path: Path) -> None:
    first = records_of("batched")
    again = [
        replace(each, label=replace(each.label, stage=f"{each.label.stage}/repeat 2"))
        for each in records_of("batched", slower=1.5)
    ]
    stages = [stage_run(first), stage_run(again, plan=replace(stage_run(first).plan, repeat=1))]
    (tmp_path / "run").mkdir()
    write_whole_run(tmp_path / "run", run_file(stages), [*first, *again])
    (compared,) = compare_with_run(tmp_path / "run", profile(), SchedulerConfig(), lambda _: None, seed=0)
    assert compared.num_requests == 400
    assert compared.spread["tpot_p50_s"] == pytest.approx(0.5 / 1.25, abs=0.01)
    assert compared.spread["output_tokens_per_s"] == pytest.approx(0.5 / 1.25, abs=0.02)
    # The mean of one that ran as the profile says and one at two thirds of that.
    assert compared.error("output_tokens_per_s") == pytest.approx(1 / (5 / 6) - 1, abs=0.03)


def test_the_verb_shows_errors_and_writes_them(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", records_of("batched"))
    save(profile(), tmp_path / "profile.json")
    options = ["--profile", str(tmp_path / "profile.json"), "--runs-dir", str(tmp_path / "runs")]
    done = CliRunner().invoke(main, [*options, "--against", str(directory)])
    assert done.exit_code == 0, done.output
    assert "TPOT p50: error" in done.output
    assert "within 15% in 1 of 1" in done.output
    assert "capacity, the most tokens/s of any load: batched on copy" in done.output
    assert len(list((tmp_path / "runs").glob("*-simulate-against/simulate-against.json"))) == 1
    missing = CliRunner().invoke(main, [*options, "--against", str(tmp_path / "none")])
    assert missing.exit_code == 2
    assert "none/run.json" in missing.output.replace("\n", "")


def test_answers_of_one_token_have_no_tpot_to_be_wrong_about(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", records_of("batched", lengths=(1, 1)))
    save(profile(), tmp_path / "profile.json")
    options = ["--profile", str(tmp_path / "profile.json"), "--runs-dir", str(tmp_path / "runs"), "--json"]
    done = CliRunner().invoke(main, [*options, "--against", str(directory)])
    assert done.exit_code == 0, done.output
    (stage,) = json.loads(done.stdout)["stages"]
    assert stage["errors"]["tpot_p50_s"] is None
    assert stage["errors"]["ttft_p50_s"] == pytest.approx(0, abs=0.05)
    assert (
        "TPOT p50: error" not in CliRunner().invoke(main, [*options[:-1], "--against", str(directory)]).output
    )


def test_a_run_without_lanes_of_the_profile_is_refused(tmp_path: Path) -> None:
    first, *others = records_of("batched")[:4]
    few = written(tmp_path / "run", [replace(first, output_tokens=None), *others])
    left_out: list[str] = []
    with pytest.raises(ValueError, match="no stage of batched, speculative with 4 completed requests"):
        compare_with_run(few, profile(), SchedulerConfig(), lambda _: None, seed=0, left_out=left_out.append)
    (why,) = left_out
    assert why.endswith(": 3 of its requests completed, of 4 at least")


@pytest.mark.parametrize(
    ("speculation", "why"),
    [
        (
            {"method": "adaptive", "num_speculative_tokens": 3},
            "how many tokens its lane drafts follows the load",
        ),
        (
            {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
            "how many tokens its lane drafts follows the load",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 5},
            "its lane drafted 5 tokens a step, that of the profile 3",
        ),
    ],
)
def test_a_lane_that_drafts_otherwise_than_the_profile_s_is_left_out(
    speculation: dict[str, Any], why: str, tmp_path: Path
) -> None:
    by_lane = {lane: records_of(lane) for lane in ("batched", "speculative")}
    run = run_file([stage_run(records) for records in by_lane.values()])
    run.run.config["lanes"][1]["speculation"] = speculation
    (tmp_path / "run").mkdir()
    write_whole_run(tmp_path / "run", run, [each for records in by_lane.values() for each in records])
    left_out: list[str] = []
    (found,) = compare_with_run(
        tmp_path / "run", profile(), None, lambda _: None, seed=0, left_out=left_out.append
    )
    assert found.lane == "batched"
    assert len(left_out) == 1
    assert why in left_out[0]


def test_a_stage_of_a_text_that_was_not_calibrated_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    known = records_of("speculative")
    other = [
        replace(
            each, label=replace(each.label, workload="rag", stage=each.label.stage.replace("copy", "rag"))
        )
        for each in known
    ]
    (tmp_path / "run").mkdir()
    write_whole_run(tmp_path / "run", run_file([stage_run(known), stage_run(other)]), [*known, *other])
    left_out: list[str] = []
    (compared,) = compare_with_run(
        tmp_path / "run", profile(), None, lambda _: None, seed=0, left_out=left_out.append
    )
    assert compared.workload == "copy"
    assert left_out == ["speculative/rag/4 users: the profile lacks acceptance on 'rag'; it has copy, story"]


def test_the_scheduler_s_bounds_are_those_of_the_lab_that_was_measured(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", records_of("batched", apart_s=0.05))
    run = json.loads((directory / "run.json").read_text())
    run["run"]["config"]["scheduler"] = {"max_waiting_requests": 0}
    run["run"]["config"]["lanes"] = []
    (directory / "run.json").write_text(json.dumps(run))
    (compared,) = compare_with_run(directory, profile(), None, lambda _: None, seed=0)
    assert compared.num_requests == 200, "nobody waits where there are slots"
    run["run"]["config"]["scheduler"] = {"max_waiting_requests": "many"}
    (directory / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"run\.json: config\.scheduler: .*max_waiting_requests"):
        compare_with_run(directory, profile(), None, lambda _: None, seed=0)


def test_capacity_is_the_most_of_any_load() -> None:
    def stage(workload: str, measured: float, simulated: float) -> Compared:
        figures = [dict.fromkeys(FIGURES, value) for value in (measured, simulated)]
        return Compared("batched", workload, "any", 9, 0, *figures)

    found = capacities([stage("copy", 100, 90), stage("copy", 80, 110), stage("story", 50, 40)])
    assert [each.workload for each in found] == ["copy", "story"]
    assert [each.error for each in found] == pytest.approx([0.1, -0.2])


def test_a_replica_that_names_no_lane_is_a_fault_of_the_file(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", records_of("batched"))
    run = json.loads((directory / "run.json").read_text())
    run["run"]["replicas"] = [{"replica_id": "b-1"}]
    (directory / "run.json").write_text(json.dumps(run))
    with pytest.raises(ValueError, match=r"run.json: a replica has no lane: \{'replica_id': 'b-1'\}"):
        compare_with_run(directory, profile(), SchedulerConfig(), lambda _: None, seed=0)


@pytest.mark.parametrize(
    "option", [("--slo", "ttft<1s"), ("--lanes", "batched"), ("--speed", "1"), ("--replicas", "2")]
)
def test_what_a_plan_is_told_is_not_ignored_beside_a_run(option: tuple[str, str], tmp_path: Path) -> None:
    where = ["--profile", str(tmp_path / "profile.json"), "--runs-dir", str(tmp_path / "runs")]
    done = CliRunner().invoke(main, [*where, "--against", str(tmp_path), *option])
    assert done.exit_code == 2
    assert f"{option[0]} goes with a plan" in done.output
