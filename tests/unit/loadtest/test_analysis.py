from __future__ import annotations

import json

import numpy as np
import pytest

from loadtest.analysis import summarize
from loadtest.crossover import Verdict
from loadtest.lab import Scrape
from loadtest.record import RequestRecord
from loadtest.rundir import StageRun
from loadtest.stage_summary import Repeat, summarize_stage
from loadtest.summary import Estimate, summary_json

from .runs import record, run_file, scrape, stage_run, whole_run


def one_repeat(stage: StageRun, records: list[RequestRecord]) -> list[Repeat]:
    return [Repeat(stage, tuple(records))]


def value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def test_latencies_of_a_stage_by_hand() -> None:
    # 11 chunks 20 ms apart: TTFT 0.1 s, TPOT 0.2 s / 10; E2E 0.3 s; and the same twice as slow.
    records = [record("batched"), record("batched", number=1, scheduled_at_s=1.0, ttft_s=0.2, gap_s=0.04)]
    stage = summarize_stage(one_repeat(stage_run(records), records))
    assert (stage.requests, stage.failures, stage.wrong_lengths) == (2, 0, 0)
    assert value(stage.ttft_s.p50) == pytest.approx(0.15)
    assert value(stage.ttft_s.p95) == pytest.approx(0.195)
    assert value(stage.tpot_s.p50) == pytest.approx(0.03)
    assert value(stage.e2e_s.p50) == pytest.approx(0.45)
    assert value(stage.inter_chunk_s.p50) == pytest.approx(0.03)
    # 22 tokens between the first schedule at 0 and the last finish at 1.6 s.
    assert value(stage.output_tokens_per_s) == pytest.approx(22 / 1.6)
    assert stage.tokens_per_chunk == 1


def test_percentiles_are_numpys() -> None:
    ttfts = [0.11, 0.32, 0.07, 0.9, 0.25]
    records = [record("batched", number=n, ttft_s=ttft) for n, ttft in enumerate(ttfts)]
    stage = summarize_stage(one_repeat(stage_run(records), records))
    assert value(stage.ttft_s.p95) == pytest.approx(np.percentile(ttfts, 95))


def test_tokens_are_the_servers_and_not_the_chunks() -> None:
    records = [record("speculative", chunks=5, tokens=17)]
    stage = summarize_stage(one_repeat(stage_run(records), records))
    assert stage.tokens_per_chunk == pytest.approx(3.4)
    assert value(stage.tpot_s.p50) == pytest.approx(4 * 0.02 / 16)


def test_failures_count_and_enter_no_latency() -> None:
    good = record("batched", scheduled_at_s=1.0)
    bad = record("batched", number=1, ttft_s=50.0, reason="upstream_broke")
    run = run_file([stage_run([good, bad])])
    summary = summarize(run, [good, bad])
    stage = summary.stages[0]
    assert (stage.requests, stage.failures) == (2, 1)
    assert value(stage.ttft_s.p95) == pytest.approx(0.1)
    # The time before the good request is not forgotten: the stage began with the bad one.
    assert value(stage.output_tokens_per_s) == pytest.approx(11 / 1.3)
    assert [(f.lane, f.reason, f.count) for f in summary.failures] == [("batched", "upstream_broke", 1)]


def test_a_stage_without_a_completed_request_has_no_figures() -> None:
    records = [record("batched", reason="cut_off")]
    summary = summarize(run_file([stage_run(records)]), records)
    stage = summary.stages[0]
    assert (stage.output_tokens_per_s, stage.ttft_s.p50, stage.tokens_per_chunk) == (None, None, None)


def test_warm_up_is_in_no_figure_but_its_failure_is_told() -> None:
    records = [record("batched"), record("batched", is_warmup=True, ttft_s=9.0, reason="idle_timeout")]
    summary = summarize(run_file([stage_run(records[:1])]), records)
    assert summary.stages[0].requests == 1
    assert value(summary.stages[0].ttft_s.p95) == pytest.approx(0.1)
    assert [failure.reason for failure in summary.failures] == ["idle_timeout"]


def test_acceptance_is_that_of_the_stage_alone() -> None:
    records = [record("speculative")]
    run = stage_run(records, scrape("speculative", (100, 400, 50)), scrape("speculative", (110, 440, 80)))
    stage = summarize_stage(one_repeat(run, records))
    assert stage.acceptance_rate == pytest.approx(30 / 40)
    assert stage.mean_acceptance_length == pytest.approx(1 + 30 / 10)
    assert stage.memory_bytes == 2**30


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (scrape("speculative", (9, 9, 9)), scrape("speculative", (1, 1, 1)), "went back"),
        (scrape("speculative", (9, 9, 9)), Scrape(errors=("metrics of h:1: gone",)), "did not answer"),
    ],
)
def test_acceptance_that_cannot_be_known_is_none_with_a_note(
    before: Scrape, after: Scrape, note: str
) -> None:
    records = [record("speculative")]
    stage = summarize_stage(one_repeat(stage_run(records, before, after), records))
    assert stage.acceptance_rate is None
    assert any(note in each for each in stage.notes)


def test_what_a_reader_must_know_is_noted() -> None:
    records = [record("batched", tokens=10)]
    run = run_file([stage_run(records, planned=4, is_cut=True)])
    summary = summarize(run, records)
    assert summary.stages[0].wrong_lengths == 1
    assert "cut: 1 of 4 requests have a record" in summary.stages[0].notes


def test_locusts_own_count_is_checked() -> None:
    records = [record("batched")]
    other = stage_run([*records, record("batched", number=1, reason="cut_off")])
    assert any(
        "Locust counts 2 requests and 1 failures" in n
        for n in summarize_stage(one_repeat(other, records)).notes
    )
    assert summarize_stage(one_repeat(stage_run(records), records)).notes == ()


def test_crossover_of_a_whole_run() -> None:
    summary = summarize(*whole_run())
    by_workload = {each.workload: each for each in summary.crossovers}
    assert list(by_workload) == ["copy", "story"]
    copy = by_workload["copy"]
    assert [each.tpot for each in copy.speed_ups] == pytest.approx([2.0, 1.0, 0.5])
    assert copy.tpot.verdict is Verdict.UP_TO
    assert copy.tpot.levels == pytest.approx([4.0])


def test_summary_has_the_agreed_shape() -> None:
    data = json.loads(summary_json(summarize(*whole_run())))
    assert {"machine", "versions", "seed", "config", "name", "started_at"} <= data["run"].keys()
    assert len(data["stages"]) == 18
    for stage in data["stages"]:
        assert {
            "lane", "workload", "load", "requests", "failures", "output_tokens_per_s", "ttft_s", "tpot_s",
            "e2e_s", "acceptance_rate", "mean_acceptance_length",
        } <= stage.keys()  # fmt: skip
        assert (
            stage["ttft_s"].keys() == stage["tpot_s"].keys() == stage["e2e_s"].keys() == {"p50", "p95", "p99"}
        )
        assert stage["failures"] == 0
    assert {lane["lane"]: lane["memory_bytes"] for lane in data["lanes"]}["batched"] == 2**30
