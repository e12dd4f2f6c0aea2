"""The load driver in a process of its own, as it must be: Locust patches the interpreter."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.client.record import ClientReason, RequestRecord, read_records
from loadtest.run.directory import REQUESTS_FILE, read_run
from serving.core.latency import ttft_s
from serving.core.request import Outcome
from tests.unit.loadtest.fake_server import FakeLane, fake_lab
from tests.unit.loadtest.processes import ROOT, TIMEOUT_S, interrupted, run_to_end

ALWAYS_IDLE = (
    "import loadtest.bench.stage as stage; stage.MAX_IDLE_S = -1.0; "
    "from loadtest.bench.__main__ import main; main(prog_name='tandem bench')"
)
# Two profiles that differ in each respect: a scaled or shifted figure must be wrong for one of them.
QUICK = FakeLane("batched", ttft_s=0.01, gap_s=0.004)
SLOW = FakeLane("speculative", ttft_s=0.06, gap_s=0.016, tokens_per_chunk=4)


def command(url: str, runs_dir: Path, *arguments: str) -> list[str]:
    base = [sys.executable, "-W", "error::ResourceWarning", "-m", "loadtest.bench", "--base-url", url]
    # The ceiling has tests of its own, and takes longer than most of these runs.
    return [*base, "--runs-dir", str(runs_dir), "--no-ceiling", *arguments]


def bench(url: str, runs_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(command(url, runs_dir, *arguments))


def report(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return run_to_end([sys.executable, "-m", "loadtest.report", *map(str, arguments)])


def records_of(runs_dir: Path) -> list[RequestRecord]:
    return list(read_records(runs_dir / "latest" / "requests.jsonl"))


def check_measured(done: subprocess.CompletedProcess[str], directory: Path) -> None:
    """The run is whole. On busy cores it may be INVALID, and its exit code must say so then and only then."""
    stages = json.loads((directory / "summary.json").read_text())["stages"]
    assert done.returncode == (5 if any(stage["invalid"] for stage in stages) else 0), done.stderr


def test_a_lane_that_was_idle_answers_a_short_request_before_its_next_stage(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK}) as (url, _):
        plain = command(
            url, tmp_path, "--concurrency", "1,2,3", "--workloads", "copy", "--output-tokens", "20"
        )
        at = plain.index("-m")
        done = run_to_end([*plain[:at], "-c", ALWAYS_IDLE, *plain[at + 2 :]])
    check_measured(done, tmp_path / "latest")
    records = records_of(tmp_path)
    warm = [record for record in records if record.label.stage == "warmup"]
    assert [record.output_tokens for record in warm] == [20, 2, 2]
    assert not any(record.label.counts for record in warm)
    asked = [record.label.number for record in warm]
    # Each asks what nobody else does: nothing of it is in a cache.
    assert len(set(asked)) == 3
    assert not set(asked) & {record.label.number for record in records if record not in warm}
    assert len({record.label.request_id for record in records}) == len(records)


def test_a_whole_run_tells_the_truth(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK, "slow": SLOW}) as (url, lab):
        done = bench(
            url,
            tmp_path,
            "--concurrency",
            "1,3",
            "--workloads",
            "copy",
            "--output-tokens",
            "20",
            "--seed",
            "5",
        )
    check_measured(done, tmp_path / "latest")
    assert "Traceback" not in done.stderr

    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    stages = {(stage["lane"], stage["load"]["users"]): stage for stage in summary["stages"]}
    assert {key: stage["requests"] for key, stage in stages.items()} == {
        ("quick", 1): 4, ("quick", 3): 12, ("slow", 1): 4, ("slow", 3): 12,
    }  # fmt: skip
    # One to warm up the lane, the first of each user, and of three users up to two more while the last one ends.
    assert all(1 + 1 + 4 + 3 + 12 <= number <= 1 + 1 + 4 + 3 + 12 + 2 for number in lab.num_requests.values())
    for (name, _), stage in stages.items():
        lane = lab.lanes[name]
        served = lab.served[name]
        tpot_s = (20 // lane.tokens_per_chunk - 1) * lane.gap_s / 19
        assert stage["failures"] == 0
        # Lower bounds are what the server must wait, upper ones what it took by its own stamps, with slack.
        assert lane.ttft_s <= stage["ttft_s"]["p50"]["value"] < max(each.ttft_s for each in served) + 0.05
        assert tpot_s <= stage["tpot_s"]["p50"]["value"] < max(each.tpot_s for each in served) * 1.25 + 0.002
        assert stage["tokens_per_chunk"] == pytest.approx(lane.tokens_per_chunk)
        assert stage["notes"] == []  # Locust's own counts agree, among others
        assert stage["memory_bytes"] == lane.memory_bytes
    assert stages["slow", 1]["acceptance_rate"] == pytest.approx(3 / 4)
    assert stages["slow", 1]["mean_acceptance_length"] == pytest.approx(4)
    assert stages["quick", 1]["acceptance_rate"] is None

    records = records_of(tmp_path)
    counted = [record for record in records if record.label.counts]
    assert len(counted) == 32
    assert sum(record.label.is_warmup for record in records) == 2 * (1 + 1 + 3)
    assert len({record.label.request_id for record in records}) == len(records)
    assert all(record.output_tokens == 20 for record in records if record.is_completed)
    by_lane = {lane: {r.label.number for r in counted if r.label.lane == lane} for lane in ("quick", "slow")}
    assert by_lane["quick"] == by_lane["slow"]
    # What comes before asks what nothing that counts asks: nothing of a stage is in a cache before it.
    others = {record.label.number for record in records if not record.label.counts}
    assert not others & {record.label.number for record in counted}

    assert summary["run"]["seed"] == 5
    assert summary["run"]["status"] == "complete"
    announced = r"4 stages, 32 requests; about \d+ s expected, each stage is cut after at most 180 s; seed 5"
    assert re.search(announced, done.stderr)
    assert "stage 4 of 4: slow, copy, 3 users" in done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("report: ")
    assert Path(last.removeprefix("report: ")).is_file()


def test_users_share_a_closed_loop(tmp_path: Path) -> None:
    """With one place and three users, each waits for the two before it: TTFT holds the queue."""
    lane = FakeLane("sequential", ttft_s=0.02, gap_s=0.004, max_running=1)
    with fake_lab({"one": lane}) as (url, _):
        done = bench(
            f"{url}/v1/",
            tmp_path,
            "--concurrency",
            "3",
            "--workloads",
            "story",
            "--output-tokens",
            "10",
            "--json",
        )  # the address as OpenAI's clients have it
    check_measured(done, tmp_path / "latest")
    stage = json.loads(done.stdout)["stages"][0]
    service_s = 0.02 + 9 * 0.004
    assert stage["requests"] == 6
    # Of those that count each waited for two others; the very first one came at once, and does not count.
    assert stage["ttft_s"]["p50"]["value"] >= 1.5 * service_s
    firsts = sorted(ttft_s(record.timeline) for record in records_of(tmp_path) if record.chunk_at_s)
    assert firsts[0] < firsts[-1] / 2
    assert stage["mean_in_flight"] == pytest.approx(3, rel=0.2)


def test_failures_are_counted_and_not_hidden(tmp_path: Path) -> None:
    lane = FakeLane("batched", ttft_s=0.005, gap_s=0.001, fail_every=3)
    with fake_lab({"shaky": lane}) as (url, _):
        done = bench(url, tmp_path, "--concurrency", "1", "--workloads", "copy,story", "--output-tokens", "8")
    check_measured(done, tmp_path / "latest")
    records = records_of(tmp_path)
    # Eleven requests with the warm-up and the user's first in each stage; the third, sixth and ninth break.
    assert [record.is_completed for record in records] == [True, True, False] * 3 + [True, True]
    assert {record.reason for record in records if not record.is_completed} == {ClientReason.CUT_OFF}
    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    failed = sum(record.label.counts and not record.is_completed for record in records)
    assert sum(stage["failures"] for stage in summary["stages"]) == failed == 3
    assert summary["failures"] == [
        {"lane": "shaky", "reason": "cut_off", "count": 3, "example": summary["failures"][0]["example"]}
    ]
    assert all(not stage["notes"] for stage in summary["stages"])


def test_a_run_that_is_invalid_has_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_lab({"quick": QUICK}) as (url, lab):
        # The gateway counts each request twice: client and server disagree.
        count = lab.gateway.ended
        monkeypatch.setattr(lab.gateway, "ended", lambda *end: (count(*end), count(*end)))
        done = bench(url, tmp_path, "--concurrency", "1", "--workloads", "copy", "--output-tokens", "4")
        again = report(tmp_path / "latest")
    assert (done.returncode, again.returncode) == (5, 5), done.stderr
    for each in (done, again):
        assert "INVALID: all 1 stage may not be used." in each.stdout
        assert "report: " in each.stdout


def test_a_lane_that_only_fails_is_no_success(tmp_path: Path) -> None:
    with fake_lab({"dead": FakeLane("batched", 0.001, 0.001, fail_every=1)}) as (url, _):
        done = bench(url, tmp_path, "--concurrency", "1", "--workloads", "copy", "--output-tokens", "8")
    assert done.returncode == 1
    assert (tmp_path / "latest" / "report.html").is_file()


def test_a_stage_that_takes_too_long_is_cut_and_marked(tmp_path: Path) -> None:
    with fake_lab({"slow": FakeLane("batched", 0.3, 0.001)}) as (url, _):
        done = bench(
            url,
            tmp_path,
            "--concurrency",
            "2",
            "--workloads",
            "copy",
            "--output-tokens",
            "4",
            "--max-stage-s",
            "0.4",
        )
    assert done.returncode == 1
    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    stage = summary["stages"][0]
    assert stage["cut"] is True
    assert stage["requests"] < stage["planned_requests"]
    assert summary["run"]["status"] == "incomplete"
    ends = Counter(record.outcome for record in records_of(tmp_path) if record.label.counts)
    assert ends[Outcome.CANCELLED] == stage["failures"] > 0
    assert ends.total() == stage["requests"]


def test_ctrl_c_writes_what_there_is_and_resume_does_the_rest(tmp_path: Path) -> None:
    # Five requests of one user on each lane, then ten and more of two users; cut in the last of the four stages.
    arguments = ("--concurrency", "1,2", "--workloads", "copy", "--output-tokens", "40", "--seed", "3")
    slow = FakeLane("batched", ttft_s=0.01, gap_s=0.01)
    with fake_lab({"quick": QUICK, "slow": slow}) as (url, lab):
        out, err = interrupted(command(url, tmp_path, *arguments), lab.after(28))
        assert "report: " in out
        directory = (tmp_path / "latest").resolve()
        assert f"--resume {directory}" in err.replace(str(tmp_path / "latest"), str(directory))
        summary = json.loads((directory / "summary.json").read_text())
        assert summary["run"]["status"] == "interrupted"
        assert [stage["lane"] for stage in summary["stages"]] == ["quick", "slow", "quick", "slow"]
        before = records_of(tmp_path)
        assert (before[-1].outcome, before[-1].reason) == (Outcome.CANCELLED, ClientReason.INTERRUPTED)

        served = dict(lab.num_requests)
        with (directory / "requests.jsonl").open("ab") as records:
            records.write(b'{"label"')  # as a kill leaves it
        done = bench(url, tmp_path, "--resume", str(directory))
    check_measured(done, tmp_path / "latest")
    assert "3 of 4 stages have run" in done.stderr
    assert f"requests.jsonl:{len(before) + 1}: the last line is cut off, 8 bytes are left out" in done.stderr
    # Only the unfinished stage ran again, whole, after one request to warm up.
    assert lab.num_requests["quick"] == served["quick"]
    assert served["slow"] + 1 + 10 <= lab.num_requests["slow"] <= served["slow"] + 1 + 11
    after = records_of(tmp_path)
    counted = Counter(record.label.stage for record in after if record.label.counts)
    assert counted == {
        "quick/copy/1 user": 4,
        "slow/copy/1 user": 4,
        "quick/copy/2 users": 8,
        "slow/copy/2 users": 8,
    }
    assert len({record.label.request_id for record in after}) == len(after)
    kept = [record for record in before if record.label.stage != "slow/copy/2 users"]
    assert after[: len(kept)] == kept
    # One clock: what came later is later, by at least the time of the first part.
    assert min(record.scheduled_at_s for record in after[len(kept) :]) > max(r.finished_at_s for r in before)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["run"]["status"], summary["run"]["parts"]) == ("complete", 2)
    assert [stage["requests"] for stage in summary["stages"]] == [4, 4, 8, 8]


# A command under a limit of what a file may hold: a full disk that needs no file system of its own.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_a_run_that_finds_the_disk_full_keeps_what_had_finished(tmp_path: Path) -> None:
    # About 1.5 kB a record: those of the first stage fit, those of the second do not.
    arguments = ("--concurrency", "1,8", "--workloads", "copy", "--output-tokens", "20")
    with fake_lab({"quick": QUICK}) as (url, _):
        full = subprocess.run(
            [sys.executable, "-c", LIMITED, "20000", *command(url, tmp_path, *arguments)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT,
            # Python would cut its own cache of a module at the limit, and no later process could import that.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        directory = (tmp_path / "latest").resolve()
        kept = records_of(tmp_path)
        stages = read_run(directory).stages
        done = bench(url, tmp_path, "--resume", str(directory))
    assert full.returncode == 1, full.stderr
    assert "Traceback" not in full.stderr
    assert re.search(
        r"^Error: .*/requests\.jsonl: cannot be written: File too large$", full.stderr, re.MULTILINE
    )
    assert f"--resume {tmp_path}" in full.stderr
    assert [stage.plan.key for stage in stages] == ["quick/copy/1 user"]
    assert 6 < len(kept) < 30
    assert "the last line is cut off" not in done.stderr
    check_measured(done, directory)
    run = read_run(directory).run
    assert run.status == "complete"
    assert run.priorities == {"gateway_niceness": 0, "gateway_group_niceness": 0}  # as the lab says them
    records = records_of(tmp_path)
    assert sum(record.label.counts for record in records) == 4 + 16
    assert 6 + 1 + 24 <= len(records) <= 6 + 1 + 24 + 7


def test_a_run_goes_on_only_on_the_lab_it_was_measured_on(tmp_path: Path) -> None:
    slow = FakeLane("batched", ttft_s=0.01, gap_s=0.4)
    arguments = ("--concurrency", "1", "--workloads", "copy", "--output-tokens", "4")
    with fake_lab({"quick": QUICK, "slow": slow}) as (url, lab):
        interrupted(command(url, tmp_path, *arguments), lab.after(8))
    directory = (tmp_path / "latest").resolve()
    before = (directory / "requests.jsonl").read_bytes()
    with fake_lab({"quick": QUICK, "other": QUICK}) as (url, _):
        other = bench(url, tmp_path, "--resume", str(directory))
    assert other.returncode == 2
    assert "the lab is not the one it was measured on" in other.stderr
    assert "config.lanes.1.name was slow, is other" in re.sub(r"\s+", " ", other.stderr)
    assert (directory / "requests.jsonl").read_bytes() == before


def test_an_open_loop_sends_on_time_whatever_is_unanswered(tmp_path: Path) -> None:
    """A lane with one place and twice the load it bears: waiting grows, and the schedule does not care."""
    service_s = 0.1 + 9 * 0.004
    lane = FakeLane("sequential", ttft_s=0.1, gap_s=0.004, max_running=1)
    with fake_lab({"one": lane, "free": replace(lane, max_running=64)}) as (url, lab):
        load = ("--load", "constant:15/s,3s", "--warmup-s", "1", "--seed", "3")
        done = bench(url, tmp_path, *load, "--workloads", "copy", "--output-tokens", "10")
    check_measured(done, tmp_path / "latest")
    assert "requests sent, " in done.stderr
    records = [record for record in records_of(tmp_path) if record.label.stage != "warmup"]
    by_lane = {name: [r for r in records if r.label.lane == name] for name in ("one", "free")}
    for name, own in by_lane.items():
        assert len(own) == 45 == lab.num_requests[name] - 1
        assert sum(record.label.is_warmup for record in own) == 15
        due = sorted(record.scheduled_at_s for record in own)
        assert max(due) - min(due) == pytest.approx(44 / 15, abs=0.001)
        assert all(r.dispatched_at_s is not None and r.dispatched_at_s >= r.scheduled_at_s for r in own)
    # The last one of the full lane was due when 45 - 3 / service_s of them were still to be served.
    assert max(ttft_s(r.timeline) for r in by_lane["one"]) > 45 * service_s - 3
    assert max(ttft_s(r.timeline) for r in by_lane["free"]) < 1
    offsets = {
        name: [round(r.scheduled_at_s - min(x.scheduled_at_s for x in own), 6) for r in own]
        for name, own in by_lane.items()
    }
    assert sorted(offsets["one"]) == pytest.approx(sorted(offsets["free"]), abs=1e-5)
    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    assert [stage["requests"] for stage in summary["stages"]] == [30, 30]


def test_a_stage_that_mostly_fails_is_stopped_and_says_why(tmp_path: Path) -> None:
    with fake_lab({"dead": FakeLane("batched", 0.001, 0.001, fail_every=1)}) as (url, _):
        done = bench(
            url, tmp_path, "--load", "constant:50/s,20s", "--workloads", "copy", "--output-tokens", "8"
        )
    assert done.returncode == 1
    stage = read_run((tmp_path / "latest").resolve()).stages[0]
    assert (stage.is_cut, stage.stop_reason) == (True, ClientReason.STAGE_HOPELESS)
    assert stage.stop_detail == "20 of 20 requests failed, more than 50% (max_error_rate)"
    assert stage.finished_at_s - stage.started_at_s < 15


def test_the_error_rate_that_ends_a_stage_and_the_time_of_a_request_can_be_set(tmp_path: Path) -> None:
    # One request in four fails of itself. The default bears that; 10 percent does not.
    with fake_lab({"shaky": FakeLane("batched", 0.001, 0.001, fail_every=4)}) as (url, _):
        arguments = ("--load", "constant:20/s,2s", "--workloads", "copy", "--output-tokens", "8")
        bench(url, tmp_path, *arguments)
        (borne,) = read_run((tmp_path / "latest").resolve()).stages
        bench(url, tmp_path, *arguments, "--max-error-rate", "0.1")
        (ended,) = read_run((tmp_path / "latest").resolve()).stages
    assert borne.stop_reason is None
    assert ended.stop_reason == ClientReason.STAGE_HOPELESS
    assert "more than 10% (max_error_rate)" in str(ended.stop_detail)
    with fake_lab({"slow": FakeLane("batched", ttft_s=5, gap_s=0.001)}) as (url, _):
        arguments = ("--concurrency", "1", "--workloads", "copy", "--output-tokens", "8")
        done = bench(url, tmp_path, *arguments, "--request-timeout-s", "0.3", "--max-error-rate", "1")
    assert done.returncode == 1
    assert {record.reason for record in records_of(tmp_path)} == {"request_timeout"}


def test_a_stage_that_has_lost_its_objective_is_stopped(tmp_path: Path) -> None:
    lane = FakeLane("batched", ttft_s=0.3, gap_s=0.001)
    with fake_lab({"slow": lane, "too_slow": replace(lane, ttft_s=0.7)}) as (url, _):
        objective = ("--slo", "ttft_p95<500ms", "--stop-early", "--load", "constant:10/s,3s")
        done = bench(url, tmp_path, *objective, "--workloads", "copy", "--output-tokens", "4")
    assert done.returncode == 1
    run = read_run((tmp_path / "latest").resolve())
    assert run.run.slo == "ttft_p95<500ms"
    whole, lost = run.stages
    assert (whole.stop_reason, whole.locust_requests) == (None, 30)
    assert lost.stop_reason == ClientReason.STAGE_HOPELESS
    assert lost.stop_detail is not None
    assert re.fullmatch(r"\d+ of \d+ requests missed ttft_p95<500ms: .*\(stop_early\)", lost.stop_detail)
    assert lost.finished_at_s - lost.started_at_s < 3


def test_a_seed_is_fresh_unless_given(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK}) as (url, _):
        runs = [
            bench(url, tmp_path, "--out", str(tmp_path / name), "--concurrency", "1", "--workloads", "copy",
                  "--output-tokens", "4", "--json")
            for name in ("a", "b")
        ]  # fmt: skip
    seeds = [json.loads(run.stdout)["run"]["seed"] for run in runs]
    assert seeds[0] != seeds[1]
    assert all(f"seed {seed}" in run.stderr for seed, run in zip(seeds, runs, strict=True))


def test_no_lab_is_said_plainly(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = bench(f"http://127.0.0.1:{port}", tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith(f"http://127.0.0.1:{port}/lab: cannot be reached: Connection refused")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lanes", "warp"], "lane 'warp' is not in the lab, which has sequential, batched, speculative"),
        (["--workloads", "chess"], "workload 'chess' is unknown"),
        (["--concurrency", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--concurrency", "1,0"], "flags: concurrency.1 = 0: must be greater than or equal to 1"),
        (["--lanes", ","], "',' names nothing"),
        (["--max-stage-s", "nan"], "flags: max_stage_s = nan: "),
        (["--name", "a/b"], "flags: name = 'a/b': "),
        (
            ["--plan", "p.json", "--seed", "4"],
            "--plan says all there is to do; --seed cannot be given with it",
        ),
        (["--resume", "runs/x", "--load", "8"], "--resume says all there is to do; --load cannot be given"),
        (
            ["--resume", "runs/none"],
            "runs/none/requests.jsonl: cannot be read: No such file or directory; is this the directory of a run?",
        ),
        (["--experiment", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
        (["--base-url", "ftp://127.0.0.1"], "base_url 'ftp://127.0.0.1' is not of the form"),
    ],
)
def test_wrong_usage_is_refused_with_its_value(arguments: list[str], message: str, tmp_path: Path) -> None:
    with fake_lab() as (url, lab):
        done = bench(url, tmp_path, *arguments)
    assert done.returncode == 2
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert sum(lab.num_requests.values()) == 0


@pytest.mark.parametrize("port", ["99999", "tcp://10.0.0.1:9465"])  # the second is Kubernetes' idea
def test_a_wrong_port_of_metrics_is_told_before_anything_is_made(
    port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_LOAD_METRICS_PORT", port)
    done = bench("http://127.0.0.1:1", tmp_path)
    assert done.returncode == 2
    assert f"TANDEM_LOAD_METRICS_PORT={port!r} must be a port" in re.sub(r"\s+", " ", done.stderr)
    assert not list(tmp_path.iterdir())


def test_a_directory_of_all_processes_metrics_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/absent")
    done = bench("http://127.0.0.1:1", tmp_path)
    assert done.returncode == 2
    assert "PROMETHEUS_MULTIPROC_DIR='/absent': unset it" in re.sub(r"\s+", " ", done.stderr)
    assert not list(tmp_path.iterdir())


def test_what_of_a_trace_and_of_prompts_is_not_sent_is_said(tmp_path: Path) -> None:
    trace, prompts = tmp_path / "t.csv", tmp_path / "p.jsonl"
    trace.write_text("Timestamp,Request tokens,Response tokens\n0,3,2\n0,3,0\n")
    prompts.write_text('{"prompt": "a", "temperature": 1}\n')
    with fake_lab({"quick": QUICK}) as (url, _):
        done = bench(url, tmp_path / "runs", "--load", f"trace:{trace}", "--workloads", f"file:{prompts}")
    assert f"{trace}: 1 of 2 rows are left out" in done.stderr
    assert f"{prompts}: keys that are not sent: temperature" in done.stderr


@pytest.mark.parametrize(("flags", "exit_code"), [((), 0), (("--needs-done",), 1)])
def test_answers_without_done_are_whole_unless_it_is_insisted_on(
    flags: tuple[str, ...], exit_code: int, tmp_path: Path
) -> None:
    with fake_lab({"quick": replace(QUICK, says_done=False)}) as (url, _):
        done = bench(
            url, tmp_path, "--concurrency", "1", "--workloads", "copy", "--output-tokens", "4", *flags
        )
    assert done.returncode == exit_code, done.stderr
    reasons = {record.reason for record in read_records(tmp_path / "latest" / REQUESTS_FILE)}
    assert reasons == ({None} if exit_code == 0 else {"cut_off"})


def test_a_plan_file_is_followed(tmp_path: Path) -> None:
    plan = {
        "base_url": "http://127.0.0.1:1", "model": "smollm2-135m", "name": "mine", "output_tokens": 4,
        "stages": [{"lane": "quick", "workload": "story", "load": {"kind": "closed", "users": 2}, "requests": 5}],
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    out = tmp_path / "out" / "first"
    with fake_lab({"quick": QUICK}) as (url, _):
        arguments = ("--plan", str(tmp_path / "plan.json"), "--out", str(out))
        done = bench(url, tmp_path, *arguments)
        again = bench(url, tmp_path, *arguments)
    check_measured(done, out)
    summary = json.loads((out / "summary.json").read_text())
    assert [(s["workload"], s["load"]["users"], s["requests"]) for s in summary["stages"]] == [
        ("story", 2, 5)
    ]
    assert summary["run"]["name"] == "mine"
    assert (tmp_path / "out" / "latest").resolve() == out
    # A run is never written over.
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_a_report_is_rebuilt_the_same(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK}) as (url, _):
        bench(url, tmp_path, "--concurrency", "1", "--workloads", "copy", "--output-tokens", "4")
    before = (tmp_path / "latest" / "summary.json").read_bytes()
    done = report(tmp_path / "latest", "--json")
    check_measured(done, tmp_path / "latest")
    assert done.stdout.encode() == before
    assert (tmp_path / "latest" / "summary.json").read_bytes() == before
