from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from loadtest.analysis.compare import (
    Change,
    LoadedRun,
    Ratio,
    StageSamples,
    change_of,
    compare,
    settling_ratio,
)
from loadtest.analysis.summary import StageSummary, Summary
from loadtest.client.lane_models import LaneModel
from loadtest.judge.estimate import Estimate
from loadtest.offer.load import ClosedLoop, constant_rate
from loadtest.report.__main__ import main
from loadtest.report.comparison import sentences, write_page
from tests.unit.loadtest.runs import record, run_file, stage_run, write_whole_run
from tests.unit.loadtest.summaries import TOO_LATE, capacity, objective, stage, summary, sweep


def samples(mean_s: float, prompt_tokens: float = 100, seed: int = 0) -> StageSamples:
    """200 requests around a mean; TTFT, TPOT and E2E alike, for only their ratio matters here."""
    values = tuple(np.random.default_rng(seed).gamma(50, mean_s / 50, 200).tolist())
    return StageSamples(values, values, values, prompt_tokens, 48)


def loaded(
    stages: Sequence[StageSummary], mean_s: float = 1.0, run_id: str = "a", seed: int = 1
) -> LoadedRun:
    made = summary(stages)
    made = replace(made, run=replace(made.run, id=run_id, seed=seed))
    return LoadedRun(made, {each.key: samples(mean_s, seed=seed) for each in stages})


def by_quantity(ratios: Sequence[Ratio]) -> dict[str, Ratio]:
    return {ratio.quantity: ratio for ratio in ratios}


@pytest.mark.parametrize(
    ("ratio", "is_higher_better", "change"),
    [
        (Estimate(1.2, 1.1, 1.3), True, Change.BETTER),
        (Estimate(1.2, 1.1, 1.3), False, Change.WORSE),
        (Estimate(0.8, 0.7, 0.9), True, Change.WORSE),
        (Estimate(0.8, 0.7, 0.9), False, Change.BETTER),
        (Estimate(1.2, 0.9, 1.5), True, Change.SAME),
        (Estimate(1.0, 1.0, 1.5), True, Change.SAME),
        (Estimate(1.2), True, Change.UNKNOWN),
        (None, True, Change.UNKNOWN),
    ],
)
def test_what_a_ratio_says(ratio: Estimate | None, is_higher_better: bool, change: Change) -> None:
    assert change_of(ratio, is_higher_better) is change


def test_twice_as_slow_is_worse_and_more_tokens_are_better() -> None:
    a = loaded([stage(tokens_per_s=80, ttft_s=0.4)], mean_s=0.4)
    b = loaded([stage(tokens_per_s=160, ttft_s=0.8)], mean_s=0.8, run_id="b", seed=2)
    (pair,) = compare(a, b).stages
    ratios = by_quantity(pair.ratios)
    assert list(ratios) == ["tokens/s", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "E2E p50", "E2E p95"]
    assert ratios["tokens/s"].change is Change.BETTER
    assert ratios["TTFT p50"].change is Change.WORSE
    found = ratios["TTFT p50"].ratio
    assert found is not None
    assert found.value == pytest.approx(2, rel=0.1)
    assert ratios["TTFT p50"].basis == (
        "bootstrap over 200 and 200 requests, and an assumed 5% between two runs of a stage"
    )


def test_the_same_distribution_is_not_told_apart() -> None:
    a, b = loaded([stage()], seed=1), loaded([stage()], run_id="b", seed=2)
    (pair,) = compare(a, b).stages
    assert {ratio.change for ratio in pair.ratios} == {Change.SAME}
    overall, verdict = sentences(compare(a, b))
    assert overall == (
        "Of 7 ratios, 7 have an interval: B is better in 0, worse in 0, and not distinguishable in 7. "
        "Chance alone would settle about 0.4 of them."
    )
    assert verdict.startswith("On copy at 4 users, batched: not distinguishable in tokens/s, TTFT p50")


def test_few_requests_give_a_ratio_and_no_verdict() -> None:
    few = replace(stage(), ttft_s=replace(stage().ttft_s, p50=Estimate(0.4)))
    (pair,) = compare(loaded([few]), loaded([few], run_id="b", seed=2)).stages
    ratio = by_quantity(pair.ratios)["TTFT p50"]
    assert (ratio.ratio, ratio.change) == (Estimate(1.0), Change.UNKNOWN)
    assert ratio.basis == "no interval: too few requests"


