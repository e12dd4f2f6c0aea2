"""`tandem trace` on a running lab: requests and steps of a known load, whole and in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, pairwise
from pathlib import Path

import httpx
import pytest

from serving.tracing.events import Phase
from serving.tracing.trace_file import read_trace
from tests.running_lab import RunningLab, tandem
from tests.unit.tracing.chrome_rules import check_events

LANES = ("sequential", "batched", "speculative")
NAMES = [f"{lane}-{number}" for lane in LANES for number in range(3)]
OUTPUT_TOKENS = 40


def ask(lab: RunningLab, lane: str, name: str) -> None:
    body = {
        "model": f"{lab.model}:{lane}",
        "prompt": "one two three",
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
    }
    answer = lab.post("/v1/completions", body, headers={"x-request-id": name})
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def recorded(lab: RunningLab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of three requests on each lane; they are sent once `tandem trace` says that it records."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    command = [sys.executable, "-m", "serving", "trace", "--seconds", "10", "--out", str(path)]
    with subprocess.Popen(
        command, env=lab.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as recording:
        assert recording.stderr is not None
        assert any("s to go" in line for line in recording.stderr), "it says that it records"
        with ThreadPoolExecutor() as clients:
            asked = [clients.submit(ask, lab, name.split("-")[0], name) for name in NAMES]
        for one in asked:
            one.result()
        stdout, stderr = recording.communicate()
    assert recording.returncode == 0, stderr
    assert stdout.strip() == str(path)
    return path


def test_the_viewers_file_keeps_the_rules(recorded: Path) -> None:
    trace = json.loads(recorded.read_text())
    check_events(trace["traceEvents"])
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert len(names) == 6, "a gateway, and five replicas"
    assert {name.split(":")[0] for name in names if not name.startswith("gateway ")} == {*LANES, "tuned"}


def test_each_request_is_followed_from_gateway_to_engine(recorded: Path) -> None:
    trace = read_trace(recorded.with_name("trace.steps.jsonl"))
    assert sorted(span.client_request_id for span in trace.spans) == sorted(NAMES)
    arrivals = [span.arrived_ns for span in trace.spans]
    assert arrivals == sorted(arrivals)
    steps = defaultdict(list)
    for event in trace.steps:
        steps[event.request_id].append(event)
    for span in trace.spans:
        (attempt,) = span.attempts
        own = steps.pop(attempt.request_id)
        assert (span.outcome, span.output_tokens) == ("completed", OUTPUT_TOKENS)
        assert {event.replica_id for event in own} == {attempt.replica_id}
        assert sum(event.emitted_tokens for event in own) == OUTPUT_TOKENS
        assert (
            sum(event.scheduled_tokens for event in own if event.phase is Phase.PREFILL) == span.prompt_tokens
        )
        # The gateway's instants and the engine's are of one clock.
        assert attempt.granted_ns is not None
        assert attempt.granted_ns < own[0].started_ns < own[-1].ended_ns
        assert span.ended_ns is not None
        assert own[-1].ended_ns < span.ended_ns
    assert not steps, "no request that the gateway knows nothing of"


def test_only_the_speculative_lane_drafts_and_steps_do_not_overlap(recorded: Path) -> None:
    trace = read_trace(recorded.with_name("trace.steps.jsonl"))
    drafted = {event.replica_id.split("-")[0] for event in trace.steps if event.drafted_tokens}
    assert drafted == {"speculative"}
    assert all(replica.lost_events == 0 for replica in trace.header.replicas)
    for _, own in groupby(trace.steps, key=lambda event: event.replica_id):
        instants = sorted({(event.started_ns, event.ended_ns) for event in own})
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(instants))


def test_a_second_recording_is_refused_and_the_first_goes_on(lab: RunningLab, tmp_path: Path) -> None:
    (replica,) = lab.replicas("sequential")
    first = httpx.post(f"{replica['url']}/tandem/trace/start?seconds=60").json()["recording"]
    out = tmp_path / "trace.json"
    refused = tandem("trace", "--seconds", "1", "--out", str(out), environment=lab.environment)
    assert refused.returncode == 1
    assert f"recording {first} of replica {replica['replica']} is not over" in refused.stderr
    assert not list(tmp_path.iterdir())
    for one in lab.replicas("batched"):
        started = httpx.post(f"{one['url']}/tandem/trace/start?seconds=1")
        assert started.status_code == 200, "what was started before the refusal is over"
        httpx.post(f"{one['url']}/tandem/trace/stop?recording={started.json()['recording']}")
    assert httpx.post(f"{replica['url']}/tandem/trace/stop?recording={first}").status_code == 200


def test_recordings_cannot_be_reached_through_the_labs_port(lab: RunningLab) -> None:
    for path in ("/tandem/trace/start?seconds=1", "/tandem/trace/stop?recording=1", "/tandem/spans"):
        assert lab.post(path, {}).status_code == 404
    assert lab.get("/scheduler")["leases"] == 0


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_recorded(lab: RunningLab) -> None:
    answer = tandem("trace", "--out", "/nowhere/trace.json", environment=lab.environment)
    assert answer.returncode == 2
    assert "--out" in answer.stderr
    assert "/nowhere" in answer.stderr
