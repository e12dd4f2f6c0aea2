from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.analysis.summary import Crossing, FailureCount, Summary, Verdict
from loadtest.client.lane_models import LaneModel
from loadtest.judge.capacity import Capacity
from loadtest.judge.estimate import Estimate
from loadtest.offer.load import ClosedLoop, constant_rate
from loadtest.report.findings import crossing_text, findings, invalidity, warnings
from tests.unit.loadtest.summaries import SLO, TOO_LATE, capacity, objective, probe, stage, summary, sweep


def test_a_sweep_is_answered_with_rate_lead_hardware_and_what_binds() -> None:
    answer, limit, second, third, last = findings(sweep())
    assert answer == (
        "On copy, with smollm2-135m (bfloat16 on cpu) on 2 cores of Abacus 9000, the lane speculative serves "
        f"1.90 [1.79–2.01] requests/s within {SLO}, 1.46 [1.34–1.59] times the next best, batched. "
        "Failures count as misses."
    )
    assert limit == "Above it ttft_p95<2s breaks first. 4.8 requests are in flight at that rate."
    assert second.startswith("batched serves 1.30 [1.22–1.38] requests/s.")
    assert third.startswith("sequential serves 0.400")
    assert last == "Of 360 requests all completed."
    assert invalidity(sweep()) is None


def test_lanes_that_intervals_do_not_tell_apart_have_no_winner() -> None:
    made = summary(capacities=[capacity("batched", 1.8), capacity("speculative", 1.9)])
    assert "cannot be told apart from the next best, batched (ratio 1.06 [0.97–1.15])" in findings(made)[0]


def test_a_lead_without_intervals_says_that_it_may_be_chance() -> None:
    single = [
        without_interval(capacity(lane, rate)) for lane, rate in (("batched", 1.0), ("speculative", 2.0))
    ]
    text = findings(summary(capacities=single))[0]
    assert "2.00 times the next best, batched (a ratio without an interval: it needs repeats)" in text


def without_interval(each: Capacity) -> Capacity:
    assert each.rate_per_s is not None
    return replace(each, rate_per_s=Estimate(each.rate_per_s.value))


def test_a_lower_bound_is_called_one() -> None:
    made = summary(capacities=[capacity("batched", 1.0), capacity("speculative", 2.0, is_lower_bound=True)])
    answer, limit, *_ = findings(made)
    assert "serves at least 2.00" in answer
    assert "at least 2.00 [1.84–2.18] times the next best, batched" in answer
    assert "its limit is not known" in limit


def test_no_ratio_over_a_lane_whose_limit_is_not_known() -> None:
    made = summary(capacities=[capacity("batched", 1.0, is_lower_bound=True), capacity("speculative", 2.0)])
    assert "batched still held at the highest rate tried for it, so no ratio is given" in findings(made)[0]
    assert "times" not in findings(made)[0]


def test_one_lane_is_compared_with_none() -> None:
    answer = findings(summary(capacities=[capacity("batched", 1.3)]))[0]
    assert "the lane batched serves 1.30 [1.22–1.38] requests/s" in answer
    assert "; no other lane was tried" in answer


def test_no_capacity_found_says_how_far_it_was_from_one() -> None:
    made = summary(capacities=[capacity("batched", None, probes=[probe(1.0, 0.1), probe(0.5, 0.4)])])
    answer, detail, _ = findings(made)
    assert answer == f"On copy no lane was found to hold {SLO}."
    assert detail == (
        "batched held it at no rate tried: at the lowest, 0.500 requests/s, 40.0% of requests met it; "
        "ttft_p95<2s binds."
    )


def test_a_lane_with_only_invalid_probes_gets_no_verdict() -> None:
    probes = [probe(1.0, 0.99, is_valid=False), probe(0.5, 1.0, is_valid=False)]
    made = summary(capacities=[capacity("batched", 1.3), capacity("speculative", None, probes=probes)])
    texts = findings(made)
    assert "speculative: all 2 probes are INVALID, so nothing is known of it." in texts
    assert "the lane batched serves" in texts[0]
    bad = invalidity(made)
    assert bad is not None
    assert bad.headline == "INVALID: 2 stages of speculative may not be used. No capacity is known there."
    assert "run again" in bad.advice


