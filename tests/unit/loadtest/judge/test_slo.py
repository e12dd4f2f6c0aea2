from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.record import RequestRecord
from loadtest.judge.slo import Outlook, Slo, decided, evaluate, parse_slo
from serving.core.latency import percentile, ttft_s
from tests.unit.loadtest.runs import record


def answers(good: int, *bad: RequestRecord) -> list[RequestRecord]:
    """Requests of TTFT 0.1 s, TPOT 20 ms, E2E 0.3 s, and others."""
    return [record("batched", number=number) for number in range(good)] + list(bad)


def test_an_objective_as_people_write_it() -> None:
    slo = parse_slo("ttft_p95<2s, tpot_p99<300ms")
    assert [(limit.metric, limit.limit_s, limit.share) for limit in slo.limits] == [
        ("ttft", 2.0, 0.95),
        ("tpot", pytest.approx(0.3), 0.99),
    ]
    assert slo.attainment == 0.95
    assert parse_slo("ttft<2s,e2e<10s@99").attainment == 0.99
    assert parse_slo("ttft_p100<2s@100").attainment == parse_slo("ttft_p100<2s").limits[0].share == 1
    assert parse_slo("e2e<1.5s").limits[0].share is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no limit"),
        ("ttft", "'ttft' is no limit"),
        ("ttft>2s", "'ttft>2s' is no limit"),
        ("itl<2s", "one is ttft, tpot, e2e, icl"),
        ("ttft<2m", "a time in ms or s"),
        ("ttft<0s", "must be above 0"),
        ("ttft_p0<2s", "percentile of 'ttft_p0<2s' is '0', must be above 0 and at most 100"),
        ("ttft_p101<2s", "at most 100"),
        ("ttft<2s@0", "attainment is '0'"),
        ("ttft<2s@nan", "attainment is 'nan'"),
        ("ttft<2s@", "attainment is ''"),
        ("ttft<2s,ttft<2s", "is there twice"),
    ],
)
def test_what_is_no_objective_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="slo") as caught:
        parse_slo(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "misses"),
    [
        ("ttft<101ms", ()),
        ("ttft<100ms", ("ttft<100ms",)),  # at its limit is not below it
        ("ttft<99ms", ("ttft<99ms",)),
        ("tpot<19ms,e2e<1s", ("tpot<19ms",)),
        ("tpot<21ms,e2e<299ms", ("e2e<299ms",)),
        ("icl<19ms", ("icl<19ms",)),
        ("icl<21ms", ()),
        ("ttft<1ms,e2e<1ms", ("ttft<1ms", "e2e<1ms")),
    ],
)
def test_misses_of_a_request(text: str, misses: tuple[str, ...]) -> None:
    assert parse_slo(text).misses(record("batched")) == misses


def test_the_largest_gap_counts_and_not_the_usual_one() -> None:
    assert parse_slo("icl<1s").misses(record("batched", chunks=2, gap_s=1.5, tokens=30)) == ("icl<1s",)


def test_each_choice_of_an_answer_is_judged_and_not_their_chunks_together() -> None:
    """Two choices at once, each of 20 ms a token and a chunk: pooled, both figures would be about half."""
    one = record("batched", chunks=10, gap_s=0.02)
    chunks = [(at_s + 0.01 * choice, choice) for at_s in one.chunk_at_s for choice in (0, 1)]
    both = replace(
        one,
        chunk_at_s=tuple(at_s for at_s, _ in chunks),
        chunk_choice=tuple(choice for _, choice in chunks),
        output_tokens=20,
        finished_at_s=chunks[-1][0],
    )
    slo = parse_slo("tpot<15ms,icl<15ms")
    assert slo.misses(both) == ("tpot<15ms", "icl<15ms")
    assert slo.misses(replace(both, chunk_choice=())) == ()


def test_one_token_has_no_tpot_to_miss() -> None:
    assert parse_slo("tpot<1ms,icl<1ms").misses(record("batched", chunks=1)) == ()


def test_a_failure_meets_nothing() -> None:
    slo = parse_slo("ttft<10s")
    found = evaluate(slo, answers(18, *(record("batched", reason="upstream_broke") for _ in range(2))), 2.0)
    assert found.attainment.value == pytest.approx(0.9)
    assert (found.holds, found.misses, found.binding) == (False, {"failed": 2}, "failed")
    assert found.attainment.low is not None
    assert found.attainment.high is not None
    assert (found.goodput_per_s.value, found.goodput_per_s.low, found.goodput_per_s.high) == pytest.approx(
        (1.8, 2 * found.attainment.low, 2 * found.attainment.high)
    )


def test_nineteen_of_twenty_is_95_percent() -> None:
    slow = record("batched", ttft_s=3.0)
    assert evaluate(parse_slo("ttft<2s"), answers(19, slow), 1.0).holds
    assert not evaluate(parse_slo("ttft<2s"), answers(18, slow), 1.0).holds


def test_each_percentile_may_hold_where_both_together_do_not() -> None:
    # 5 percent late at first, 5 percent late after: each p95 holds, but only 90 percent meet both.
    late = [record("batched", ttft_s=3.0)] * 5
    slow = [record("batched", gap_s=0.5)] * 5
    both = evaluate(parse_slo("ttft_p95<2s,tpot_p95<300ms"), answers(90, *late, *slow), 1.0)
    assert both.attainment.value == pytest.approx(0.9)
    assert not both.holds
    assert both.misses == {"ttft_p95<2s": 5, "tpot_p95<300ms": 5}
    assert evaluate(parse_slo("ttft_p95<2s,tpot_p95<300ms@90"), answers(90, *late, *slow), 1.0).holds


