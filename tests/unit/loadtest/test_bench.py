"""The load driver in a process of its own, as it must be: Locust patches the interpreter."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loadtest.record import ClientReason, RequestRecord, read_records
from serving.core.latency import ttft_s
from serving.core.request import Outcome

from .fake_server import FakeLane, fake_lab

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 200  # of a process; they take seconds, but other work may share the cores

# Two profiles that differ in each respect: a scaled or shifted figure must be wrong for one of them.
QUICK = FakeLane("batched", ttft_s=0.01, gap_s=0.004)
SLOW = FakeLane("speculative", ttft_s=0.06, gap_s=0.016, tokens_per_chunk=4)


def command(url: str, runs_dir: Path, *arguments: str) -> list[str]:
    base = [sys.executable, "-W", "error::ResourceWarning", "-m", "loadtest.bench", "--base-url", url]
    return [*base, "--runs-dir", str(runs_dir), *arguments]


def bench(url: str, runs_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, runs_dir, *arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )


def records_of(runs_dir: Path) -> list[RequestRecord]:
    return list(read_records(runs_dir / "latest" / "requests.jsonl"))


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
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr

    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    stages = {(stage["lane"], stage["concurrency"]): stage for stage in summary["stages"]}
    assert {key: stage["requests"] for key, stage in stages.items()} == {
        ("quick", 1): 4, ("quick", 3): 12, ("slow", 1): 4, ("slow", 3): 12,
    }  # fmt: skip
    assert lab.num_requests == {"quick": 17, "slow": 17}  # and one to warm up
    for (name, _), stage in stages.items():
        lane = lab.lanes[name]
        served = lab.served[name]
        tpot_s = (20 // lane.tokens_per_chunk - 1) * lane.gap_s / 19
        assert stage["failures"] == 0
        # Lower bounds are what the server must wait, upper ones what it took by its own stamps, with slack.
        assert lane.ttft_s <= stage["ttft_s"]["p50"] < max(each.ttft_s for each in served) + 0.05
        assert tpot_s <= stage["tpot_s"]["p50"] < max(each.tpot_s for each in served) * 1.25 + 0.002
        assert stage["tokens_per_chunk"] == pytest.approx(lane.tokens_per_chunk)
        assert stage["notes"] == []  # Locust's own counts agree, among others
        assert stage["memory_bytes"] == lane.memory_bytes
    assert stages["slow", 1]["acceptance_rate"] == pytest.approx(3 / 4)
    assert stages["slow", 1]["mean_acceptance_length"] == pytest.approx(4)
    assert stages["quick", 1]["acceptance_rate"] is None

    records = records_of(tmp_path)
    assert Counter(record.label.is_warmup for record in records) == {False: 32, True: 2}
    assert len({record.label.request_id for record in records}) == len(records)
    assert all(record.output_tokens == 20 for record in records)
    by_lane = {
        lane: {(r.label.number) for r in records if r.label.lane == lane} for lane in ("quick", "slow")
    }
    assert by_lane["quick"] == by_lane["slow"]
    # The warm-up asks what no stage asks: nothing of a stage is in a cache before it.
    warm = {record.label.number for record in records if record.label.is_warmup}
    assert not warm & {record.label.number for record in records if not record.label.is_warmup}

    assert summary["run"]["seed"] == 5
    assert summary["run"]["status"] == "complete"
    assert re.search(r"4 stages, 32 requests of 20 tokens; about \d+ s expected", done.stderr)
    assert "stage 4 of 4: slow, copy, 3 users" in done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("report: ")
    assert Path(last.removeprefix("report: ")).is_file()


def test_users_share_a_closed_loop(tmp_path: Path) -> None:
    """With one place and three users, each waits for the two before it: TTFT holds the queue."""
    lane = FakeLane("sequential", ttft_s=0.02, gap_s=0.004, max_running=1)
    with fake_lab({"one": lane}) as (url, _):
        done = bench(
            url, tmp_path, "--concurrency", "3", "--workloads", "story", "--output-tokens", "10", "--json"
        )
    assert done.returncode == 0, done.stderr
    stage = json.loads(done.stdout)["stages"][0]
    service_s = 0.02 + 9 * 0.004
    assert stage["requests"] == 6
    # The first answer came at once, the last ones behind two others.
    assert stage["ttft_s"]["p95"] >= 2 * service_s
    firsts = sorted(ttft_s(record.timeline) for record in records_of(tmp_path) if not record.label.is_warmup)
    assert firsts[0] < firsts[-1] / 2


def test_failures_are_counted_and_not_hidden(tmp_path: Path) -> None:
    lane = FakeLane("batched", ttft_s=0.005, gap_s=0.001, fail_every=3)
    with fake_lab({"shaky": lane}) as (url, _):
        done = bench(url, tmp_path, "--concurrency", "1", "--workloads", "copy,story", "--output-tokens", "8")
    assert done.returncode == 0, done.stderr
    records = records_of(tmp_path)
    # Nine requests with the warm-up; the third, sixth and ninth break.
    assert [record.is_completed for record in records] == [True, True, False] * 3
    assert {record.reason for record in records if not record.is_completed} == {ClientReason.CUT_OFF}
    summary = json.loads((tmp_path / "latest" / "bench.json").read_text())
    assert sum(stage["failures"] for stage in summary["stages"]) == 3
    assert summary["failures"] == [
        {"lane": "shaky", "reason": "cut_off", "count": 3, "example": summary["failures"][0]["example"]}
    ]
    assert all(not stage["notes"] for stage in summary["stages"])


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
    assert 2 <= stage["requests"] < stage["planned_requests"]
    assert summary["run"]["status"] == "incomplete"
    ends = Counter(record.outcome for record in records_of(tmp_path) if not record.label.is_warmup)
    assert ends[Outcome.CANCELLED] == stage["failures"] > 0
    assert ends.total() == stage["requests"]


def test_ctrl_c_writes_what_there_is(tmp_path: Path) -> None:
    lane = FakeLane("batched", ttft_s=0.01, gap_s=5.0)
    with fake_lab({"quick": QUICK, "stuck": lane}) as (url, _):
        arguments = ("--concurrency", "1,2", "--workloads", "copy", "--output-tokens", "4")
        process = subprocess.Popen(
            command(url, tmp_path, *arguments),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "lane stuck" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    summary = json.loads((tmp_path / "latest" / "summary.json").read_text())
    assert summary["run"]["status"] == "interrupted"
    assert [stage["lane"] for stage in summary["stages"]] == ["quick", "quick"]
    last = records_of(tmp_path)[-1]
    assert (last.outcome, last.reason) == (Outcome.CANCELLED, ClientReason.INTERRUPTED)
    assert "report: " in out


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
        (["--workloads", "chat"], "workload 'chat' is unknown"),
        (["--concurrency", "1,x"], "'1,x' is not a list of whole numbers"),
        (["--concurrency", "0"], "each level must be in 1..1024"),
        (["--concurrency", "1025"], "each level must be in 1..1024"),
        (["--lanes", ","], "',' names nothing"),
        (["--max-stage-s", "nan"], "nan is no time"),
        (["--max-stage-s", "0"], "0.0 is not in the range 0.1<=x<=86400"),
        (["--name", "a/b"], "run name 'a/b' must be"),
        (["--base-url", "https://127.0.0.1"], "is not of the form http://host:port"),
    ],
)
def test_wrong_usage_is_refused_with_its_value(arguments: list[str], message: str, tmp_path: Path) -> None:
    with fake_lab() as (url, lab):
        done = bench(url, tmp_path, *arguments)
    assert done.returncode == 2
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert sum(lab.num_requests.values()) == 0


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
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert [(s["workload"], s["concurrency"], s["requests"]) for s in summary["stages"]] == [("story", 2, 5)]
    assert summary["run"]["name"] == "mine"
    assert (tmp_path / "out" / "latest").resolve() == out
    # A run is never written over.
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_a_report_is_rebuilt_the_same(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK}) as (url, _):
        bench(url, tmp_path, "--concurrency", "1", "--workloads", "copy", "--output-tokens", "4")
    before = (tmp_path / "latest" / "summary.json").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.report", str(tmp_path / "latest"), "--json"],
        capture_output=True, timeout=TIMEOUT_S, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == before
    assert (tmp_path / "latest" / "summary.json").read_bytes() == before


def test_the_locustfile_works_alone() -> None:
    with fake_lab({"quick": QUICK}) as (url, lab):
        enough = lab.after(8)
        process = subprocess.Popen(
            [
                sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--host", url, "--headless",
                "--users", "2", "--lane", "quick", "--output-tokens", "4", "--only-summary",
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert enough.wait(TIMEOUT_S)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert re.search(r"quick/copy\s+E2E\s+\d+\s+0\(0\.00%\)", out + err)
    assert re.search(r"quick/copy\s+TTFT\s+\d+\s+0\(0\.00%\)", out + err)
