"""`status`: its exit codes, its tables, and JSON that is alone on stdout."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

import pytest
from rich.console import Console

from serving.cli import show
from serving.core.choice import Choice, LaneScore, Why
from serving.core.exit_codes import ExitCode
from serving.core.speculation.text_kind import TextKind
from serving.lab import control
from serving.lab.state import LabPhase
from tests.unit.cli.verb_runs import run, write_state


def test_status_without_a_lab_is_3() -> None:
    result = run("status", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {"state": "not_running", "scheduler": None}
    assert "no lab is running" in run("status").stdout


def test_status_of_a_dead_supervisor_is_3_and_says_what_to_do() -> None:
    write_state(alive=False)
    result = run("status")
    assert result.exit_code == 3
    assert "`tandem down` cleans up" in result.stdout


def test_status_while_starting_is_1_with_the_progress() -> None:
    write_state(LabPhase.STARTING)
    result = run("status", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["state"], found["progress"]) == ("starting", "batched: starting engine")


def group(band: str, tenant: str, requests: int, tokens: int) -> dict[str, Any]:
    return {"band": band, "tenant": tenant, "requests": requests, "tokens": tokens}


def replicas(*breakers: str) -> list[dict[str, Any]]:
    return [
        {
            "replica": f"a-{number}",
            "ready": True,
            "breaker": breaker,
            "running": 3,
            "max_running": 16,
            "outstanding_tokens": 99,
        }
        for number, breaker in enumerate(breakers, start=1)
    ]


SCHEDULER: dict[str, Any] = {
    "lanes": [
        {
            "lane": "a",
            "strategy": "batched",
            "waiting": [group("normal", "acme", 7, 900)],
            "replicas": replicas("closed", "open"),
        }
    ],
    "order": "priority",
    "placement": "least_outstanding",
    "gateways": ["g1", "g2"],
    "leases": 3,
    "waiting": 9,
    "waiting_any": [group("high", "zoo", 2, 64)],
    "draining": False,
    "waiting_by_band": {"high": 2, "normal": 7},
    "waiting_by_tenant": {"acme": 7, "zoo": 2},
    "refusals": {"queue_full": 2},
    "leaving_replicas": ["a-0"],
    "last_refusals": [{"seconds_ago": 4.2, "reason": "queue_full", "tenant": "acme", "lane": None}],
}


def answer(monkeypatch: pytest.MonkeyPatch, scheduler: dict[str, Any]) -> None:
    """The gateway is well and says this of the scheduler."""
    answers = {"/health": b"", "/scheduler": json.dumps(scheduler).encode()}
    monkeypatch.setattr(control, "reader", lambda base_url: lambda url: answers[url.removeprefix(base_url)])


def test_status_when_ready_is_0_and_shows_lanes_replicas_and_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_state()
    answer(monkeypatch, SCHEDULER)
    result = run("status")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["a", "batched", "7", "a-1", "yes", "3", "of", "16", "99"] in rows
    assert ["a", "batched", "7", "a-2", "breaker", "open", "3", "of", "16", "99"] in rows
    waiting = rows.index(["waiting", "for", "band", "tenant", "requests", "tokens"])
    assert rows[waiting + 1 : waiting + 3] == [
        ["a", "normal", "acme", "7", "900"],
        ["any", "lane", "high", "zoo", "2", "64"],
    ]
    for line in (
        "order priority, placement least_outstanding, 2 gateway(s), 3 running, 9 waiting",
        "waiting by band: high 2, normal 7",
        "refused so far: queue_full 2",
        "leaving: a-0 until its streams end",
        "4 s ago: queue_full, tenant acme, any lane",
    ):
        assert line in result.stdout
    assert json.loads(run("status", "--json").stdout)["scheduler"] == SCHEDULER


def test_choices_between_lanes_are_shown_with_what_they_were_made_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores = (
        LaneScore("drafts", "d-1", 48.75, 90.0, 2.0, 51.0, 3, 1.76, 1, 0.9),
        LaneScore("plain", "p-1", 45.5, 45.5, 1.0, 50.0, 0, 1.0, 2, 1.0),
    )
    choice = Choice("drafts", TextKind.COPY, Why.SCORE, scores)
    count = {"lane": "drafts", "kind": "copy", "why": "score", "requests": 7}
    show.show_scheduler(SCHEDULER | {"adaptive": {"choices": [count], "last_choices": [asdict(choice)]}})
    shown = capsys.readouterr().out
    for line in (
        "chosen so far: drafts for copy (score) 7",
        "for why lane gains k tok/step batch ctx turns x prof",
        "copy score drafts < 48.8 3 1.76 2.0 51 1 0.90",
        "plain 45.5 0 1.00 1.0 50 2 1.00",
    ):
        assert " ".join(line.split()) in " ".join(shown.split())


def test_who_waits_is_cut_to_what_a_glance_takes_in() -> None:
    groups = [group("normal", f"t{number}", number, 1) for number in range(1, 21)]
    console = Console(file=io.StringIO(), width=80)
    console.print(show.waiting_table({"lanes": [], "waiting_any": groups}))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert rows[1] == ["any", "lane", "normal", "t20", "20", "1"]
    assert rows[-1] == ["8", "more", str(sum(range(1, 9)))]


@pytest.mark.parametrize(
    ("breakers", "fault"),
    [
        ((), "lane a: no ready replica"),
        (("open",), "lane a: the breakers of all 1 replica(s) are open"),
        (("open", "open"), "lane a: the breakers of all 2 replica(s) are open"),
        (("open", "closed"), None),
        (("open", "half_open"), None),
    ],
)
def test_a_lane_that_serves_nothing_now_is_degraded_and_1(
    breakers: tuple[str, ...], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state()
    lane = {"lane": "a", "strategy": "batched", "waiting": [], "replicas": replicas(*breakers)}
    answer(monkeypatch, {**SCHEDULER, "lanes": [lane]})
    result = run("status", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == (ExitCode.FAILED if fault else ExitCode.OK)
    assert found["state"] == ("degraded" if fault else "ready")
    shown = run("status").stdout.splitlines()
    assert shown[0].startswith(found["state"])
    assert (shown[1] == fault) == bool(fault)
    rows = [line.split() for line in shown]
    first_row = (
        ["a", "batched", "0", "a-1", "breaker", "open"] if breakers else ["a", "batched", "0", "-", "no"]
    )
    assert first_row in [row[: len(first_row)] for row in rows]


def test_the_lane_table_fits_a_terminal_of_80_columns() -> None:
    replica = {
        "replica": "speculative-0a1b2c3d",
        "ready": True,
        "breaker": "closed",
        "running": 16,
        "max_running": 16,
        "outstanding_tokens": 123456,
    }
    lane = {"lane": "speculative", "strategy": "speculative", "waiting": [], "replicas": [replica]}
    console = Console(file=io.StringIO(), width=80)
    console.print(show.lane_table({"lanes": [lane]}))
    assert isinstance(console.file, io.StringIO)
    assert "speculative-0a1b2c3d  yes" in console.file.getvalue()