def test_a_median_binds_half_of_the_requests_and_not_each() -> None:
    slow = [record("batched", ttft_s=0.5)] * 9
    assert evaluate(parse_slo("ttft_p50<200ms"), answers(11, *slow), 1.0).holds
    assert not evaluate(parse_slo("ttft_p50<200ms"), answers(8, *slow), 1.0).holds
    # And a failure stands in it as infinitely late.
    failed = [record("batched", reason="cut_off")]
    assert not evaluate(parse_slo("ttft_p50<200ms@50"), answers(10, *slow, *failed, *failed), 1.0).holds


def test_what_the_user_broke_off_says_nothing() -> None:
    found = evaluate(parse_slo("ttft<2s"), answers(4, record("batched", reason="interrupted")), 1.0)
    assert found.attainment.value == 1.0
    with pytest.raises(ValueError, match="at least one finished request"):
        evaluate(parse_slo("ttft<2s"), [], 1.0)


def given_up(age_s: float, *, has_begun: bool = False) -> RequestRecord:
    """A request that the tool cut off with its stage; its first token came after 0.1 s or not at all."""
    cut = record("batched", chunks=int(has_begun), reason="stage_hopeless")
    return replace(cut, finished_at_s=cut.scheduled_at_s + age_s)


@pytest.mark.parametrize(
    ("cut", "misses"),
    [
        (given_up(1.9), ()),
        (given_up(2.0), ("ttft_p90<2s",)),
        (given_up(9.9, has_begun=True), ()),
        (given_up(10.0, has_begun=True), ("e2e<10s",)),
        (given_up(10.0), ("ttft_p90<2s", "e2e<10s")),
    ],
)
def test_a_request_that_was_given_up_has_missed_what_it_had_broken_by_then(
    cut: RequestRecord, misses: tuple[str, ...]
) -> None:
    slo = parse_slo("ttft_p90<2s,e2e<10s,tpot<1s@50")
    assert slo.misses(cut) == misses
    assert decided(slo, [cut]) == ([cut] if misses else []), "of the others nobody knows"


def test_a_request_that_was_given_up_late_stands_in_the_percentile_and_another_nowhere() -> None:
    slo = parse_slo("ttft_p90<2s@50")
    assert evaluate(slo, answers(8, given_up(1.9), given_up(1.9)), 1.0).holds
    late = evaluate(slo, answers(8, given_up(2.0), given_up(2.0)), 1.0)
    assert (late.attainment.value, late.holds) == (0.8, False)


def can_still_hold(
    slo: Slo, finished: Sequence[RequestRecord], planned: int, running_ages_s: Sequence[float] = ()
) -> bool:
    outlook = Outlook(slo, planned)
    for each in finished:
        outlook.ended(each)
    return outlook.can_hold(running_ages_s)


def test_a_stage_is_hopeless_when_too_many_are_lost_and_not_before() -> None:
    slo = parse_slo("ttft<2s,e2e<10s")
    late = record("batched", ttft_s=3.0)
    assert can_still_hold(slo, [late] * 5, planned=100)
    assert not can_still_hold(slo, [late] * 6, planned=100)
    # An unfinished request may have had its first token in time: it is not lost until E2E is over.
    assert can_still_hold(slo, [late] * 5, planned=100, running_ages_s=[9.0])
    assert not can_still_hold(slo, [late] * 5, planned=100, running_ages_s=[10.5])


def test_a_percentile_can_be_hopeless_while_the_share_is_not() -> None:
    slo = parse_slo("ttft_p99<2s@90")
    late = record("batched", ttft_s=3.0)
    assert can_still_hold(slo, [late], planned=100)
    assert not can_still_hold(slo, [late, late], planned=100)


@given(
    values_s=st.lists(st.floats(0.001, 10), min_size=1, max_size=40),
    percent=st.sampled_from([50.0, 90.0, 95.0, 99.0, 100.0]),
)
def test_the_percentile_of_an_objective_is_that_of_the_tables(values_s: list[float], percent: float) -> None:
    records = [record("batched", number=n, ttft_s=value_s) for n, value_s in enumerate(values_s)]
    measured = percentile([ttft_s(each.timeline) for each in records], percent)
    assert measured is not None
    for limit_s in (measured * 0.99, measured * 1.01):
        slo = parse_slo(f"ttft_p{percent:g}<{limit_s:.9f}s@0.001")
        assert evaluate(slo, records, 1.0).holds == (measured < float(f"{limit_s:.9f}"))


def test_failures_are_infinitely_late_in_every_percentile() -> None:
    failed = [record("batched", number=n, reason="upstream_broke") for n in range(2)]
    slo = parse_slo("ttft_p90<2s@50")
    assert evaluate(slo, answers(18, failed[0]), 1.0).holds
    assert evaluate(slo, answers(10, failed[0]), 1.0).holds, "the 10th of 11, and nothing of the 11th"
    assert not evaluate(slo, answers(18, *failed), 1.0).holds, (
        "the 19th of 20 is between one that failed and one that did not"
    )
