"""A stage's engine steps, recorded on a lab of one process and written into the run's directory."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.client.traced_lab import Question, TracedLabError, find_lab
from loadtest.offer.load import ClosedLoop
from loadtest.run import stage_trace
from loadtest.run.directory import StageTrace
from loadtest.run.experiment import check
from loadtest.run.plan import Plan, StagePlan
from loadtest.run.stage_trace import tracing_steps
from serving.tracing.recording import recording
from serving.tracing.trace_file import Trace, read_trace
from tests.unit.loadtest.lesson.scripted_lab import ScriptedLab, scripted_lab

STAGE = StagePlan("batched-lane", "copy", ClosedLoop(1), 4)


@pytest.fixture
def lab() -> Iterator[ScriptedLab]:
    with scripted_lab(ScriptedLab()) as served:
        yield served


def complete(lab: ScriptedLab, lane: str, tokens: int) -> None:
    body = {"model": f"tiny:{lane}", "max_tokens": tokens}
    lab.complete("/v1/completions", f"run-{lane}-0", body)


def test_the_stage_s_lane_is_recorded_and_written_for_programs_and_viewers(
    lab: ScriptedLab, tmp_path: Path
) -> None:
    with tracing_steps(STAGE, lab.url, tmp_path) as traced:
        assert lab.started == ["batched"]
        complete(lab, "batched-lane", 5)
    assert lab.stopped == ["batched"]
    assert traced.trace is not None
    assert traced.trace.faults == ()
    assert traced.trace.file == "batched-lane-copy-1-user.jsonl"
    trace = read_trace(tmp_path / "traces" / traced.trace.file)
    assert sum(event.emitted_tokens for event in trace.steps) == 5
    assert [replica.lane for replica in trace.header.replicas] == ["batched-lane"]
    assert [span.client_request_id for span in trace.spans] == ["run-batched-lane-0"]
    shown = json.loads((tmp_path / "traces" / "batched-lane-copy-1-user.json").read_text())
    assert len([event for event in shown["traceEvents"] if event["name"] == "+1"]) == 4, "behind the prompt"


def test_of_lane_any_all_lanes_of_the_model_are_recorded(lab: ScriptedLab, tmp_path: Path) -> None:
    lab.models = {"speculative": {"name": "tuned", "path": "/tuned"}}
    with tracing_steps(replace(STAGE, lane="any"), lab.url, tmp_path) as traced:
        assert sorted(lab.started) == ["batched", "sequential"]
        complete(lab, "batched-lane", 5)
    assert traced.trace is not None
    assert traced.trace.faults == ()


def test_a_bound_that_was_reached_is_said(lab: ScriptedLab, tmp_path: Path) -> None:
    lab.lost_events = 7
    with tracing_steps(STAGE, lab.url, tmp_path) as traced:
        complete(lab, "batched-lane", 2)
    assert traced.trace is not None
    (fault,) = traced.trace.faults
    assert "first 2 step events, 7 more did not fit (50000 of a stage)" in fault
    assert "max_events=50000" in lab.queries[0]
    assert "seconds=240&" in lab.queries[0], "the time box, 180 s, and a margin"


def test_a_stage_that_cannot_be_recorded_runs_and_says_why(lab: ScriptedLab, tmp_path: Path) -> None:
    lab.refuses_recordings = 409
    ran = []
    with tracing_steps(STAGE, lab.url, tmp_path) as traced:
        ran.append(1)
    assert ran == [1]
    assert traced.trace is not None
    assert traced.trace.file is None
    assert "answered 409" in traced.trace.faults[0]
    assert not (tmp_path / "traces").exists()


def test_a_lab_that_is_gone_afterwards_is_no_reason_to_lose_the_stage(tmp_path: Path) -> None:
    with scripted_lab(ScriptedLab()) as lab:
        entered = tracing_steps(STAGE, lab.url, tmp_path)
        traced = entered.__enter__()
        complete(lab, "batched-lane", 2)
    entered.__exit__(None, None, None)
    assert traced.trace is not None
    assert len(traced.trace.faults) == 2, "no steps, no requests"
    assert all("cannot be reached" in fault for fault in traced.trace.faults)


def test_a_trace_that_finds_the_disk_full_is_no_reason_to_lose_the_stage(
    lab: ScriptedLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(trace: Trace, path: Path) -> None:
        path.write_text("{")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stage_trace, "write_chrome_trace", fill)
    with tracing_steps(STAGE, lab.url, tmp_path) as traced:
        complete(lab, "batched-lane", 2)
    path = tmp_path / "traces" / "batched-lane-copy-1-user.jsonl"
    assert traced.trace == StageTrace(None, (f"{path}: cannot be written: No space left on device",))
    assert list(path.parent.iterdir()) == []


def test_a_stage_that_fails_leaves_no_recording(lab: ScriptedLab, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tracing_steps(STAGE, lab.url, tmp_path):
        raise ZeroDivisionError
    assert lab.started == lab.stopped == ["batched"]


def test_events_that_did_not_all_come_are_none(lab: ScriptedLab, tmp_path: Path) -> None:
    lab.cut_off_events = 1
    with tracing_steps(STAGE, lab.url, tmp_path) as traced:
        complete(lab, "batched-lane", 3)
    assert traced.trace is not None
    assert traced.trace.faults == ("replica batched-1: 2 of 3 step events came",)


def test_a_stage_longer_than_a_recording_is_refused_before_it_runs() -> None:
    plan = Plan("http://127.0.0.1:9", "m", (replace(STAGE, max_stage_s=3541),))
    with pytest.raises(ValueError, match=r"max_stage_s=3541 must be at most 3540 .*\(trace\)"):
        replace(plan, trace=True)


def test_an_experiment_may_ask_for_it() -> None:
    assert check({"trace": True}, "file").trace
    assert not check({}, "file").trace
    with pytest.raises(ValueError, match="trace = 'yes': must be a valid boolean"):
        check({"trace": "yes"}, "file")


def test_the_lesson_says_what_a_replica_said(lab: ScriptedLab) -> None:
    lab.refuses_recordings = 409
    with pytest.raises(TracedLabError, match="answered 409"):
        find_lab(lab.url).ask([Question("batched-lane", {"prompt": "x"}, 2)])


def test_a_server_that_answers_before_it_reads_is_sent_nothing_to_read(lab: ScriptedLab) -> None:
    """A body that comes when it has closed would be answered by a reset, and the answer lost."""
    with recording([f"{lab.url}/replica/batched"], limit_s=1, max_events=1) as (one,):
        one.fetch()
    assert lab.recording_bodies == [b"", b""]
