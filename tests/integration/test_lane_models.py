"""A lane of another model in a lab of simulated engines: who gets which requests, and what a run says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.running_lab import RunningLab, tandem

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BUSY_MACHINE = 5


@pytest.mark.parametrize(
    ("model", "lane"), [("sim", "batched"), ("other", "tuned"), ("other:tuned", "tuned")]
)
def test_a_model_s_requests_go_to_its_lanes(model: str, lane: str, lab: RunningLab) -> None:
    for _ in range(8):
        raw = lab.client().chat.completions.with_raw_response.create(
            model=model, messages=HELLO, max_tokens=1
        )
        assert raw.headers["x-tandem-lane"] == lane
        assert raw.parse().model == model.partition(":")[0]


@pytest.mark.parametrize("model", ["sim:tuned", "other:batched"])
def test_a_lane_is_not_served_under_the_name_of_another_model(model: str, lab: RunningLab) -> None:
    answer = lab.post("/v1/chat/completions", {"model": model, "messages": HELLO})
    assert answer.status_code == 404
    assert "served: sim, other, sim:sequential" in answer.json()["error"]["message"]


def test_a_run_asks_each_lane_by_its_own_name_and_compares_no_tokens(lab: RunningLab, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    done = tandem(
        *("bench", "--base-url", lab.url, "--lanes", "batched,tuned", "--workloads", "chat"),
        *("--concurrency", "1", "--repeats", "1", "--output-tokens", "8", "--out", str(directory)),
        environment=lab.environment,
    )
    assert done.returncode in (0, BUSY_MACHINE), done.stderr
    summary = json.loads((directory / "summary.json").read_text())
    assert {stage["lane"]: stage["failures"] for stage in summary["stages"]} == {"batched": 0, "tuned": 0}
    assert [lane["model"]["name"] for lane in summary["lanes"]] == ["sim", "other"]
    report = (directory / "report.html").read_text()
    assert "Lanes of one tokenizer: batched (sim); tuned (other)." in report
