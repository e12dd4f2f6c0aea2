"""Faults that came to light in use, each with the case that showed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.analysis.stage_summary import make_repeat, summarize_stage
from loadtest.client.record import ClientReason, read_records, to_row
from loadtest.judge.capacity import SearchSettings
from loadtest.judge.intervals import mean_of_rates
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import ClosedLoop
from loadtest.run.experiment import check, split_names
from loadtest.run.plan import StagePlan
from loadtest.run.sender import slug
from loadtest.sweep.stages import CapacitySweep, ProbeLength
from tests.unit.loadtest.runs import record, stage_run


def test_a_lab_that_is_gone_is_no_result() -> None:
    gone = [record("batched", number=n, chunks=0, reason=ClientReason.CONNECT) for n in range(3)]
    summary = summarize_stage([make_repeat(stage_run(gone), gone)])
    assert any("could not be reached: 100% of requests" in reason for reason in summary.invalid)


def test_a_torn_last_line_costs_that_record_only(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    row = to_row(record("batched"))
    path.write_text(f"{row}\n{row[:-30]}")
    assert len(list(read_records(path))) == 1


def test_the_ids_of_odd_workloads_are_short_ascii_and_distinct() -> None:
    keys = [f"batched/file:{'x' * 200}{end}.jsonl/8 users" for end in "ab"] + ["b/プ.jsonl", "b/ロ.jsonl"]
    slugs = [slug(key) for key in keys]
    assert len(set(slugs)) == len(keys)
    assert all(slug.isascii() and len(slug) < 72 for slug in slugs)
    assert slug(StagePlan("batched", "copy", ClosedLoop(8), 8).key) == "batched-copy-8-users"


def test_the_parts_of_a_mixture_are_one_workload() -> None:
    assert split_names("copy,mixed:chat=3,copy=1,story") == ("copy", "mixed:chat=3,copy=1", "story")


def test_stopping_early_needs_an_objective() -> None:
    with pytest.raises(ValueError, match="stop_early needs an objective"):
        check({"stop_early": True}, "flags")


def test_a_rate_is_never_below_zero() -> None:
    found = mean_of_rates([10.0, 400.0])
    assert found is not None
    assert found.low == 0


def slow_sweep(lowest_rate_per_s: float) -> CapacitySweep:
    """Begins at 0.02 requests/s, in probes of 2 s at most."""
    return CapacitySweep(
        ["batched"],
        "copy",
        parse_slo("ttft<1s"),
        SearchSettings(0.02, lowest_rate_per_s=lowest_rate_per_s),
        ProbeLength(1, 1, 2),
        process="poisson",
        output_tokens=8,
        seed=1,
    )


def test_a_low_rate_has_a_schedule_and_the_lowest_is_the_last() -> None:
    stage = slow_sweep(lowest_rate_per_s=0.02).next_stage()
    assert stage is not None
    assert stage.requests >= 1
    assert slow_sweep(lowest_rate_per_s=0.03).next_stage() is None
