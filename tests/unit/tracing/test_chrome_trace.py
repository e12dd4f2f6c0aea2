"""A recording as a viewer sees it: whole, nested, within the recording."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tracing.chrome_trace import trace_events, write_chrome_trace
from serving.tracing.events import Attempt, Phase, RequestSpan, StepEvent, TracedReplica, TraceHeader
from serving.tracing.trace_file import Trace
from tests.unit.tracing.chrome_rules import check_events

REPLICA = TracedReplica("b-1", "batched", "batched", "vllm", 4, 0)
HEADER = TraceHeader("0.1", "sim", 1_000, 101_000, 5, (REPLICA,), ("g",), True)
ATTEMPT = Attempt("a-1", 2_000, 5_000, 6_000, 90_000, "batched", "b-1")
SPAN = RequestSpan("g", "a-1", "a", 1_500, (ATTEMPT,), 20_000, 91_000, "completed", "", 9, 3)
STEPS = [
    StepEvent("b-1", 1, 7_000, 12_000, "x-a-1", Phase.PREFILL, 8, 0, 0, 0),
    StepEvent("b-1", 2, 12_000, 20_000, "x-a-1", Phase.PREFILL, 1, 0, 0, 1),
    StepEvent("b-1", 3, 21_000, 30_000, "x-a-1", Phase.DECODE, 5, 4, 1, 2),
    StepEvent("b-1", 3, 21_000, 30_000, "x-b-1", Phase.PREFILL, 5, 0, 0, 1),
]
TRACE = Trace(HEADER, [SPAN], STEPS)


def slices(trace: Trace, pid: int) -> list[tuple[str, float, float]]:
    return [
        (event["name"], event["ts"], event["ts"] + event["dur"])
        for event in trace_events(trace)
        if event["ph"] == "X" and event["pid"] == pid
    ]


def test_a_request_waits_is_dispatched_and_streams() -> None:
    assert slices(TRACE, pid=1) == [
        ("request", 0.5, 90),
        ("queue", 1, 4),
        ("dispatch", 4, 5),
        ("first token", 5, 19),
        ("stream", 19, 89),
    ]


def test_steps_have_a_track_and_so_has_each_request() -> None:
    assert slices(TRACE, pid=2) == [
        ("step of 1", 6, 11),
        ("step of 1", 11, 19),
        ("step of 2", 20, 29),
        ("prefill", 6, 19),
        ("8 of the prompt", 6, 11),
        ("1 of the prompt", 11, 19),
        ("decode", 20, 29),
        ("+2, 1 of 4 drafts", 20, 29),
        ("prefill", 20, 29),
        ("5 of the prompt", 20, 29),
    ]


def test_what_reaches_out_of_the_recording_is_cut_and_what_lies_outside_left_out() -> None:
    early = replace(SPAN, arrived_ns=10, attempts=(replace(ATTEMPT, submitted_ns=20, granted_ns=30),))
    running = replace(
        SPAN, ended_ns=None, outcome=None, attempts=(replace(ATTEMPT, ended_ns=None),), first_token_ns=None
    )
    found = slices(Trace(HEADER, [early, running], []), pid=1)
    assert found[:3] == [("request", 0, 90), ("dispatch", 0, 5), ("first token", 5, 19)]
    assert found[4:] == [("request", 0.5, 100), ("queue", 1, 4), ("dispatch", 4, 5), ("first token", 5, 100)]


def test_a_rerouted_request_has_both_attempts_one_after_the_other() -> None:
    first = replace(ATTEMPT, first_byte_ns=None, ended_ns=6_000)
    second = replace(
        ATTEMPT, request_id="a-1-again", submitted_ns=7_000, granted_ns=8_000, first_byte_ns=9_000
    )
    trace = Trace(HEADER, [replace(SPAN, attempts=(first, second))], [])
    check_events(trace_events(trace))
    assert [name for name, _, _ in slices(trace, pid=1)] == [
        "request", "queue", "dispatch", "queue", "dispatch", "first token", "stream",
    ]  # fmt: skip


def test_a_refused_request_only_waited() -> None:
    waited = replace(ATTEMPT, granted_ns=None, first_byte_ns=None)
    refused = replace(SPAN, attempts=(waited,), first_token_ns=None, outcome="rejected")
    assert slices(Trace(HEADER, [refused], []), pid=1) == [("request", 0.5, 90), ("queue", 1, 89)]


def test_the_file_is_json_that_keeps_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_chrome_trace(TRACE, path)
    read = json.loads(path.read_text())
    assert read["traceEvents"] == json.loads(json.dumps(list(trace_events(TRACE))))
    assert read["otherData"]["started_unix_ns"] == 1_005
    check_events(read["traceEvents"])
    write_chrome_trace(Trace(replace(HEADER, gateways=(), replicas=()), [], []), path)
    assert json.loads(path.read_text())["traceEvents"] == []


@st.composite
def steps_of_an_engine(draw: st.DrawFn) -> list[StepEvent]:
    """Steps that follow one another, each with some of four requests, any phase."""
    found, at_ns = [], draw(st.integers(0, 50_000))
    for number in range(draw(st.integers(0, 12))):
        at_ns += draw(st.integers(0, 10_000))
        ended_ns = at_ns + draw(st.integers(0, 20_000))
        for name in draw(st.sets(st.sampled_from("abcd"), min_size=1)):
            phase = draw(st.sampled_from(Phase))
            found.append(StepEvent("b-1", number, at_ns, ended_ns, name, phase, 1, 0, 0, 1))
        at_ns = ended_ns
    return found


@given(steps_of_an_engine())
def test_whatever_an_engine_does_its_tracks_are_nested(steps: list[StepEvent]) -> None:
    check_events(trace_events(Trace(HEADER, [], steps)))


GOOD: dict[str, Any] = {"ph": "X", "pid": 1, "tid": 2, "name": "n", "ts": 5, "dur": 10}
NAME = {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "ts": 0, "dur": 0}


@pytest.mark.parametrize(
    "bad",
    [
        GOOD | {"ts": 10, "dur": 10},  # overlaps, is not nested
        GOOD | {"dur": -1},
        GOOD | {"ts": float("nan")},
        GOOD | {"tid": 3},  # no name
        {key: value for key, value in GOOD.items() if key != "dur"},
    ],
)
def test_the_rules_can_be_broken(bad: dict[str, Any]) -> None:
    check_events([NAME, GOOD])
    with pytest.raises(AssertionError):
        check_events([NAME, GOOD, bad])
