from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from loadtest.analysis.stage_summary import make_repeat, summarize_stage
from loadtest.client.record import ClientReason
from loadtest.judge.slo import parse_slo
from loadtest.run.exporter import ended_request
from loadtest.run.locust_stats import report_to_locust
from tests.unit.loadtest.runs import record, stage_run


def test_an_empty_answer_counts_and_has_no_latency_but_its_own() -> None:
    """A model may end at once: that is no failure, no miss of an objective, and no TTFT of 0."""
    records = [record("batched", number=n) for n in range(3)]
    records.append(replace(record("batched", number=3, chunks=0, tokens=1, asked=None), finished_at_s=0.2))
    slo = parse_slo("ttft<1s,tpot<1s,e2e<1s")
    summary = summarize_stage([make_repeat(stage_run(records), records)], slo)
    assert (summary.requests, summary.failures) == (4, 0)
    assert summary.slo is not None
    assert (summary.slo.attainment.value, summary.slo.misses) == (1.0, {})
    assert summary.ttft_s.p50 is not None
    assert summary.ttft_s.p50.value == pytest.approx(0.1)
    alone = summarize_stage([make_repeat(stage_run(records[3:]), records[3:])], slo)
    assert (alone.ttft_s.p50, alone.tpot_s.p50, alone.failures) == (None, None, 0)


def test_an_empty_answer_is_counted_by_every_reader_of_records() -> None:
    empty = record("batched", chunks=0, tokens=5, asked=None)
    assert ended_request(empty, "batched")[3:6] == (5, None, None)
    environment = Mock()
    report_to_locust(environment, "batched/copy", empty)
    assert not environment.stats.get.called  # neither TTFT nor TPOT
    assert environment.events.request.fire.call_args.kwargs["exception"] is None


def test_a_lab_that_is_gone_is_no_result() -> None:
    gone = [record("batched", number=n, chunks=0, reason=ClientReason.CONNECT) for n in range(3)]
    summary = summarize_stage([make_repeat(stage_run(gone), gone)])
    assert any("could not be reached: 100% of requests" in reason for reason in summary.invalid)


@pytest.mark.parametrize(
    ("lane", "note"),
    [
        ("any", "where the scheduler sent them: batched 2, table 1"),
        ("batched", "answered by another lane: table"),
    ],
)
def test_which_lane_answered_is_told_where_it_was_not_the_one_that_was_asked(lane: str, note: str) -> None:
    records = [
        replace(record(lane, number=number), served_by_lane=served)
        for number, served in enumerate(("batched", "table", "batched"))
    ]
    summary = summarize_stage([make_repeat(stage_run(records), records)])
    assert note in summary.notes
    assert not any("answered by" in text for text in summary.notes) or lane != "any"
