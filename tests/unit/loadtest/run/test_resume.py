from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from loadtest.client.record import ClientReason, RequestRecord, read_records, to_row
from loadtest.run import resume
from loadtest.run.directory import (
    PLAN_FILE,
    REQUESTS_FILE,
    RUN_FILE,
    RunFile,
    RunStatus,
    RunWriteError,
    read_run,
    write_run,
)
from loadtest.run.plan import Plan, write_plan
from tests.unit.loadtest import runs

LANES = ("sequential", "batched")
WARM = "warmup"


def lab(run: RunFile, **changes: Any) -> dict[str, Any]:
    """The description of the lab that a run was measured on."""
    return {"config": run.run.config, "model": run.run.model, "replicas": run.run.replicas} | changes


def stopped_run(directory: Path) -> tuple[RunFile, list[RequestRecord]]:
    """Two stages, the second stopped by hand after two of its four requests."""
    records = [
        runs.record(lane, number=number) for lane in LANES for number in range(4 - 2 * (lane == "batched"))
    ]
    warm = [runs.record(lane, is_warmup=True) for lane in LANES]
    warm = [replace(each, label=replace(each.label, stage=WARM)) for each in warm]
    by_lane = {lane: [record for record in records if record.label.lane == lane] for lane in LANES}
    stages = [runs.stage_run(by_lane[lane], planned=4) for lane in LANES]
    stages[1] = replace(stages[1], is_cut=True, stop_reason=ClientReason.INTERRUPTED)
    run = runs.run_file(stages)
    run = replace(run, run=replace(run.run, status=RunStatus.INTERRUPTED))
    plan = Plan("http://h:1", "m", tuple(stage.plan for stage in stages))
    write_plan(plan, directory / PLAN_FILE)
    runs.write_whole_run(directory, run, [warm[0], *by_lane["sequential"], warm[1], *by_lane["batched"]])
    return run, [warm[0], *by_lane["sequential"]]


def test_finished_stages_are_kept_and_the_one_stopped_by_hand_is_not(tmp_path: Path) -> None:
    run, kept = stopped_run(tmp_path)
    past = resume.read_past(tmp_path, lab(run))
    assert past.finished == {"sequential/copy/1 user"}
    assert past.run.stages == run.stages[:1]
    assert past.part == 2
    # The lane that has nothing finished is warmed up again, so its first warm-up goes as well.
    assert resume.drop_unfinished(tmp_path, past.finished) == 3
    assert list(read_records(tmp_path / REQUESTS_FILE)) == kept


@pytest.mark.parametrize("reason", [ClientReason.STAGE_TIME_UP, ClientReason.STAGE_HOPELESS])
def test_a_stage_that_stopped_by_itself_is_finished(reason: ClientReason, tmp_path: Path) -> None:
    run, _ = stopped_run(tmp_path)
    write_run(replace(run, stages=(run.stages[0], replace(run.stages[1], stop_reason=reason))), tmp_path)
    with pytest.raises(ValueError, match=r"all 2 stages have run; there is nothing to go on with"):
        resume.read_past(tmp_path, lab(run))


def test_the_clock_goes_on_and_never_back(tmp_path: Path) -> None:
    run, _ = stopped_run(tmp_path)
    started_at = datetime.fromisoformat(run.run.started_at)
    assert resume.read_past(tmp_path, lab(run), started_at.replace(hour=started_at.hour + 1)).offset_s == 3600
    last_s = max(stage.finished_at_s for stage in run.stages)
    assert resume.read_past(tmp_path, lab(run), datetime(2000, 1, 1, tzinfo=UTC)).offset_s == last_s


def test_another_lab_is_refused_with_what_differs(tmp_path: Path) -> None:
    run, _ = stopped_run(tmp_path)
    lanes = [dict(lane) for lane in run.run.config["lanes"]]
    lanes[1]["name"] = "other"
    with pytest.raises(
        ValueError, match=r"not the one it was measured on: config\.lanes\.1\.name was batched, is other$"
    ):
        resume.read_past(tmp_path, lab(run, config={"lanes": lanes}))
    replicas = [each | {"engine_version": "9.9"} for each in run.run.replicas]
    with pytest.raises(ValueError, match=r"engines\.0 was batched: vllm 1\.2, is batched: vllm 9\.9"):
        resume.read_past(tmp_path, lab(run, replicas=replicas))


