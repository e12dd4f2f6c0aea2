"""How the tools are called, what is read of their results, and what becomes of a tool that does not work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from loadtest.crosscheck.cases import CASES, Case, Profile
from loadtest.crosscheck.engine import BUSY, busy_processes
from loadtest.crosscheck.figures import Figures
from loadtest.crosscheck.run import Measured, NotMeasured, measure, run_bounded
from loadtest.crosscheck.table import (
    closest,
    engine_table,
    faults,
    figures_table,
    names_table,
    outside_tolerance,
    verdict,
)
from loadtest.crosscheck.tools import Report, Tool, ToolRun, tools
from serving.engines.base import KEEP_SENT

TOKENIZER = json.dumps(
    {
        "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
)
TRUE = Figures(80, 300.0, 350.0, 10.0, 40.0, 41.0, 240.0, 4.0)


def tool_run(tmp_path: Path) -> ToolRun:
    tokenizer = tmp_path / "checkpoint"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return ToolRun("http://127.0.0.1:1", 4.5, 80, 64, 32, 7, tokenizer, scratch)


def test_each_tool_is_told_the_same_load(tmp_path: Path) -> None:
    one = tool_run(tmp_path)
    for tool in tools():
        words = " ".join(tool.command(one)).replace("=", " ").replace(",", " ").split()
        for wanted in ("4.5", "80", "64", "7"):
            assert wanted in words, (tool.name, wanted)
        assert any(word.startswith(one.url) for word in words)


def test_aiperf_finds_the_tokenizer_where_a_hub_would_have_left_it(tmp_path: Path) -> None:
    one = tool_run(tmp_path)
    next(tool for tool in tools() if tool.name == "aiperf").command(one)
    (found,) = (one.scratch / "hub").glob("models--tandem--tokenizer/snapshots/*/tokenizer.json")
    assert found.read_text() == "{}"
    assert (one.scratch / "hub/models--tandem--tokenizer/refs/main").read_text() == found.parent.name


def read(name: str, scratch: Path) -> Report:
    return next(tool for tool in tools() if tool.name == name).read(scratch)


def test_vllms_results(tmp_path: Path) -> None:
    said = {
        "completed": 80,
        "p50_ttft_ms": 300.0,
        "p95_ttft_ms": 350.0,
        "mean_tpot_ms": 10.0,
        "mean_itl_ms": 40.0,
        "p95_itl_ms": 41.0,
        "output_throughput": 240.0,
        "request_throughput": 4.0,
    }
    (tmp_path / "vllm.json").write_text(json.dumps(said))
    assert read("vllm bench serve", tmp_path) == Report(TRUE, {"TPOT": 10.0, "ITL": 40.0})


def test_guidellms_inter_token_latency_is_our_tpot(tmp_path: Path) -> None:
    metrics = {
        "request_totals": {"successful": 80},
        "time_to_first_token_ms": {"successful": {"percentiles": {"p50": 300.0, "p95": 350.0}}},
        "inter_token_latency_ms": {"successful": {"mean": 10.0}},
        "time_per_output_token_ms": {"successful": {"mean": 15.0}},
        "output_tokens_per_second": {"successful": {"mean": 240.0}},
        "requests_per_second": {"successful": {"mean": 4.0}},
    }
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [{"metrics": metrics}]}))
    expected = replace(TRUE, gap_mean_ms=None, gap_p95_ms=None)
    assert read("guidellm", tmp_path) == Report(expected, {"TPOT": 15.0, "ITL": 10.0})


def test_aiperfs_inter_chunk_latency_is_our_gap(tmp_path: Path) -> None:
    said = {
        "request_count": {"avg": 80.0},
        "time_to_first_token": {"p50": 300.0, "p95": 350.0},
        "inter_token_latency": {"avg": 10.0},
        "inter_chunk_latency": {"avg": 40.0, "p95": 41.0},
        "output_token_throughput": {"avg": 240.0},
        "request_throughput": {"avg": 4.0},
    }
    (tmp_path / "aiperf").mkdir()
    (tmp_path / "aiperf/profile_export_aiperf.json").write_text(json.dumps(said))
    assert read("aiperf", tmp_path) == Report(TRUE, {"TPOT": None, "ITL": 10.0})


# A tool that does not work

LOAD = Case("few", rate_per_s=4, requests=2, output_tokens=2, prompt_tokens=2)


def failing(python: Path, code: str = "") -> Tool:
    return Tool("broken", "broken", python, lambda _: ["-c", code], lambda _: Report(TRUE, {}))


def test_a_tool_that_is_not_installed_is_said_to_be_so(tmp_path: Path) -> None:
    result = measure(failing(tmp_path / "python"), LOAD, Profile(1), 1, tmp_path)
    assert isinstance(result, NotMeasured)
    assert "not installed" in result.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [("raise SystemExit('no such option')", "exit code 1: no such option"), ("", "0 streams were sent")],
)
def test_a_tool_that_fails_or_sends_nothing_is_not_measured(tmp_path: Path, code: str, reason: str) -> None:
    result = measure(failing(Path(sys.executable), code), LOAD, Profile(1), 1, tmp_path)
    assert isinstance(result, NotMeasured)
    assert reason in result.reason


def starts_a_child(pid_file: Path, options: str = "") -> str:
    """Code of a program whose child outlives every limit, and whose number it writes down."""
    child = "import time; time.sleep(600)"
    return (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {child!r}], {options}); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))"
    )


def test_a_tool_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # The child holds the output open: whoever waits for its end would wait for ever.
    code = f"{starts_a_child(pid_file)}; child.wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded([sys.executable, "-c", code], dict(os.environ), limit_s=15.0)
    assert_gone(int(pid_file.read_text()))


def test_what_a_tool_left_behind_is_ended_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = starts_a_child(pid_file, "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL")
    run_bounded([sys.executable, "-c", code], dict(os.environ), limit_s=60.0)
    assert_gone(int(pid_file.read_text()))


def assert_gone(pid: int) -> None:
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_ours_is_measured_and_judged_against_a_real_engine(tmp_path: Path) -> None:
    quick = Profile(tokens_per_chunk=2, ttft_ms=20, step_ms=5)
    case = Case("quick", rate_per_s=50, requests=6, output_tokens=8, prompt_tokens=2)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    result = measure(tools()[0], case, quick, 1, tmp_path)
    assert isinstance(result, Measured), result
    assert (result.reported.requests, result.sent.requests) == (6, 6)
    assert result.sent.tpot_mean_ms is not None
    assert result.sent.tpot_mean_ms > 0.9 * 3 * 5 / 7  # three gaps of a step for seven tokens
    assert 1 <= result.most_at_once <= 6
    assert result.engine_share > 0


def test_busy_processes_compete_in_sessions_of_their_own_and_end_with_the_block() -> None:
    before = set(psutil.Process().children())
    with busy_processes(2, limit_s=30.0):
        busy = set(psutil.Process().children()) - before
        assert len(busy) == 2
        assert all(
            os.getsid(each.pid) == each.pid and each.nice() == psutil.Process().nice() for each in busy
        )
    assert not any(each.is_running() for each in busy)


def test_a_busy_process_ends_by_itself() -> None:
    assert subprocess.run([sys.executable, "-c", BUSY, "0.01"], timeout=60, check=True).returncode == 0


# The cases


def test_the_first_case_is_light_and_the_others_press() -> None:
    light, *pressed = CASES
    assert (light.name, light.busy_processes, light.judged_by) == ("light", 0, "tolerance")
    assert [case.name for case in pressed] == ["streams", "busy"]
    assert {case.judged_by for case in pressed} == {"closest"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_engine_remembers_all_streams_of_a_case(case: Case) -> None:
    assert case.requests <= KEEP_SENT


def test_so_many_streams_are_open_on_average_as_a_case_says() -> None:
    streams = next(case for case in CASES if case.name == "streams")
    (profile,) = streams.profiles
    # A request waits half a step for the one it comes in with.
    answer_s = (profile.ttft_ms + profile.step_ms * (streams.output_tokens - 1 + 1 / 2)) / 1000
    assert streams.rate_per_s * answer_s == pytest.approx(256, rel=0.01)


def test_a_title_says_the_whole_load() -> None:
    assert CASES[-1].title(Profile(1), seed=7) == (
        "busy: TTFT 300 ms, 1 token each 40 ms; 80 requests of 64 tokens, Poisson 4 requests/s, seed 7, "
        "beside 2 busy processes"
    )


# The tables


def measured(
    tool: str, *, invalid: tuple[str, ...] = (), resolution_ms: float = 0.0, **changes: float | None
) -> Measured:
    report = Report(replace(TRUE, **changes), {"TPOT": 15.0, "ITL": None}, invalid)  # type: ignore[arg-type]
    return Measured(tool, "1", report, TRUE, 4.2, 16, resolution_ms, 0.25, False)


def test_the_closest_and_its_ties() -> None:
    near, tied, far = (measured(name, ttft_p50_ms=ms) for name, ms in (("a", 301), ("b", 297), ("c", 304)))
    assert closest([near, tied, far], "ttft_p50_ms") == {"a", "b"}
    gaps = [measured("a", gap_mean_ms=None), measured("b", gap_mean_ms=37.0), measured("c", gap_mean_ms=36.0)]
    assert closest(gaps, "gap_mean_ms") == {"b"}


def test_a_figure_outside_its_tolerance_is_named_with_its_bound() -> None:
    assert outside_tolerance(measured("a", ttft_p50_ms=305.9, tpot_mean_ms=10.19)) == []
    (found,) = outside_tolerance(measured("a", tpot_mean_ms=10.3))
    assert found == "TPOT mean, ms: reported 10.3, sent 10.000, tolerance 0.200"
    assert outside_tolerance(measured("a", gap_p95_ms=None)) != []


def test_the_tables_show_reports_truth_and_reasons() -> None:
    results: list[Measured | NotMeasured] = [measured("a", ttft_p50_ms=303.0)]
    results.append(NotMeasured("b", "not installed"))
    rows = figures_table(results).splitlines()[2:]
    assert rows[0].startswith("| a 1 | 303.00 (+1.0%)* | 350.00 (+0.0%)* |")
    assert rows[1].startswith("| as sent to it, 4.20 arrivals/s | 300.00 | 350.00 |")
    assert rows[2].startswith("| b: not measured, not installed | - |")
    assert names_table(results).splitlines()[2:] == ["| a | 15.00 | - | 10.00 | 40.00 |"]


def test_a_truth_that_is_not_known_well_makes_ties() -> None:
    assert closest([measured("a"), measured("b", gap_p95_ms=42.0)], "gap_p95_ms") == {"a"}
    blurred = [measured("a"), measured("b", gap_p95_ms=42.0, resolution_ms=1.0)]
    assert closest(blurred, "gap_p95_ms") == {"a", "b"}


def test_the_table_marks_an_invalid_run() -> None:
    row = figures_table([measured("a", invalid=("it was late",))]).splitlines()[2]
    assert row.startswith("| a 1 INVALID | 300.00 (+0.0%)* |")


def test_the_verdict_counts_columns_and_gives_reasons() -> None:
    won: list[Measured | NotMeasured] = [
        measured("ours"),
        measured("b", gap_mean_ms=39.0),
        NotMeasured("c", "not installed"),
    ]
    assert verdict(won) == "ours: closest or tied in 7 of 7 columns, of 2 tools measured; INVALID: no"
    lost = [measured("ours", ttft_p50_ms=310.0, requests_per_s=4.1, invalid=("late", "slow")), measured("b")]
    assert verdict(lost).splitlines() == [
        "ours: closest or tied in 5 of 7 columns (not in TTFT p50, ms; requests/s), of 2 tools measured; "
        "INVALID: yes",
        "  INVALID: late",
        "  INVALID: slow",
    ]
    assert verdict([NotMeasured("ours", "exit code 1: no"), measured("b")]) == (
        "ours: not measured, exit code 1: no"
    )


def test_what_speaks_against_us_depends_on_the_case() -> None:
    light, pressed = CASES[0], CASES[1]
    far = [measured("ours", ttft_p50_ms=310.0), measured("b", ttft_p50_ms=320.0)]
    (found,) = faults(light, far)
    assert found.startswith("outside tolerance: TTFT p50, ms")
    assert faults(pressed, far) == []
    near = [measured("ours", ttft_p50_ms=305.0), measured("b")]
    assert faults(light, near) == []
    assert faults(pressed, near) == ["another tool is closer: TTFT p50, ms"]


def test_at_light_load_an_invalid_run_is_a_fault_too() -> None:
    assert faults(CASES[0], [measured("ours", invalid=("late",))]) == [
        "INVALID at light load, is the machine busy? late"
    ]


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_nothing_speaks_against_a_pressed_run_that_calls_itself_invalid(case: Case) -> None:
    assert faults(case, [measured("ours", ttft_p50_ms=900.0, invalid=("late",)), measured("b")]) == []
    assert faults(case, [NotMeasured("ours", "did not end")]) == ["not measured: did not end"]


def test_the_engines_own_share_is_shown() -> None:
    assert engine_table([measured("a"), NotMeasured("b", "no")]).splitlines()[2:] == [
        "| a | 16 | 25% | 0.00 | no |"
    ]
