"""The verbs' own parts: targets, measurement of the core, and the file of figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from serving.benchmarks.core import CoreRate, measure_core
from serving.benchmarks.scheduler import core_cases, verdicts
from serving.benchmarks.service import ServiceRate
from serving.run_directory import write_figures
from serving.simulation import study_policies


def core_rate(decisions: int, num_replicas: int = 100) -> CoreRate:
    return CoreRate("fcfs", "least_outstanding", num_replicas, 10_000, decisions, cpu_s=1.0, elapsed_s=3.0)


@pytest.mark.parametrize(("decisions", "admissions"), [(4999, 1000), (5000, 999), (5000, 1000)])
def test_targets_are_met_or_not_by_the_slowest_core_and_the_best_service(
    decisions: int, admissions: int
) -> None:
    rates = [core_rate(9000), core_rate(decisions), core_rate(10, num_replicas=1000)]
    service = [ServiceRate(64, 32, admissions, 1.0, None, None), ServiceRate(16, 32, 10, 1.0, None, None)]
    said = [line.startswith("met") for line in verdicts(rates, service)]
    assert said == [decisions >= 5000, admissions >= 1000]


@pytest.mark.parametrize(("order", "placement", "num_replicas"), core_cases())
def test_every_case_of_the_core_keeps_its_queue_standing(
    order: str, placement: str, num_replicas: int
) -> None:
    rate = measure_core(
        order, placement, min(num_replicas, 10), num_waiting=20, max_decisions=30, limit_s=60, seed=1
    )
    assert rate.decisions == 30
    assert rate.decisions_per_s > 0


def test_figures_go_to_the_latest_run_and_make_one_where_there_is_none(tmp_path: Path) -> None:
    first = write_figures("bench-scheduler", {"seed": 7}, tmp_path)
    second = write_figures("study-policies", {"seed": 8}, tmp_path)
    assert first.parent == second.parent == (tmp_path / "latest").resolve()
    assert first.parent.name.endswith("-bench-scheduler")
    written = json.loads(second.read_text())
    assert (written["verb"], written["seed"]) == ("study-policies", 8)
    assert {"machine", "versions"} <= written.keys()


def test_the_study_prints_what_it_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(study_policies.main, ["--requests", "100", "--runs-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "latest" / "study-policies.json").read_text())
    for verdict in written["verdicts"]:
        assert (
            f"{'met' if verdict['is_met'] else 'NOT MET'}: {verdict['expectation']}"
            in done.output.replace("\n", " ")
        )
    rows = {part: [(row["load"], row["policy"]) for row in rows] for part, rows in written["parts"].items()}
    loads = study_policies.LOADS
    assert rows["ttft"] == rows["slo"] == [(load, one) for load in loads for one in study_policies.POLICIES]
