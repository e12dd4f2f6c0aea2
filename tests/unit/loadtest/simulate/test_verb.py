"""The verb from its arguments to its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loadtest.simulate.__main__ import main
from serving.calibration.profile import save
from tests.unit.loadtest.simulate.profiles import profile

SLO = "ttft_p95<500ms,tpot_p95<30ms"
LOAD = ("--load", "poisson:20/s,30s", "--prompt-tokens", "50", "--output-tokens", "20")


@pytest.fixture
def simulate(tmp_path: Path) -> Any:
    save(profile(), tmp_path / "profile.json")

    def run(*arguments: str) -> Result:
        where = ("--profile", str(tmp_path / "profile.json"), "--runs-dir", str(tmp_path / "runs"))
        return CliRunner().invoke(main, [*where, *arguments])

    return run


def figures(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((latest_plan(tmp_path) / "simulate.json").read_text())
    return found


def latest_plan(tmp_path: Path) -> Path:
    """Plans have runs of their own: by the second, and a number where one has several."""
    plans = [path.parent for path in (tmp_path / "runs").glob("*-simulate*/simulate.json")]
    return max(plans, key=lambda path: path.stat().st_mtime_ns)


def test_a_plan_has_the_fewest_replicas_that_hold(simulate: Any, tmp_path: Path) -> None:
    done = simulate("--slo", SLO, *LOAD)
    assert done.exit_code == 0, done.output
    written = figures(tmp_path)
    for lane, enough in written["plan"].items():
        by_replicas = {
            fleet["replicas"]: fleet["verdict"]["holds"]
            for fleet in written["fleets"]
            if fleet["name"] == lane
        }
        assert by_replicas[enough]
        assert enough == 1 or by_replicas[enough - 1] is False
    assert written["plan"]["batched"] > 1
    assert f"Least: {min(written['plan'].values())} replica" in done.output
    assert "k = 3 at 1" in done.output


def test_a_lane_that_drafts_in_vain_needs_more(simulate: Any, tmp_path: Path) -> None:
    load = (*LOAD, "--load", "poisson:120/s,10s")
    simulate("--slo", SLO, *load, "--text", "story")
    story = figures(tmp_path)["plan"]
    simulate("--slo", SLO, *load, "--text", "copy")
    copied = figures(tmp_path)["plan"]
    assert copied["speculative"] < story["speculative"]
    assert story["speculative/by-batch"] <= story["speculative"]
    assert story["batched"] == copied["batched"]


def test_given_replicas_are_simulated_and_nothing_else(simulate: Any, tmp_path: Path) -> None:
    done = simulate("--slo", SLO, *LOAD, "--replicas", "4", "--lanes", "batched")
    assert done.exit_code == 0, done.output
    assert [(fleet["name"], fleet["replicas"]) for fleet in figures(tmp_path)["fleets"]] == [("batched", 4)]
    mixed = simulate("--slo", SLO, *LOAD, "--replicas", "batched=2+speculative/by-batch=1", "--json")
    assert mixed.exit_code == 0, mixed.output
    (fleet,) = json.loads(mixed.stdout)["fleets"]
    assert (fleet["name"], fleet["replicas"]) == ("batched + speculative/by-batch", 3)


def test_what_no_number_holds_ends_with_1(simulate: Any) -> None:
    done = simulate("--slo", "tpot<1ms", *LOAD, "--max-replicas", "3")
    assert done.exit_code == 1
    assert "No lane holds the objective with up to 3 replicas (--max-replicas)." in done.output


def test_a_lab_s_scheduler_decides(simulate: Any, tmp_path: Path) -> None:
    config = tmp_path / "lab.yaml"
    config.write_text(
        "scheduler: {max_waiting_requests: 0}\nlanes: [{name: batched, strategy: batched, max_num_seqs: 16}]\n"
    )
    simulate("--slo", SLO, *LOAD, "--replicas", "1", "--lanes", "batched", "--config", str(config))
    assert figures(tmp_path)["fleets"][0]["num_refused"] > 0
    assert figures(tmp_path)["scheduler"]["max_waiting_requests"] == 0


def test_cells_are_schedulers_of_their_own(simulate: Any, tmp_path: Path) -> None:
    p95_s = []
    for cell in ((), ("--cell-replicas", "1")):
        simulate("--slo", SLO, *LOAD, "--replicas", "6", "--lanes", "batched", *cell)
        p95_s.append(figures(tmp_path)["fleets"][0]["ttft_s"][1])
    assert p95_s[1] > p95_s[0]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--slo", SLO), "one of --trace and --load"),
        (("--slo", "fast", *LOAD), "'fast' is no limit"),
        (("--slo", "icl<1s", *LOAD), "chunks it has not"),
        (("--slo", SLO, "--load", "8"), "have no arrivals of their own"),
        (("--slo", SLO, "--trace", "none.csv"), "none.csv: cannot be read"),
        (("--slo", SLO, *LOAD, "--speed", "2"), "--speed is for --trace"),
        (("--slo", SLO, *LOAD, "--replicas", "0"), "'0' must be a whole number in 1..1000"),
        (("--slo", SLO, *LOAD, "--replicas", "other=2"), "'other=2' is no lane and number"),
        (("--slo", SLO, *LOAD, "--lanes", "other"), "lane 'other' is not in the profile"),
        (("--slo", SLO, *LOAD, "--profile", "none.json"), "none.json: cannot be read"),
        (("--slo", SLO, *LOAD, "--config", "none.yaml"), "none.yaml"),
        (("--slo", SLO, *LOAD, "--replicas", "2", "--cell-replicas", "x"), "--cell-replicas"),
    ],
)
def test_wrong_usage_is_2_and_named(simulate: Any, arguments: tuple[str, ...], fault: str) -> None:
    done = simulate(*arguments)
    assert done.exit_code == 2, done.output
    assert fault in " ".join(done.output.split())


def test_the_picture_lies_beside_the_figures(simulate: Any, tmp_path: Path) -> None:
    done = simulate("--slo", SLO, *LOAD)
    picture = latest_plan(tmp_path) / "simulate.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "simulate.png" in done.output
    plain = simulate("--slo", SLO, *LOAD, "--lanes", "batched", "--replicas", "2")
    assert plain.exit_code == 0
    assert not (latest_plan(tmp_path) / "simulate.png").exists(), "nothing to draw of one lane without drafts"
    assert picture.exists(), "an earlier plan stays as it was"
    assert not (tmp_path / "runs" / "latest").exists(), "it is not what was measured last"
