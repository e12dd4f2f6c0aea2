"""A recording as Chrome's trace format, which https://ui.perfetto.dev opens.

A process per replica, with a track for the engine's steps and a track per request; a process per gateway,
with a track per request. Times are microseconds from the start of the recording; what began before it is cut there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from serving.tracing.events import Attempt, Phase, RequestSpan, StepEvent, TraceHeader
from serving.tracing.trace_file import Trace

STEPS_TID = 1
FIRST_REQUEST_TID = 2
Event = dict[str, Any]


def write_chrome_trace(trace: Trace, path: Path) -> None:
    """Write the JSON of the format, event by event: a long recording has millions."""
    header = trace.header
    other = {
        "tandem_version": header.tandem_version,
        "model": header.model,
        "started_unix_ns": header.started_ns + header.realtime_offset_ns,
        "lost_events": sum(replica.lost_events for replica in header.replicas),
        "spans_complete": header.spans_complete,
    }
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":%b,"traceEvents":[' % encode(other))
        for number, event in enumerate(trace_events(trace)):
            file.write((b",\n" if number else b"\n") + encode(event))
        file.write(b"\n]}\n")


def trace_events(trace: Trace) -> Iterator[Event]:
    """The events, process by process."""
    clock = _Clock(trace.header)
    gateways = trace.header.gateways
    for pid, gateway in enumerate(gateways, start=1):
        yield from _named_process(pid, f"gateway {gateway}")
        spans = [span for span in trace.spans if span.gateway_id == gateway]
        for tid, span in enumerate(spans, start=FIRST_REQUEST_TID):
            yield from _named_track(pid, tid, span.request_id)
            yield from _gateway_slices(pid, tid, span, clock)
    by_replica = defaultdict(list)
    for step in trace.steps:
        by_replica[step.replica_id].append(step)
    for pid, replica in enumerate(trace.header.replicas, start=len(gateways) + 1):
        yield from _named_process(pid, f"{replica.lane}: {replica.replica_id}")
        yield from _named_track(pid, STEPS_TID, "engine steps")
        yield from _replica_slices(pid, by_replica[replica.replica_id], clock)


class _Clock:
    """From CLOCK_MONOTONIC to the trace's own time, within the recording."""

    def __init__(self, header: TraceHeader) -> None:
        self._from_ns, self._to_ns = header.started_ns, header.ended_ns

    def slice(
        self, pid: int, tid: int, name: str, started_ns: int, ended_ns: int | None, **args: Any
    ) -> Iterator[Event]:
        """One complete event, or none if nothing of it is within the recording."""
        start = max(started_ns, self._from_ns)
        end = self._to_ns if ended_ns is None else min(ended_ns, self._to_ns)
        if end >= start:
            yield {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "ts": (start - self._from_ns) / 1000,
                "dur": (end - start) / 1000,
                "args": args,
            }


def _named_process(pid: int, name: str) -> list[Event]:
    return [_meta(pid, 0, "process_name", name=name), _meta(pid, 0, "process_sort_index", sort_index=pid)]


def _named_track(pid: int, tid: int, name: str) -> list[Event]:
    return [_meta(pid, tid, "thread_name", name=name), _meta(pid, tid, "thread_sort_index", sort_index=tid)]


def _meta(pid: int, tid: int, kind: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "dur": 0, "name": kind, "args": args}


def _gateway_slices(pid: int, tid: int, span: RequestSpan, clock: _Clock) -> Iterator[Event]:
    """The request, and within it what it waited for."""
    yield from clock.slice(
        pid,
        tid,
        "request",
        span.arrived_ns,
        span.ended_ns,
        request_id=span.request_id,
        outcome=span.outcome or "running",
        reason=span.reason,
        prompt_tokens=span.prompt_tokens,
        output_tokens=span.output_tokens,
    )
    for attempt in span.attempts:
        is_last = attempt is span.attempts[-1]
        for name, started_ns, ended_ns in _parts(attempt, span.first_token_ns if is_last else None):
            yield from clock.slice(
                pid, tid, name, started_ns, ended_ns, lane=attempt.lane, replica=attempt.replica_id
            )


def _parts(attempt: Attempt, first_token_ns: int | None) -> Iterator[tuple[str, int, int | None]]:
    """Name, start and end of what an attempt went through, one after the other."""
    instants = [
        ("queue", attempt.submitted_ns),
        ("dispatch", attempt.granted_ns),
        ("first token", attempt.first_byte_ns),
        ("stream", first_token_ns),
    ]
    reached = [(name, instant) for name, instant in instants if instant is not None]
    for place, (name, started_ns) in enumerate(reached):
        is_last = place == len(reached) - 1
        yield name, started_ns, attempt.ended_ns if is_last else reached[place + 1][1]


def _replica_slices(pid: int, steps: list[StepEvent], clock: _Clock) -> Iterator[Event]:
    for number, events in groupby(steps, key=attrgetter("step")):
        yield from _step_slice(pid, number, list(events), clock)
    by_request = defaultdict(list)
    for event in steps:
        by_request[event.request_id].append(event)
    for tid, (request_id, own) in enumerate(by_request.items(), start=FIRST_REQUEST_TID):
        yield from _named_track(pid, tid, request_id)
        for phase, run in groupby(own, key=attrgetter("phase")):
            yield from _phase_slices(pid, tid, phase, list(run), clock)


def _step_slice(pid: int, number: int, events: list[StepEvent], clock: _Clock) -> Iterator[Event]:
    first = events[0]
    yield from clock.slice(
        pid,
        STEPS_TID,
        f"step of {len(events)}",
        first.started_ns,
        first.ended_ns,
        step=number,
        requests=len(events),
        prefilling=sum(event.phase is Phase.PREFILL for event in events),
        **_tokens(events),
    )


def _phase_slices(
    pid: int, tid: int, phase: Phase, events: list[StepEvent], clock: _Clock
) -> Iterator[Event]:
    """A phase of a request, and its steps within it."""
    yield from clock.slice(
        pid, tid, phase, events[0].started_ns, events[-1].ended_ns, steps=len(events), **_tokens(events)
    )
    for event in events:
        yield from clock.slice(
            pid, tid, _step_name(event), event.started_ns, event.ended_ns, step=event.step, **_tokens([event])
        )


def _step_name(event: StepEvent) -> str:
    if event.phase is Phase.PREFILL:
        return f"{event.scheduled_tokens} of the prompt"
    if event.drafted_tokens:
        return f"+{event.emitted_tokens}, {event.accepted_tokens} of {event.drafted_tokens} drafts"
    return f"+{event.emitted_tokens}"


def _tokens(events: Iterable[StepEvent]) -> dict[str, int]:
    rows = list(events)
    return {
        name: sum(getattr(row, name) for row in rows)
        for name in ("scheduled_tokens", "drafted_tokens", "accepted_tokens", "emitted_tokens")
    }
