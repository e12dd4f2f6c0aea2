"""What the engines did in each stage of `tandem bench --trace`: recorded meanwhile, written once it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loadtest.client import lab
from loadtest.client.step_recording import RecordingError, StepRecording, recording
from loadtest.run.directory import TRACES_DIR, StageTrace
from loadtest.run.plan import TRACE_MARGIN_S, StagePlan
from loadtest.run.sender import slug
from serving import __version__
from serving.core.http_get import GetError, get
from serving.tracing.chrome_trace import write_chrome_trace
from serving.tracing.events import GatewaySpans, StepEvent, TracedReplica, TraceHeader
from serving.tracing.trace_file import Trace, write_trace

MAX_EVENTS = 50_000  # of one stage, all replicas of its lane together


@dataclass(slots=True)
class TracedStage:
    """A stage that is being recorded; `trace` is there when it has ended."""

    trace: StageTrace | None = None


@contextmanager
def tracing(stage: StagePlan, base_url: str, directory: Path) -> Iterator[TracedStage]:
    """Record the stage's lane during the block, and write what was recorded into the run's directory.

    A stage runs all the same when its lane cannot be recorded: its trace says why.
    """
    traced = TracedStage()
    with ExitStack() as stack:
        try:
            description = lab.describe_lab(base_url)
            urls = [one["url"] for one in description["replicas"] if one["lane"] == stage.lane]
            most = MAX_EVENTS // max(1, len(urls))
            started = stack.enter_context(
                recording(urls, limit_s=stage.max_stage_s + TRACE_MARGIN_S, max_events=most)
            )
        except (lab.LabError, RecordingError) as error:
            yield traced
            traced.trace = StageTrace(None, (str(error),))
            return
        started_ns = time.monotonic_ns()
        yield traced
        traced.trace = _write(stage, base_url, description, started, started_ns, directory)


def _write(
    stage: StagePlan,
    base_url: str,
    description: dict[str, Any],
    started: list[StepRecording],
    started_ns: int,
    directory: Path,
) -> StageTrace:
    ended_ns, faults = time.monotonic_ns(), []
    replicas: list[TracedReplica] = []
    steps: list[StepEvent] = []
    for one in started:
        try:
            replica, events = one.fetch()
        except RecordingError as error:
            faults.append(str(error))
            continue
        replicas.append(replica)
        steps += events
        if replica.lost_events:
            faults.append(
                f"replica {replica.replica_id}: the trace ends with its first {replica.events} step events, "
                f"{replica.lost_events} more did not fit ({MAX_EVENTS} of a stage)"
            )
    gateways = list(_fetch_spans(base_url, started_ns, faults))
    spans = sorted((span for one in gateways for span in one.spans), key=lambda span: span.arrived_ns)
    if not all(one.is_complete for one in gateways):
        faults.append("a gateway had more requests than it remembers: the first ones are missing")
    header = TraceHeader(
        tandem_version=__version__,
        model=description["model"]["name"],
        started_ns=started_ns,
        ended_ns=ended_ns,
        realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
        replicas=tuple(replicas),
        gateways=tuple(one.gateway_id for one in gateways),
        spans_complete=all(one.is_complete for one in gateways),
    )
    trace = Trace(header, spans, steps)
    path = directory / TRACES_DIR / f"{slug(stage.key)}.jsonl"
    shown = path.with_suffix(".json")
    try:
        path.parent.mkdir(exist_ok=True)
        write_trace(trace, path)
        write_chrome_trace(trace, shown)
    except OSError as error:
        shown.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return StageTrace(None, (*faults, f"{path}: cannot be written: {error.strerror}"))
    return StageTrace(path.name, tuple(faults))


def _fetch_spans(base_url: str, since_ns: int, faults: list[str]) -> Iterator[GatewaySpans]:
    """Requests of every gateway since then."""
    try:
        targets = lab.targets(base_url)
    except lab.LabError as error:
        faults.append(f"no request is in the trace: {error}")
        return
    for address, labels in targets:
        if labels.get("role") == "gateway":
            try:
                answer = get(f"http://{address}/tandem/spans?since_ns={since_ns}")
                yield msgspec.json.decode(answer, type=GatewaySpans)
            except (GetError, msgspec.DecodeError) as error:
                faults.append(f"gateway at {address}: its requests are missing: {error}")