def test_speculation_that_lowers_the_rate_is_told() -> None:
    made = summary(
        capacities=[capacity("sequential", 3.0), capacity("batched", 2.0), capacity("speculative", 1.0)]
    )
    assert any(
        text == "Against batched in the rate within the objective, speculation (speculative) lowers it: "
        "0.50 [0.46–0.54] times."
        for text in findings(made)
    )


def test_nothing_is_concluded_from_a_run_whose_every_stage_is_invalid() -> None:
    levels = (ClosedLoop(1), ClosedLoop(8))
    made = summary(
        [stage(lane, level, invalid=(TOO_LATE,)) for lane in ("batched", "speculative") for level in levels]
    )
    assert made.crossovers  # they are there, and are not spoken of
    assert findings(made)[0] == "No stage that may be used has figures, so there is no answer."
    assert not any("speculative" in text for text in findings(made))
    bad = invalidity(made)
    assert bad is not None
    assert bad.headline == "INVALID: all 4 stages may not be used. Nothing is concluded from this run."


def test_an_invalid_stage_is_never_the_best() -> None:
    made = summary(
        [stage("batched", tokens_per_s=500, invalid=(TOO_LATE,)), stage("sequential", tokens_per_s=20)]
    )
    assert "20.0 tokens/s, on the lane sequential" in findings(made)[0]
    assert "500" not in " ".join(findings(made))


@pytest.mark.parametrize(("slowest", "is_told"), [(60.0, False), (30.0, True)])
def test_a_machine_that_changed_between_repeats_is_told(slowest: float, is_told: bool) -> None:
    quiet = stage("sequential")
    changed = [
        replace(stage(lane), repeat_tokens_per_s=(80.0, slowest, None)) for lane in ("batched", "speculative")
    ]
    said = [text for text in findings(summary([quiet, *changed])) if "not the same throughout" in text]
    assert bool(said) == is_told
    if is_told:
        assert "one repeat of a stage gave 2.7 times the tokens/s of another" in said[0]
        assert "(median of 3 stages)" in said[0]
    once = replace(changed[0], repeat_tokens_per_s=(80.0,))
    assert not any("not the same" in text for text in findings(summary([once])))


def test_all_failed() -> None:
    failed = stage(requests=12, failures=12, tokens_per_s=None, slo=objective(0.0, 1.0, "failed"))
    made = summary([failed], slo=SLO, failures=(FailureCount("batched", "queue_full", 12, "full"),))
    assert findings(made) == (
        f"No request met the objective {SLO}.",
        "No request completed, so there are no figures.",
        "Of 12 planned requests 0 completed, 12 failed.",
    )
    assert "12 requests did not complete: 12 queue_full." in warnings(made)


def test_a_bench_with_an_objective_says_where_each_lane_holds_it() -> None:
    made = summary(
        [
            stage("batched", constant_rate(1, 30), slo=objective(1.0, 1)),
            stage("batched", constant_rate(4, 30), slo=objective(0.5, 4)),
        ],
        slo=SLO,
    )
    best, held, *_ = findings(made)
    assert best.startswith(
        f"Within {SLO} the highest goodput was 2.00 [1.80–2.20] requests/s, on the lane batched"
    )
    assert "it does not hold there: ttft_p95<2s binds" in best
    assert held == "On copy, batched holds it at poisson 1 req/s; not at poisson 4 req/s (ttft_p95<2s)."


def test_levels_that_hold_are_listed_once() -> None:
    stages = [
        stage(load=ClosedLoop(users), slo=objective(1.0 if users < 8 else 0.5, 1)) for users in (1, 4, 8, 16)
    ]
    _, held, *_ = findings(summary(stages, slo=SLO))
    assert held == (
        "On copy, batched holds it at concurrency 1, 4; not at concurrency 8 (ttft_p95<2s), 16 (ttft_p95<2s)."
    )