def test_throughput_of_single_repeats_has_no_interval_and_says_what_it_needs() -> None:
    single = replace(stage(), output_tokens_per_s=Estimate(80.0))
    (pair,) = compare(loaded([single]), loaded([single], run_id="b", seed=2)).stages
    assert by_quantity(pair.ratios)["tokens/s"].basis == "no interval: it needs 2 repeats of each"


def test_no_verdict_from_an_invalid_stage() -> None:
    a = loaded([stage(tokens_per_s=10)])
    b = loaded([stage(tokens_per_s=500, invalid=(TOO_LATE,))], run_id="b", seed=2)
    found = compare(a, b)
    assert {ratio.change for ratio in found.stages[0].ratios} == {Change.INVALID}
    assert found.warnings[0].startswith("INVALID: run B (b) in batched/copy/4 users")
    assert (
        list(sentences(found))[1]
        == "On copy at 4 users, batched: no verdict, for one of the stages is INVALID."
    )


def test_attainment_is_compared_under_the_same_objective_only() -> None:
    def run(slo: str) -> LoadedRun:
        made = summary([stage(slo=objective(0.9, 3.0))], slo=slo)
        return LoadedRun(made, {})

    (same,) = compare(run("ttft<2s"), run("ttft<2s")).stages
    (other,) = compare(run("ttft<2s"), run("ttft<3s")).stages
    assert "attainment" in by_quantity(same.ratios)
    assert "attainment" not in by_quantity(other.ratios)


def with_slo(made: Summary, slo: str) -> LoadedRun:
    return LoadedRun(replace(made, slo=slo), {})


def test_capacities() -> None:
    a = LoadedRun(summary(capacities=[capacity("batched", 1.0)]), {})
    b = LoadedRun(summary(capacities=[capacity("batched", 2.0)]), {})
    bound = LoadedRun(summary(capacities=[capacity("batched", 2.0, is_lower_bound=True)]), {})
    none = LoadedRun(summary(capacities=[capacity("batched", None)]), {})
    (pair,) = compare(a, b).capacities
    assert (pair.ratios[0].a, pair.ratios[0].b, pair.ratios[0].change) == (1.0, 2.0, Change.BETTER)
    for other, basis in (
        (bound, "one of them is only a lower bound"),
        (none, "none was found in one of them"),
        (with_slo(b.summary, "ttft<9s"), "the objectives differ"),
    ):
        (pair,) = compare(a, other).capacities
        assert (pair.ratios[0].ratio, pair.ratios[0].change) == (None, Change.UNKNOWN)
        assert pair.ratios[0].basis == basis


def test_missing_stages_are_listed_on_both_sides() -> None:
    a = loaded([stage("batched"), stage("batched", ClosedLoop(8)), stage("sequential")])
    b = loaded([stage("batched"), stage("batched", constant_rate(2, 30))], run_id="b", seed=2)
    found = compare(a, b)
    assert [pair.load for pair in found.stages] == ["4 users"]
    assert found.only_in_a == ("batched/copy/8 users", "sequential/copy/4 users")
    assert found.only_in_b == ("batched/copy/poisson 2 req/s",)


def test_runs_without_a_stage_in_common_are_refused_with_what_each_has() -> None:
    a = loaded([stage("batched"), stage("sequential")])
    b = loaded([stage("batched", ClosedLoop(8))], run_id="b", seed=2)
    has = r"A \(a\) has batched/copy/4 users, sequential/copy/4 users; B \(b\) has batched/copy/8 users$"
    with pytest.raises(ValueError, match=has):
        compare(a, b)
    # As long as a lane's capacity is known in both, there is something to compare.
    swept = LoadedRun(sweep(), {})
    other = replace(swept, summary=replace(swept.summary, stages=()))
    assert compare(swept, other).stages == ()


def test_an_error_names_the_first_stages_of_many() -> None:
    a = loaded([stage("batched", ClosedLoop(users)) for users in range(1, 21)])
    with pytest.raises(ValueError, match=r"12 users and 8 more; B \(b\) has none$"):
        compare(a, LoadedRun(replace(a.summary, run=replace(a.summary.run, id="b"), stages=()), {}))


def test_runs_of_one_lane_each_are_compared_whatever_its_name() -> None:
    (pair,) = compare(loaded([stage("batched")]), loaded([stage("speculative")], run_id="b", seed=2)).stages
    assert (pair.lane_a, pair.lane_b, pair.lanes) == ("batched", "speculative", "speculative / batched")