def test_where_a_lab_listens_and_what_its_replicas_are_called_is_no_difference(tmp_path: Path) -> None:
    run, _ = stopped_run(tmp_path)
    before = {"config": run.run.config | {"gateway": {"host": "127.0.0.1", "port": 8000, "replicas": 1}}}
    after = {"config": run.run.config | {"gateway": {"host": "127.0.0.1", "port": 9000, "replicas": 1}}}
    assert resume.differences(before, after) == []
    after["config"]["gateway"]["replicas"] = 2
    assert resume.differences(before, after) == ["config.gateway.replicas was 1, is 2"]
    renamed = [each | {"replica": each["replica"] + "x", "url": "http://h:2"} for each in run.run.replicas]
    assert resume.read_past(tmp_path, lab(run, replicas=renamed)).part == 2


def test_a_line_torn_by_a_crash_is_dropped_and_a_broken_one_is_not(tmp_path: Path) -> None:
    run, kept = stopped_run(tmp_path)
    finished = resume.read_past(tmp_path, lab(run)).finished
    path = tmp_path / REQUESTS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole + to_row(kept[0]).encode()[:40])
    resume.drop_unfinished(tmp_path, finished)
    assert list(read_records(path)) == kept
    path.write_bytes(b'{"label": 1}\n' + whole)
    with pytest.raises(ValueError, match=r"requests\.jsonl:1: not a request record"):
        resume.drop_unfinished(tmp_path, finished)


def test_a_killed_run_has_what_had_finished(tmp_path: Path) -> None:
    """`run.json` is replaced whole after each stage: a run that was killed reads as one that still runs."""
    run, _ = stopped_run(tmp_path)
    running = replace(run, run=replace(run.run, status=RunStatus.RUNNING), stages=run.stages[:1])
    write_run(running, tmp_path)
    assert read_run(tmp_path) == running
    assert resume.read_past(tmp_path, lab(run)).finished == {"sequential/copy/1 user"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda text: text[: len(text) // 2], r"Invalid JSON: EOF while parsing .* at line \d+ column \d+$"),
        (lambda text: "", r"Invalid JSON: EOF while parsing a value at line 1 column 0$"),
        (lambda text: text.replace('"seed"', '"sead"'), r"run\.seed: Field required$"),
        (lambda text: text.replace('"cpu_model"', '"cpu"'), r"run\.machine: cpu_model: missing$"),
        (lambda text: text.replace('"slo":null', '"slo":"fast"'), r"slo 'fast': "),
    ],
)
def test_a_damaged_description_of_a_run_is_named_with_its_fault(
    change: Callable[[str], str], fault: str, tmp_path: Path
) -> None:
    stopped_run(tmp_path)
    path = tmp_path / RUN_FILE
    text = json.dumps(json.loads(path.read_text()), separators=(",", ":"))
    path.write_text(text)
    read_run(tmp_path)  # so far it is sound
    path.write_text(change(text))
    with pytest.raises(ValueError, match=rf"run\.json: not the description of a run: {fault}") as raised:
        read_run(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_file_that_finds_the_disk_full_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = stopped_run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunWriteError, match=r"run\.json: cannot be written: No space left on device$"):
        write_run(replace(run, stages=()), tmp_path)
    with pytest.raises(RunWriteError, match=r"requests\.jsonl: cannot be written: No space left on device$"):
        resume.drop_unfinished(tmp_path, frozenset())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run, _ = stopped_run(tmp_path)
    (tmp_path / PLAN_FILE).unlink()
    with pytest.raises(ValueError, match=r"plan\.json: cannot be read"):
        resume.read_past(tmp_path, lab(run))
    with pytest.raises(ValueError, match=r"run\.json: cannot be read"):
        resume.read_past(tmp_path / "none", lab(run))
