"""The steady part of a stage, against servers whose steady state is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.analysis.stage_summary import Repeat, make_repeat, summarize_stage
from loadtest.analysis.window import Window, ended_in, mean_in_flight, offered_s, steady_window, tokens_in
from loadtest.client.record import RequestRecord
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import ClosedLoop, constant_rate
from loadtest.run.plan import StagePlan
from tests.unit.loadtest.runs import record, stage_run


def unhurried(duration_s: float, rate_per_s: float = 1.0, answer_s: float = 10.0) -> Repeat:
    """An open loop against a server that gives each answer 10 tokens, one a second, however many it serves."""
    requests = round(duration_s * rate_per_s)
    plan = StagePlan("batched", "copy", constant_rate(rate_per_s, duration_s), requests)
    gap_s = answer_s / 10
    records = [
        record(
            "batched", number=n, scheduled_at_s=n / rate_per_s, ttft_s=gap_s, gap_s=gap_s, chunks=10, asked=10
        )
        for n in range(requests)
    ]
    return make_repeat(stage_run(records, plan=plan), records)


def test_an_unhurried_server_is_no_faster_for_being_asked_longer() -> None:
    slo = parse_slo("ttft<2s")
    short, long = (summarize_stage([unhurried(duration_s)], slo) for duration_s in (15.0, 30.0))
    for stage in (short, long):
        assert stage.output_tokens_per_s is not None
        assert stage.output_tokens_per_s.value == pytest.approx(10, rel=0.05)
        assert stage.slo is not None
        assert (stage.slo.attainment.value, stage.slo.goodput_per_s.value) == pytest.approx((1.0, 1.0))
        assert stage.mean_in_flight == pytest.approx(10, rel=0.05)
    # What the whole stage gives, its drain included, stands beside it under a name of its own.
    assert short.whole_tokens_per_s is not None
    assert long.whole_tokens_per_s is not None
    assert long.whole_tokens_per_s > 1.2 * short.whole_tokens_per_s


def test_answers_that_outlast_the_load_have_no_steady_part() -> None:
    stage = summarize_stage([unhurried(8.0)])
    assert stage.output_tokens_per_s is None
    assert any("no steady part" in note for note in stage.notes)


def closed(users: int, counted: int, step_s: float = 0.02) -> list[RequestRecord]:
    """Users that come one after another, answers of 0.1 s and 10 tokens, and a queue of nobody."""
    records = []
    plan = StagePlan("batched", "copy", ClosedLoop(users), counted)
    for offset in range(users + counted + users - 1):
        user, turn = offset % users, offset // users
        made = record(
            "batched", users, offset, scheduled_at_s=user * 0.2 / users + turn * 0.2, ttft_s=step_s, gap_s=step_s,
            chunks=10, asked=10,
        )  # fmt: skip
        label = replace(
            made.label, stage=plan.key, is_warmup=offset < users, is_tail=offset >= users + counted
        )
        records.append(replace(made, label=label))
    return records


def test_a_closed_loop_counts_the_time_in_which_all_users_are_busy() -> None:
    records = closed(users=4, counted=40)
    plan = StagePlan("batched", "copy", ClosedLoop(4), 40)
    repeat = make_repeat(stage_run(records, plan=plan), records)
    assert len(repeat.records) == 40
    assert repeat.window is not None
    assert repeat.window.start_s == pytest.approx(0.15)  # the last of four users has come
    stage = summarize_stage([repeat])
    assert stage.output_tokens_per_s is not None
    assert stage.output_tokens_per_s.value == pytest.approx(4 * 10 / 0.2, rel=0.02)
    assert stage.mean_in_flight == pytest.approx(4, rel=0.02)
    assert stage.whole_tokens_per_s is not None
    assert stage.whole_tokens_per_s < 0.98 * stage.output_tokens_per_s.value, (
        "the coming and the going are in it"
    )


def test_what_flows_in_a_window_by_hand() -> None:
    window = Window(1.0, 2.0)
    inside = record(
        "batched", scheduled_at_s=0.5, ttft_s=0.25, gap_s=0.25, chunks=5
    )  # tokens at 0.75 ... 1.75
    assert tokens_in(window, [inside]) == 3  # 1.0 itself is before it
    assert tokens_in(window, [replace(inside, chunk_tokens=(1, 1, 1, 1, 7))]) == 9
    assert tokens_in(window, [replace(inside, output_tokens=10)]) == pytest.approx(6)
    assert tokens_in(window, [record("batched", chunks=0, tokens=5)]) == 0  # nobody saw them arrive
    assert ended_in(window, [inside]) == 1
    assert mean_in_flight(window, [inside]) == pytest.approx(0.75)
    assert window.overlap_s(3.0, 4.0) == 0
    assert (window.holds(1.0), window.holds(2.0)) == (False, True)


def due(at_s: float, answer_s: float = 1.0, *, is_warmup: bool = False) -> RequestRecord:
    made = record("batched", scheduled_at_s=at_s, ttft_s=answer_s, chunks=1)
    return replace(made, label=replace(made.label, is_warmup=is_warmup))


RATE = StagePlan("batched", "copy", constant_rate(1.0, 10.0), 10)
USERS = StagePlan("batched", "copy", ClosedLoop(2), 10)


@pytest.mark.parametrize(
    ("plan", "records", "window"),
    [
        # From the last user's coming, without a lead-in from the first request, to the last end.
        (USERS, [due(5, is_warmup=True), due(6, is_warmup=True), due(7), due(8)], Window(6, 9)),
        (USERS, [due(7), due(8)], Window(7, 9)),
        (USERS, [due(7, answer_s=0.0)], None),
        # From the first whole answer, or the first that counts, to the end of the schedule or the last due instant.
        (RATE, [due(5), due(8)], Window(6, 13)),
        (RATE, [due(4, is_warmup=True), due(6), due(8)], Window(6, 13)),
        (RATE, [due(5), due(14)], Window(6, 14)),
        (RATE, [due(5, answer_s=8.0)], None),
        (RATE, [due(5, is_warmup=True)], None),
        (RATE, [], None),
    ],
)
def test_the_steady_part_by_hand(
    plan: StagePlan, records: list[RequestRecord], window: Window | None
) -> None:
    """The load began at 3 s; a schedule has 10 s."""
    assert steady_window(plan, 3.0, records) == window


@pytest.mark.parametrize(
    ("records", "length_s"),
    [
        ([due(5), due(8)], 10),
        ([due(4, is_warmup=True), due(6), due(8)], 7),  # from the first that counts
        ([due(5), due(15)], 12),  # to the last due instant
        ([due(4, is_warmup=True), due(14)], 0),  # all in one instant, after the schedule
        ([due(4, is_warmup=True)], 0),
    ],
)
def test_how_long_requests_were_offered_by_hand(records: list[RequestRecord], length_s: float) -> None:
    assert offered_s(RATE, 3.0, records) == length_s