def test_two_lanes_of_one_run() -> None:
    run = loaded([stage("batched"), stage("speculative", tokens_per_s=200), stage("sequential")])
    found = compare(run, run, ("batched", "speculative"))
    assert [(pair.lane_a, pair.lane_b) for pair in found.stages] == [("batched", "speculative")]
    assert by_quantity(found.stages[0].ratios)["tokens/s"].change is Change.BETTER
    assert (found.only_in_a, found.only_in_b) == ((), ())
    assert not any("seed" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("lanes", "words"),
    [
        (("diffusion", "batched"), r"run a has no lane 'diffusion'; it has batched, sequential"),
        (("batched", "sequential"), r"run b has no lane 'sequential'; it has speculative, batched"),
    ],
)
def test_a_lane_that_is_not_there_is_named(lanes: tuple[str, str], words: str) -> None:
    a = loaded([stage("batched"), stage("sequential")])
    b = loaded([stage("speculative"), stage("batched")], run_id="b")
    with pytest.raises(ValueError, match=words):
        compare(a, b, lanes)


def test_runs_without_a_common_lane() -> None:
    a = loaded([stage("batched"), stage("sequential")])
    with pytest.raises(ValueError, match=r"share no lane: A has batched, sequential, B has speculative"):
        compare(a, loaded([stage("speculative")], run_id="b"))


def test_what_was_not_the_same_is_listed_and_warned_of() -> None:
    a, b = loaded([stage()]), loaded([stage()], run_id="b", seed=2)
    run = b.summary.run
    run = replace(run, machine=run.machine | {"cpu_model": "Abacus 9001"}, versions={"tandem": "0.2.0"})
    found = compare(a, LoadedRun(replace(b.summary, run=run), b.samples))
    differences = {each.name: (each.a, each.b) for each in found.differences}
    assert differences["machine.cpu_model"] == ("Abacus 9000", "Abacus 9001")
    assert differences["versions.tandem"] == ("0.1.0", "0.2.0")
    assert differences["versions.vllm"] == ("0.32.0", "not told")
    assert differences["seed"] == ("1", "2")
    assert (
        "The runs differ in machine, versions: a ratio may come from that. The list is below."
        in found.warnings
    )


def test_equal_runs_with_other_seeds_warn_of_nothing() -> None:
    assert compare(loaded([stage()]), loaded([stage()], run_id="b", seed=2)).warnings == ()


def test_the_same_prompts_again_are_warned_of() -> None:
    (warning,) = compare(loaded([stage()]), loaded([stage()], run_id="b", seed=1)).warnings
    assert warning.startswith("Both runs have the seed 1, so B repeats the prompts of A")


def test_other_sizes_and_failures_are_warned_of() -> None:
    a = loaded([stage()])
    longer = {key: replace(each, prompt_tokens=180) for key, each in a.samples.items()}
    b = LoadedRun(loaded([stage(failures=3)], run_id="b", seed=2).summary, longer)
    sizes, failures = compare(a, b).warnings
    assert sizes == (
        "copy at 4 users, batched: prompts have 100 tokens in A and 180 in B on average: not the same work."
    )
    assert failures.startswith("copy at 4 users, batched: 0 of 40 requests failed in A, 3 of 40 in B")


def test_one_rate_for_unequal_lengths_is_compared_and_warned_of() -> None:
    a, b = (
        loaded([replace(stage(), load=constant_rate(2, length_s))], run_id=run_id, seed=length_s)
        for run_id, length_s in (("a", 60), ("b", 30))
    )
    found = compare(a, b)
    assert len(found.pairs) == 1
    assert found.warnings == (
        "copy at poisson 2 req/s, batched: 60 s of load in A and 30 s in B: where a queue grows, "
        "the longer one looks worse.",
    )


def test_a_page_of_two_sweeps(tmp_path: Path) -> None:
    run = LoadedRun(sweep(), {})
    path = tmp_path / "compare.html"
    write_page(compare(run, run), path)
    page = path.read_text()
    assert "<td>capacity</td>" in page
    assert "1.00<small> [0.92–1.09]</small>" in page
    assert "poisson 1.9 req/s" in page


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Path, Path]:
    """B's tokens come twice as fast; the first token as in A. Beside them lies C, of another stage."""
    for name, users, gap_s in (("a", 4, 0.02), ("b", 4, 0.01), ("c", 8, 0.02)):
        (tmp_path / name).mkdir()
        records = [
            record("batched", users, number, ttft_s=0.1 + number / 1000, gap_s=gap_s, scheduled_at_s=number)
            for number in range(40)
        ]
        run = run_file([stage_run(records)])
        write_whole_run(tmp_path / name, replace(run, run=replace(run.run, id=name)), records)
    return tmp_path / "a", tmp_path / "b"


