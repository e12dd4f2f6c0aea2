"""What the engines did in each stage of `tandem bench --trace`: recorded meanwhile, written once it has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadtest.client import lab
from loadtest.client.lane_models import lanes_of_own_model
from loadtest.run.directory import STEP_TRACES_DIR, StageTrace
from loadtest.run.plan import STEP_TRACE_MARGIN_S, StagePlan
from loadtest.run.sender import slug
from serving.core.lane import ANY_LANE
from serving.tracing.chrome_trace import write_chrome_trace
from serving.tracing.recording import Fetched, RecordingError, StepRecording, fetch_trace, recording
from serving.tracing.trace_file import write_trace

MAX_EVENTS = 50_000  # of one stage, all replicas of its lane together


@dataclass(slots=True)
class TracedStage:
    """A stage that is being recorded; `trace` is there when it has ended."""

    trace: StageTrace | None = None


@contextmanager
def tracing_steps(stage: StagePlan, base_url: str, directory: Path) -> Iterator[TracedStage]:
    """Record the stage's lane during the block, and write what was recorded into the run's directory.

    A stage runs all the same when its lane cannot be recorded: its trace says why.
    """
    traced = TracedStage()
    with ExitStack() as stack:
        try:
            description = lab.describe_lab(base_url)
            lanes = lanes_of_own_model(description["config"]) if stage.lane == ANY_LANE else {stage.lane}
            urls = [replica["url"] for replica in description["replicas"] if replica["lane"] in lanes]
            most = MAX_EVENTS // max(1, len(urls))
            started = stack.enter_context(
                recording(urls, limit_s=stage.max_stage_s + STEP_TRACE_MARGIN_S, max_events=most)
            )
        except (lab.LabError, RecordingError) as error:
            yield traced
            traced.trace = StageTrace(None, (str(error),))
            return
        started_ns = time.monotonic_ns()
        yield traced
        traced.trace = _write(stage, base_url, description["model"]["name"], started, started_ns, directory)


def _write(
    stage: StagePlan,
    base_url: str,
    model: str,
    started: list[StepRecording],
    started_ns: int,
    directory: Path,
) -> StageTrace:
    ended_ns = time.monotonic_ns()
    faults: list[str] = []
    try:
        gateways = [address for address, labels in lab.targets(base_url) if labels.get("role") == "gateway"]
    except lab.LabError as error:
        gateways = []
        faults.append(f"no request is in the trace: {error}")
    fetched = fetch_trace(started, gateways, model=model, started_ns=started_ns, ended_ns=ended_ns)
    faults = [*_missing_steps(fetched), *faults, *fetched.missing_spans]
    if not fetched.trace.header.spans_complete:
        faults.append("a gateway had more requests than it remembers: the first ones are missing")
    path = directory / STEP_TRACES_DIR / f"{slug(stage.key)}.jsonl"
    shown = path.with_suffix(".json")
    try:
        path.parent.mkdir(exist_ok=True)
        write_trace(fetched.trace, path)
        write_chrome_trace(fetched.trace, shown)
    except OSError as error:
        shown.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        return StageTrace(None, (*faults, f"{path}: cannot be written: {error.strerror}"))
    return StageTrace(path.name, tuple(faults))


def _missing_steps(fetched: Fetched) -> Iterator[str]:
    yield from map(str, fetched.missing_steps)
    for replica in fetched.trace.header.replicas:
        if replica.lost_events:
            yield (
                f"replica {replica.replica_id}: the trace ends with its first {replica.events} step events, "
                f"{replica.lost_events} more did not fit ({MAX_EVENTS} of a stage)"
            )
