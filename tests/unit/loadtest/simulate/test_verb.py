"""The verb from its arguments to its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import structs

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
    assert "+ ms a draft" in done.output
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


def test_how_sure_the_answer_is_stands_beside_it(simulate: Any, tmp_path: Path) -> None:
    few = simulate("--slo", SLO, "--load", "poisson:2/s,30s", *LOAD[2:], "--lanes", "batched")
    num_requests = figures(tmp_path)["num_requests"]
    assert num_requests < 73, "fewer cannot settle 95 percent"
    assert "95% interval" in few.output
    assert "–100.0]" in few.output
    assert (
        f"Not settled by {num_requests} requests, drawn once (--seed): batched may need 1 or more."
        in few.output
    )
    assert figures(tmp_path)["possible"] == {"batched": [1, None]}
    given = simulate("--slo", SLO, "--load", "poisson:2/s,30s", *LOAD[2:], "--replicas", "1")
    assert "drawn once (--seed): whether the objective holds with batched, speculative" in given.output
    many = simulate("--slo", SLO, "--load", "poisson:2/s,10min", *LOAD[2:], "--lanes", "batched")
    assert "Not settled" not in many.output
    assert figures(tmp_path)["possible"] == {"batched": [1, 1]}


def test_a_mixed_fleet_says_where_its_requests_went(simulate: Any, tmp_path: Path) -> None:
    config = tmp_path / "lab.yaml"
    config.write_text(
        "scheduler: {placement: adaptive, profile: profile.json}\n"
        "lanes: [{name: batched, strategy: batched, max_num_seqs: 16}]\n"
    )
    fleet = ("--replicas", "batched=1+speculative/by-batch=2", "--config", str(config))
    done = simulate("--slo", SLO, *LOAD, *fleet)
    assert done.exit_code in (0, 1), done.output
    (planned,) = figures(tmp_path)["fleets"]
    lanes = {use["lane"]: use for use in planned["lanes"]}
    assert {name: use["replicas"] for name, use in lanes.items()} == {"batched": 1, "speculative/by-batch": 2}
    assert sum(use["num_requests"] for use in lanes.values()) == planned["num_ended"] - planned["num_refused"]
    for use in lanes.values():
        assert sum(use["by_text"].values()) == use["num_requests"]
    assert list(lanes["batched"]["by_text"]) == ["copy", "story"]
    # Copied text gains most by drafts.
    copied = {name: use["by_text"]["copy"] / use["num_requests"] for name, use in lanes.items()}
    assert copied["speculative/by-batch"] > copied["batched"]
    table = done.output.split("Where its requests went")[1]
    for name, use in lanes.items():
        (row,) = (line.split() for line in table.splitlines() if line.startswith(f" {name} "))
        assert row[1:3] == [str(use["replicas"]), str(use["num_requests"])]
        assert row[4:6] == [str(use["by_text"]["copy"]), str(use["by_text"]["story"])]
    alike = simulate("--slo", SLO, *LOAD, "--replicas", "1")
    assert "Where its requests went" not in alike.output


def test_a_profile_that_fits_badly_is_said_to(simulate: Any, tmp_path: Path) -> None:
    given = profile()
    lane = given.lanes[0]
    bad = structs.replace(lane, residuals=replace(lane.residuals, median_share=0.8))
    assert "calibrate again" not in simulate("--slo", SLO, "--replicas", "batched=1", *LOAD).output
    save(structs.replace(given, lanes=(bad, *given.lanes[1:])), tmp_path / "profile.json")
    assert "calibrate again" in simulate("--slo", SLO, "--replicas", "batched=1", *LOAD).output


def test_one_simulation_is_one(simulate: Any) -> None:
    assert (
        "; 1 simulation of " in simulate("--slo", SLO, *LOAD, "--replicas", "4", "--lanes", "batched").output
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_full_disk_behind_the_output_is_no_traceback(more: tuple[str, ...], tmp_path: Path) -> None:
    save(profile(), tmp_path / "profile.json")
    where = ("--profile", str(tmp_path / "profile.json"), "--runs-dir", str(tmp_path / "runs"))
    arguments = (*where, "--slo", SLO, *LOAD, "--replicas", "4", "--lanes", "batched", *more)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "loadtest.simulate", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            # Unbuffered, nothing is left to fail once more at the end.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
    assert done.returncode == 1, done.stderr
    assert "Error: what is printed cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr.replace("ClickException", "")


@pytest.mark.parametrize("option", ["--profile", "--trace"])
def test_a_pipe_is_refused_and_not_waited_for(option: str, simulate: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    load = LOAD if option == "--profile" else ()
    done = simulate("--slo", SLO, *load, option, str(tmp_path / "pipe"))
    assert done.exit_code == 2
    assert f"{tmp_path}/pipe: cannot be read: a directory, a pipe or a device" in done.output.replace(
        "\n", ""
    )


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
        (("--slo", "icl<1s", *LOAD), "slo 'icl<1s': a simulation has no chunks"),
        (("--slo", SLO, "--load", "8"), "have no arrivals of their own"),
        (("--slo", SLO, "--trace", "none.csv"), "none.csv: cannot be read"),
        (("--slo", SLO, *LOAD, "--speed", "2"), "--speed is for --trace"),
        (("--slo", SLO, *LOAD, "--replicas", "0"), "'0' must be a whole number in 1..1000"),
        (
            ("--slo", SLO, *LOAD, "--replicas", "batched=1+table=1"),
            "'table=1' is no lane of the profile and a number; there are batched, speculative, "
            "speculative/by-batch, such as batched=2 (of --config only the scheduler is read); "
            "speculative/by-batch is speculative with the number of drafts that is best for each number",
        ),
        (("--slo", SLO, *LOAD, "--replicas", "batched"), "'batched' is no lane of the profile and a number"),
        (("--slo", SLO, *LOAD, "--spread", "nan"), "'--spread': nan is no number"),
        (("--slo", SLO, "--trace", "any.csv", "--speed", "nan"), "'--speed': nan is no number"),
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