def test_the_command_compares_two_runs(two_runs: tuple[Path, Path]) -> None:
    a, b = map(str, two_runs)
    done = CliRunner().invoke(main, [a, b])
    assert done.exit_code == 0, done.output
    assert "B is better in TPOT p50 (0.50 [0.44–0.57])" in " ".join(done.output.split())
    assert "not distinguishable in TTFT p50" in " ".join(done.output.split())
    assert done.output.splitlines()[-1] == f"comparison: {two_runs[1] / 'compare.html'}"
    assert "B against A" in (two_runs[1] / "compare.html").read_text()


def test_the_command_writes_json_and_the_page_where_it_is_told(two_runs: tuple[Path, Path]) -> None:
    out = two_runs[0] / "there.html"
    done = CliRunner().invoke(main, [*map(str, two_runs), "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    ratios = {each["quantity"]: each for each in found["stages"][0]["ratios"]}
    assert ratios["TPOT p50"]["ratio"]["value"] == pytest.approx(0.5)
    assert ratios["TPOT p50"]["change"] == "better"
    assert out.is_file()
    assert not (two_runs[1] / "compare.html").exists()


def test_a_page_that_cannot_be_written_is_named(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "no" / "page.html"
    done = CliRunner().invoke(main, [*map(str, two_runs), "--out", str(out)])
    assert done.exit_code == 1
    assert f"Error: {out}: cannot be written: No such file or directory" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "b", "--lanes", "batched"], "--lanes 'batched' must name 2 lanes"),
        (["a", "b", "--lanes", "batched,diffusion"], "run b has no lane 'diffusion'"),
        (["a", "--lanes", "batched,batched"], "--lanes and --out are for two runs; one was given"),
        (["a", "b", "a"], "3 runs were given; a report takes 1 or 2"),
        (["a", "c"], "A (a) has batched/copy/4 users; B (c) has batched/copy/8 users"),
        (["a", "nothing"], "requests.jsonl: is missing; is this the directory of a run?"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    two_runs: tuple[Path, Path], arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two_runs[0].parent)
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_two_runs_of_one_stage_that_differ_by_a_few_percent_are_not_told_apart() -> None:
    """However many requests each holds: what both share in their stage says nothing of the next stage."""
    base = samples(1.0)
    for factor in (0.97, 1.03):
        other = replace(base, tpot_s=tuple(value_s * factor for value_s in base.tpot_s))
        ratio, basis = settling_ratio((base, other), "tpot_s", 50)
        assert change_of(ratio, is_higher_better=False) is Change.SAME
        assert "assumed 5%" in basis


def test_repeats_of_both_decide_where_there_are_some() -> None:
    base = samples(1.0)
    repeats = tuple(replace(base, tpot_s=(value_s,) * 9) for value_s in (1.0, 1.01, 0.99))
    slower = tuple(replace(each, tpot_s=tuple(1.2 * value_s for value_s in each.tpot_s)) for each in repeats)
    ratio, basis = settling_ratio(
        (replace(base, by_repeat=repeats), replace(base, by_repeat=slower)), "tpot_s", 50
    )
    assert basis == "3 and 3 repeats"
    assert ratio is not None
    assert ratio.value == pytest.approx(1.2)
    assert change_of(ratio, is_higher_better=False) is Change.WORSE


@pytest.mark.parametrize(("tokenizer", "is_compared"), [("a", True), ("b", False), ("", False)])
def test_tokens_of_another_tokenizer_are_not_compared(tokenizer: str, is_compared: bool) -> None:
    stages = [stage("batched"), stage("batched", ClosedLoop(8))]
    ours, theirs = (
        replace(each, summary=replace(each.summary, lanes=(replace(each.summary.lanes[0], model=model),)))
        for each, model in (
            (loaded(stages), LaneModel("m", "/one", "a")),
            (loaded(stages, run_id="b", seed=2), LaneModel("m", "/two", tokenizer)),
        )
    )
    for pair in compare(ours, theirs).stages:
        ratios = by_quantity(pair.ratios)
        assert ratios["TTFT p50"].ratio is not None
        for quantity in ("tokens/s", "TPOT p50", "TPOT p95"):
            assert (ratios[quantity].ratio is not None) is is_compared
            assert ("tokenizers differ" in ratios[quantity].basis) is not is_compared
