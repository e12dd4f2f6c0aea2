from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from loadtest.analysis.run_summary import probe_of, summarize
from loadtest.analysis.stage_summary import Repeat, make_repeat, summarize_stage
from loadtest.analysis.summary import Summary, Verdict, summary_json
from loadtest.client.lab import GatewayScrape, LaneCounts, PrefixCounts, ReplicaScrape, Scrape
from loadtest.client.record import RequestRecord
from loadtest.judge.capacity import SearchSettings
from loadtest.judge.estimate import Estimate
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import constant_rate
from loadtest.run.directory import StageRun
from loadtest.run.plan import StagePlan
from tests.unit.loadtest.runs import record, run_file, scrape, stage_run, whole_run


def one_repeat(stage: StageRun, records: list[RequestRecord]) -> list[Repeat]:
    return [make_repeat(stage, records)]


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
    # Time spent on the bad request is not forgotten: the stage began and ended with it.
    assert value(stage.output_tokens_per_s) == pytest.approx(11 / 50.2)
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
    assert stage.passes_per_token == pytest.approx(10 / 40)
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
    assert [value(each.tpot) for each in copy.speed_ups] == pytest.approx([2.0, 1.0, 0.5])
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


def open_stage(
    rate_per_s: float, repeat: int = 0, ttft_s: float = 0.1, requests: int = 20, lag_s: float = 0.0
) -> tuple[StageRun, list[RequestRecord]]:
    """A stage of evenly spaced arrivals and its records."""
    plan = StagePlan(
        "batched", "copy", constant_rate(rate_per_s, requests / rate_per_s), requests, repeat=repeat
    )
    records = []
    for number in range(requests):
        made = record("batched", number=number, scheduled_at_s=number / rate_per_s, ttft_s=ttft_s)
        label = replace(made.label, stage=plan.key)
        records.append(replace(made, label=label, dispatched_at_s=made.scheduled_at_s + lag_s))
    return stage_run(records, plan=plan), records


def test_repeats_are_one_row_and_give_throughput_its_interval() -> None:
    runs = [open_stage(10.0, repeat, requests=number) for repeat, number in enumerate((20, 20, 40))]
    records = [each for _, found in runs for each in found]
    (row,) = summarize(run_file([stage for stage, _ in runs]), records).stages
    assert (row.repeats, row.requests, row.planned_requests) == (3, 80, 80)
    # In the steady part, from the first whole answer at 0.3 s to the end of the schedule at 2 s or 4 s, a request
    # begins each 0.1 s and 11 tokens of each come: those of three requests are cut at either end.
    rates = [tokens / length_s for tokens, length_s in ((187, 1.7), (187, 1.7), (407, 3.7))]
    assert row.output_tokens_per_s is not None
    assert row.output_tokens_per_s.low is not None
    assert row.output_tokens_per_s.value == pytest.approx(sum(rates) / 3)
    half = 4.30265 * np.std(rates, ddof=1) / 3**0.5
    assert row.output_tokens_per_s.value - row.output_tokens_per_s.low == pytest.approx(half, abs=1e-3)
    assert row.mean_in_flight == pytest.approx(3, rel=0.02)
    assert (row.offered_per_s, row.achieved_per_s) == pytest.approx((10.0, 10.0))


def test_percentiles_have_intervals_where_there_is_enough() -> None:
    records = [record("batched", number=n, ttft_s=0.1 + 0.001 * n) for n in range(100)]
    stage = summarize_stage(one_repeat(stage_run(records), records))
    assert stage.ttft_s.p50 is not None
    # Ranks 40 and 61 of 100.
    assert (stage.ttft_s.p50.low, stage.ttft_s.p50.high) == pytest.approx((0.139, 0.160))
    assert stage.ttft_s.p99 is not None
    assert stage.ttft_s.p99.low is None
    # Gaps depend on each other, so they have none.
    assert stage.inter_chunk_s.p50 is not None
    assert stage.inter_chunk_s.p50.low is None


def test_a_late_client_makes_the_stage_and_the_run_invalid() -> None:
    good, bad = open_stage(10.0), open_stage(10.0, repeat=1, lag_s=0.2)
    summary = summarize(run_file([good[0], bad[0]]), good[1] + bad[1])
    assert not summary.is_valid
    assert any("repeat 2: the client was late" in reason for reason in summary.stages[0].invalid)
    assert not any("repeat 1" in reason for reason in summary.stages[0].invalid)
    assert summarize(run_file([good[0]]), good[1]).is_valid


def test_warm_up_within_a_stage_counts_for_the_server_only() -> None:
    def scrape_of(completed: int) -> Scrape:
        counts = LaneCounts("batched", {"completed": completed}, 11 * completed)
        return Scrape(gateways=(GatewayScrape("g-1", (counts,)),))

    records = [record("batched", number=n) for n in range(2)]
    warmup = record("batched", number=2, is_warmup=True, ttft_s=9.0)
    stage = stage_run(records, scrape_of(5), scrape_of(8))
    row = summarize(run_file([stage]), [*records, warmup]).stages[0]
    assert row.requests == 2
    assert value(row.ttft_s.p99) == pytest.approx(0.1)
    assert [(each.quantity, each.client, each.server) for each in row.agreements] == [
        ("requests", 3, 3),
        ("completed requests", 3, 3),
        ("output tokens", 33, 33),
    ]
    assert row.invalid == ()


