"""A sweep, stopped and resumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from loadtest.client.record import ClientReason, RequestRecord, read_records
from loadtest.run.directory import read_run
from tests.unit.loadtest.fake_server import FakeLane, fake_lab
from tests.unit.loadtest.processes import interrupted, run_to_end

# One place: what comes faster than the lane serves waits, ever longer.
LANES = {"one": FakeLane("sequential", ttft_s=0.1, gap_s=0.01, max_running=1)}
ASKED = ("--slo", "ttft<600ms", "--process", "constant", "--output-tokens", "4", "--seed", "3")
SHORT = (
    "--first-rate",
    "4",
    "--repeats",
    "1",
    "--resolution",
    "1",
    "--probe-s",
    "1.5",
    "--probe-requests",
    "5",
)


def command(url: str, runs_dir: Path, *arguments: str) -> list[str]:
    base = [sys.executable, "-W", "error::ResourceWarning", "-m", "loadtest.sweep", "--base-url", url]
    return [*base, "--runs-dir", str(runs_dir), *arguments]


def sweep(url: str, runs_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(command(url, runs_dir, *arguments))


def records_of(directory: Path) -> list[RequestRecord]:
    return list(read_records(directory / "requests.jsonl"))


def said(done: subprocess.CompletedProcess[str]) -> str:
    return re.sub(r"[\s│]+", " ", done.stderr)


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    with fake_lab(LANES) as (url, lab):
        # A warm-up and six requests at 4 requests/s, then some of the second probe.
        _, errors = interrupted(command(url, tmp_path, *ASKED, *SHORT), lab.after(1 + 6 + 3))
        directory = (tmp_path / "latest").resolve()
        assert f"tandem sweep --resume {tmp_path / directory.name} goes on with it" in errors
        stopped, before = read_run(directory), records_of(directory)

        refused = sweep(url, tmp_path, "--resume", str(directory), "--workload", "story", "--seed", "4")
        assert refused.returncode == 2
        assert "made with other settings: --workload was copy, is story; --seed was 3, is 4" in said(refused)
        assert records_of(directory) == before

        served = lab.num_requests["one"]
        done = sweep(url, tmp_path, "--resume", str(directory), "--slo", "ttft<600ms", "--max-minutes", "2")
        asked_anew = lab.num_requests["one"] - served
        again = sweep(url, tmp_path, "--resume", str(directory))
    assert [stage.stop_reason for stage in stopped.stages] == [None, ClientReason.INTERRUPTED]
    finished, cut = (stage.plan for stage in stopped.stages)
    assert finished.key == "one/copy/constant 4 req/s"
    run, after = read_run(directory), records_of(directory)
    keys = [stage.plan.key for stage in run.stages]
    assert len(set(keys)) == len(keys) > 2
    # The finished probe is kept as it was; the one that was stopped ran again, from its beginning.
    assert run.stages[0] == stopped.stages[0]
    assert run.stages[1].plan == cut
    kept = [record for record in before if record.label.stage in (finished.key, "warmup")]
    assert after[: len(kept)] == kept
    assert len(after) - len(kept) == asked_anew
    assert len({record.label.request_id for record in after}) == len(after)
    assert (run.run.parts, run.run.status) == (2, "complete")
    (found,) = json.loads((directory / "summary.json").read_text())["capacities"]
    assert len(found["probes"]) == len(keys)
    # On a machine too busy to offer a rate, its probes are invalid and the lane may be left without a capacity.
    without_capacity = 1 if all(probe["is_valid"] for probe in found["probes"]) else 5
    assert done.returncode == (without_capacity if found["rate_per_s"] is None else 0), done.stderr
    assert again.returncode == 2
    assert "every lane's search is done; there is nothing to go on with" in said(again)


def test_a_sweep_needs_an_objective_and_a_directory_of_its_own(tmp_path: Path) -> None:
    with fake_lab(LANES) as (url, _):
        without = sweep(url, tmp_path)
        no_sweep = sweep(url, tmp_path, "--resume", str(tmp_path / "none"))
    assert (without.returncode, no_sweep.returncode) == (2, 2)
    assert "a sweep needs an objective" in said(without)
    assert "sweep.json: cannot be read: No such file" in said(no_sweep)
