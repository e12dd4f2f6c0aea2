"""Steps of the real engine: every token of an answer, and drafts as vLLM counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.metrics import names
from serving.tracing.events import Phase, StepEvent
from serving.tracing.trace_file import Trace, read_trace
from tests.e2e.test_real_engines import vllm_counter
from tests.running_lab import RunningLab
from tests.unit.tracing.chrome_rules import check_events

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
LANES = ("sequential", "batched", "speculative")
OUTPUT_TOKENS = 24
BODY: dict[str, Any] = {
    "prompt": "Count: 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
    "max_tokens": OUTPUT_TOKENS,
    "min_tokens": OUTPUT_TOKENS,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def recorded(lab: RunningLab, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Path, list[float]]:
    """A trace of one request on each lane, with the tokens; and vLLM's drafted and accepted tokens meanwhile."""

    def counted() -> list[float]:
        return [
            vllm_counter(lab, "speculative", name)
            for name in (names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_TOKENS)
        ]

    before = counted()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    command = [sys.executable, "-m", "serving", "trace", "--seconds", "30", "--token-ids", "--out", str(path)]
    with subprocess.Popen(
        command, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as recording:
        assert recording.stderr is not None
        assert any("s to go" in line for line in recording.stderr), "it says that it records"
        for lane in LANES:
            answer = lab.post(
                "/v1/completions", BODY | {"model": f"{lab.model}:{lane}"}, headers={"x-request-id": lane}
            )
            assert answer.status_code == 200, answer.text
        _, stderr = recording.communicate()
    assert recording.returncode == 0, stderr
    rows = path.with_name("trace.steps.jsonl")
    return read_trace(rows), path, [now - then for now, then in zip(counted(), before, strict=True)]


def of_lane(trace: Trace, lane: str) -> list[StepEvent]:
    (span,) = [span for span in trace.spans if span.client_request_id == lane]
    found = [event for event in trace.steps if span.request_id in event.request_id]
    assert {event.replica_id for event in found} == {span.attempts[-1].replica_id}
    return found


@pytest.mark.parametrize("lane", LANES)
def test_the_steps_hold_the_prompt_and_every_token(
    recorded: tuple[Trace, Path, list[float]], lane: str
) -> None:
    steps = of_lane(recorded[0], lane)
    (span,) = [span for span in recorded[0].spans if span.client_request_id == lane]
    prefill = [event for event in steps if event.phase is Phase.PREFILL]
    assert sum(event.scheduled_tokens for event in prefill) == span.prompt_tokens
    assert steps[: len(prefill)] == prefill
    assert sum(event.emitted_tokens for event in steps) == OUTPUT_TOKENS == span.output_tokens
    for event in steps:
        assert event.emitted_ids is not None
        assert len(event.emitted_ids) == event.emitted_tokens
        assert event.started_ns < event.ended_ns
        if event.phase is Phase.DECODE:
            assert event.scheduled_tokens == 1 + event.drafted_tokens
    assert span.attempts[-1].granted_ns is not None
    assert span.ended_ns is not None
    assert span.attempts[-1].granted_ns < steps[0].started_ns < steps[-1].ended_ns < span.ended_ns


def test_the_lanes_made_the_same_tokens(recorded: tuple[Trace, Path, list[float]]) -> None:
    made = {
        lane: [token for event in of_lane(recorded[0], lane) for token in event.emitted_ids or ()]
        for lane in LANES
    }
    assert made["sequential"] == made["batched"] == made["speculative"]


def test_drafts_are_those_that_vllm_counts(recorded: tuple[Trace, Path, list[float]]) -> None:
    trace, _, (drafted, accepted) = recorded
    steps = of_lane(trace, "speculative")
    assert sum(event.drafted_tokens for event in steps) == drafted > 0
    assert sum(event.accepted_tokens for event in steps) == accepted > 0
    for event in steps:
        assert event.drafted_ids is not None
        assert event.emitted_ids is not None
        kept = min(event.accepted_tokens, event.emitted_tokens)
        assert event.drafted_ids[:kept] == event.emitted_ids[:kept]
    assert all(not event.drafted_tokens for lane in LANES[:2] for event in of_lane(trace, lane))


def test_the_viewers_file_keeps_the_rules(recorded: tuple[Trace, Path, list[float]]) -> None:
    check_events(json.loads(recorded[1].read_text())["traceEvents"])


def test_the_schedulers_are_those_that_vllm_would_take() -> None:
    # In a process of its own: the import of vLLM warns.
    look = (
        "from serving.engines.steps.vllm_schedulers import NOTING\n"
        "print([(chosen.__name__, noting.__name__, chosen in noting.__bases__)"
        " for chosen, noting in NOTING.items()])"
    )
    said = subprocess.check_output([sys.executable, "-c", look], text=True)
    assert said.splitlines()[-1] == (
        "[('Scheduler', 'NotingScheduler', True), ('AsyncScheduler', 'NotingAsyncScheduler', True)]"
    )