@pytest.mark.parametrize(
    ("crossing", "unit", "text"),
    [
        (
            Crossing(Verdict.UP_TO, (1, 4), (8,), (), (6.21,)),
            "users",
            "pays at 1 and 4 users, costs at 8 users (about even at 6.2 users)",
        ),
        (
            Crossing(Verdict.PARTLY, (0.5,), (), (2.0,), ()),
            "requests/s, poisson",
            "pays at 0.5 requests/s, cannot be told apart at 2 requests/s",
        ),
        (Crossing(Verdict.OPEN, (), (), (1,), ()), "users", "cannot be told apart at 1 user"),
        (Crossing(Verdict.NEVER, (), (1, 4, 8), (), ()), "users", "costs at 1, 4 and 8 users"),
        (Crossing(Verdict.UNKNOWN, (), (), (), ()), "users", "could not be compared"),
    ],
)
def test_what_is_settled_of_a_ratio_is_told_and_what_is_not(crossing: Crossing, unit: str, text: str) -> None:
    assert crossing_text(crossing, unit) == text


@pytest.mark.parametrize(("engine", "is_told"), [("simulated 1", True), ("vllm 0.32.0", False)])
def test_a_simulated_engine_is_named(engine: str, is_told: bool) -> None:
    assert (
        any(
            text.startswith("Simulated engine in batched")
            for text in warnings(summary([stage()], engine=engine))
        )
        == is_told
    )


def test_rates_that_a_search_gave_up_are_no_fault() -> None:
    made = summary(
        capacities=[capacity("batched", 1.3)],
        failures=(
            FailureCount("batched", "stage_hopeless", 4, "cancelled"),
            FailureCount("batched", "queue_full", 1, "full"),
        ),
    )
    stages = (*made.stages[:-1], replace(made.stages[-1], cut=True, failures=5))
    made = replace(made, stages=stages)
    assert warnings(made) == ("1 request did not complete: 1 queue_full.",)
    assert findings(made)[-1] == (
        "Of 120 requests 115 completed, 1 failed and 4 were given up with probes that could not hold any more."
    )


def test_a_stage_of_a_bench_that_was_cut_is_warned_of() -> None:
    cut = replace(stage(load=constant_rate(9, 30)), cut=True)
    assert warnings(summary([cut])) == ("Cut before their end: batched/copy/poisson 9 req/s.",)


def test_an_invalid_probe_that_was_made_again_spoils_nothing() -> None:
    probes = [probe(1.0, 0.4, is_valid=False), probe(1.0, 0.99), probe(1.3, 0.5)]
    made = summary(capacities=[capacity("batched", 1.0, probes=probes)])
    assert invalidity(made) is None
    assert "1 probe came out invalid and counted for nothing." in warnings(made)


def test_a_server_that_is_too_slow_at_every_rate_is_a_result_and_not_invalid() -> None:
    assert invalidity(summary(capacities=[capacity("batched", None, probes=[probe(1.0, 0.1)])])) is None


def of_models(made: Summary, **models: LaneModel) -> Summary:
    return replace(made, lanes=tuple(replace(lane, model=models[lane.lane]) for lane in made.lanes))


PLAIN, TUNED = LaneModel("plain", "/plain", "a"), LaneModel("tuned", "/tuned", "b")


def test_tokens_are_compared_only_among_lanes_that_count_the_same() -> None:
    made = summary([stage("batched", tokens_per_s=80), stage("sequential", tokens_per_s=90)])
    same = findings(of_models(made, batched=PLAIN, sequential=replace(TUNED, tokenizer="a")))
    assert same == findings(made)
    assert "90.0 tokens/s, on the lane sequential" in same[0]
    assert "for the same work: batched" in same[0]
    ours, theirs, alike, _ = findings(of_models(made, batched=PLAIN, sequential=TUNED))
    assert ours.startswith("Of batched: The highest throughput was 80.0 tokens/s")
    assert theirs.startswith("Of sequential: The highest throughput was 90.0 tokens/s")
    assert "for the same work" not in ours + theirs
    assert alike == (
        "Lanes of one tokenizer: batched (plain); sequential (tuned). Tokens/s and TPOT are compared only among "
        "these; requests/s, TTFT and E2E latency between all, if their answers are worth the same."
    )


def test_a_sweep_says_of_speculation_only_what_the_same_model_shows() -> None:
    models = dict.fromkeys(("sequential", "batched", "speculative"), PLAIN)
    made = summary(
        capacities=[capacity("sequential", 2.5), capacity("batched", 1.3), capacity("speculative", 1.9)]
    )
    assert "Against batched" in " ".join(findings(of_models(made, **models)))
    assert "Against batched" not in " ".join(findings(of_models(made, **models | {"speculative": TUNED})))