def test_the_objective_of_a_run_is_judged_in_each_stage() -> None:
    stage, records = open_stage(10.0)
    run = run_file([stage])
    summary = summarize(replace(run, run=replace(run.run, slo="ttft_p95<50ms")), records)
    assert summary.slo == "ttft_p95<50ms"
    found = summary.stages[0].slo
    assert found is not None
    assert (found.holds, found.attainment.value, found.binding) == (False, 0.0, "ttft_p95<50ms")
    assert summarize(run, records).stages[0].slo is None


def test_a_stage_that_was_killed_has_records_and_no_row() -> None:
    stage, records = open_stage(10.0)
    _, lost = open_stage(20.0)
    assert summarize(run_file([stage]), records + lost).requests == 20


def test_a_sweep_finds_its_capacity_again_from_its_records() -> None:
    # The objective holds up to 8 requests/s; 16 and whatever lies between are too much.
    settings = SearchSettings(99.0, resolution=1.0, repeats=2)
    stage, records = open_stage(2.0)
    stages = [replace(stage, stop_reason="interrupted")]  # by the user, who resumed the sweep
    for rate_per_s, repeat in ((4.0, 0), (8.0, 0), (16.0, 0), (8.0, 1), (16.0, 1)):
        stage, found = open_stage(rate_per_s, repeat, ttft_s=0.1 if rate_per_s <= 8 else 3.0)
        stages.append(stage)
        records += found
    run = run_file(stages)
    info = replace(run.run, slo="ttft<2s", search=settings)
    summary = summarize(replace(run, run=info), records)
    assert TypeAdapter(Summary).validate_json(summary_json(summary)) == summary
    (capacity,) = summary.capacities
    assert (capacity.lane, capacity.workload, capacity.by_repeat) == ("batched", "copy", (8.0, 8.0))
    assert capacity.rate_per_s is not None
    assert (capacity.rate_per_s.value, capacity.rate_per_s.low) == pytest.approx((8.0, 8.0))
    assert capacity.rate_per_s.high == pytest.approx(16.0)
    assert (capacity.binding, capacity.is_lower_bound) == ("ttft<2s", False)
    assert [each.is_valid for each in capacity.probes] == [True] * 5


def test_a_probe_that_was_given_up_does_not_hold() -> None:
    stage, records = open_stage(10.0)
    slo = parse_slo("ttft<2s")
    assert probe_of(make_repeat(stage, records), slo).holds
    hopeless = replace(stage, is_cut=True, stop_reason="stage_hopeless")
    assert not probe_of(make_repeat(hopeless, records), slo).holds


def test_prefix_hits_are_summed_over_repeats_before_they_are_divided() -> None:
    def scraped(queries: int, hits: int) -> Scrape:
        return Scrape((ReplicaScrape("batched", "b-1", None, None, PrefixCounts(queries, hits)),))

    records = [record("batched")]
    repeats = [
        Repeat(stage_run(records, scraped(*before), scraped(*after)), tuple(records))
        for before, after in (((100, 90), (200, 140)), ((200, 140), (500, 290)))
    ]
    assert summarize_stage(repeats).prefix_hit_rate == pytest.approx(200 / 400)
    assert summarize_stage([Repeat(stage_run(records), tuple(records))]).prefix_hit_rate is None


def test_a_lane_s_replicas_are_its_own() -> None:
    run, records = whole_run()
    extra = {"replica": "batched-2", "lane": "batched", "engine": "vllm", "engine_version": "1.2"}
    run = replace(run, run=replace(run.run, replicas=[*run.run.replicas, extra]))
    found = {lane.lane: lane.replicas for lane in summarize(run, records).lanes}
    assert found == {"sequential": 1, "batched": 2, "speculative": 1}


def test_speculation_is_summed_over_repeats_and_not_over_what_ran_between() -> None:
    records = [record("speculative")]
    repeats = [
        Repeat(
            stage_run(records, scrape("speculative", before), scrape("speculative", after)), tuple(records)
        )
        for before, after in (((0, 0, 0), (10, 40, 10)), ((90, 400, 400), (100, 440, 430)))
    ]
    assert summarize_stage(repeats).acceptance_rate == pytest.approx(40 / 80)


def test_speculation_is_seen_beside_the_same_model() -> None:
    run, records = whole_run()
    crossovers = summarize(run, records).crossovers
    assert {each.baseline for each in crossovers} == {"batched"}
    lanes = [
        lane | ({"model": {"name": "tuned", "path": "/tuned"}} if lane["name"] == "batched" else {})
        for lane in run.run.config["lanes"]
    ]
    config = {"model": {"name": "plain", "path": "/plain"}, "lanes": lanes}
    assert summarize(replace(run, run=replace(run.run, config=config)), records).crossovers == ()
