"""`make bench-idle`: what processes are called, and what they took."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from serving.benchmarks import idle
from serving.benchmarks.idle import Group, Sample, groups, sample, title
from serving.core.exit_codes import ExitCode
from serving.lab import state as lab_state
from serving.lab.state import LabPhase, LabState


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        (["ray::ServeReplica:tandem:batched"], "ray::ServeReplica:tandem:batched"),
        (["ray::ServeController.listen_for_change"], "ray::ServeController"),
        (["/x/bin/python", "-m", "serving", "up", "--run-id", "1"], "serving"),
        (["/x/bin/python", "-u", "/x/ray/dashboard/dashboard.py", "--host=1"], "dashboard/dashboard.py"),
        (["/x/gcs_server", "--log_dir=/tmp"], "name"),
        ([], "name"),
    ],
)
def test_a_process_is_called_what_it_calls_itself(command_line: list[str], expected: str) -> None:
    assert title(command_line, "name") == expected


def test_processes_of_one_title_count_together_and_the_costliest_comes_first() -> None:
    before = {
        1: Sample("cheap", 5.0),
        2: Sample("dear", 1.0),
        3: Sample("dear", 0.0),
        4: Sample("ended", 9.0),
    }
    after = {1: Sample("cheap", 5.5), 2: Sample("dear", 2.0), 3: Sample("dear", 2.0), 5: Sample("began", 9.0)}
    assert groups(before, after, lasted_s=10) == [Group("dear", 2, 30.0), Group("cheap", 1, 5.0)]


def test_a_process_is_read_with_the_time_it_has_had() -> None:
    own = psutil.Process()
    taken = own.cpu_times()
    (read,) = sample([own]).values()
    assert read.cpu_s >= taken.user + taken.system > 0


def test_without_a_lab_there_is_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path))
    done = CliRunner().invoke(idle.main, [])
    assert (done.exit_code, done.stderr) == (ExitCode.NOT_RUNNING, "no lab is running\n")


def test_it_shows_the_processes_of_the_running_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path))
    own = psutil.Process()
    ticks = lab_state.process_start_ticks(own.pid)
    assert ticks is not None
    state = LabState(
        own.pid, ticks, "r1", "lab.yaml", "http://x", "127.0.0.1", (1,), None, LabPhase.READY, "ready", 0.0
    )
    lab_state.write(tmp_path, state)
    asked: list[str] = []

    def processes_of(run_id: str) -> list[psutil.Process]:
        asked.append(run_id)
        return [own]

    monkeypatch.setattr(idle, "processes_of", processes_of)
    monkeypatch.setattr(idle, "sleep", lambda seconds: None)
    done = CliRunner().invoke(idle.main, ["--seconds", "1"])
    assert done.exit_code == 0, done.output
    assert asked == ["r1"]
    assert title(own.cmdline(), own.name()) in done.stdout
