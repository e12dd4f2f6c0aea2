"""How the tools are called, what is read of their results, and what becomes of a tool that does not work."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.crosscheck.figures import Figures
from loadtest.crosscheck.run import Measured, NotMeasured, OfferedStreams, Profile, measure
from loadtest.crosscheck.table import closest, figures_table, names_table, outside_tolerance
from loadtest.crosscheck.tools import Named, Tool, ToolRun, tools

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


def read(name: str, scratch: Path) -> tuple[Figures, Named]:
    return next(tool for tool in tools() if tool.name == name).read(scratch, "")


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
    assert read("vllm bench serve", tmp_path) == (TRUE, {"TPOT": 10.0, "ITL": 40.0})


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
    assert read("guidellm", tmp_path) == (expected, {"TPOT": 15.0, "ITL": 10.0})


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
    assert read("aiperf", tmp_path) == (TRUE, {"TPOT": None, "ITL": 10.0})


# A tool that does not work

LOAD = OfferedStreams(rate_per_s=4, requests=2, output_tokens=2, prompt_tokens=2, seed=1)


def failing(python: Path, code: str = "") -> Tool:
    return Tool("broken", "broken", python, lambda _: ["-c", code], lambda *_: (TRUE, {}))


def test_a_tool_that_is_not_installed_is_said_to_be_so(tmp_path: Path) -> None:
    result = measure(failing(tmp_path / "python"), Profile(1), LOAD, tmp_path)
    assert isinstance(result, NotMeasured)
    assert "not installed" in result.reason


@pytest.mark.parametrize(
    ("code", "reason"),
    [("raise SystemExit('no such option')", "exit code 1: no such option"), ("", "0 streams were sent")],
)
def test_a_tool_that_fails_or_sends_nothing_is_not_measured(tmp_path: Path, code: str, reason: str) -> None:
    result = measure(failing(Path(sys.executable), code), Profile(1), LOAD, tmp_path)
    assert isinstance(result, NotMeasured)
    assert reason in result.reason


def test_ours_is_measured_against_a_real_engine(tmp_path: Path) -> None:
    quick = Profile(tokens_per_chunk=2, ttft_ms=20, step_ms=5)
    offered = OfferedStreams(rate_per_s=50, requests=6, output_tokens=8, prompt_tokens=2, seed=1)
    result = measure(tools()[0], quick, offered, tmp_path)
    assert isinstance(result, Measured), result
    assert (result.reported.requests, result.sent.requests) == (6, 6)
    assert result.sent.tpot_mean_ms is not None
    assert result.sent.tpot_mean_ms > 0.9 * 3 * 5 / 7  # three gaps of a step for seven tokens


# The tables


def measured(tool: str, **changes: float | None) -> Measured:
    return Measured(tool, "1", replace(TRUE, **changes), TRUE, 4.2, {"TPOT": 15.0, "ITL": None})  # type: ignore[arg-type]


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
