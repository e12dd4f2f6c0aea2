"""From records and scrapes to `summary.json`: the only place where the load lab computes a figure.

Latencies are defined in `serving.core.latency`, acceptance in `serving.core.speculation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loadtest.crossover import Crossover, find_crossovers
from loadtest.lab import Scrape
from loadtest.load import ClosedLoop
from loadtest.record import RequestRecord, read_records
from loadtest.rundir import REQUESTS_FILE, RunFile, RunInfo, StageRun, read_run
from serving.core.latency import e2e_latency_s, inter_chunk_latencies_s, percentile, tpot_s, ttft_s
from serving.core.speculation import SpeculationCounts, acceptance_rate, mean_acceptance_length


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Median and 95th percentile; None when there is nothing to take them of."""

    p50: float | None
    p95: float | None


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A stage in figures. Latencies are in seconds and of completed requests only.

    Attributes:
        requests: records of the stage, warm-up left out; failures are among them.
        planned_requests: what the plan asked for; more than `requests` when the stage was cut.
        failures: records that did not complete, whatever the reason.
        output_tokens_per_s: output tokens of completed requests / (last finish - first schedule).
        tokens_per_chunk: output tokens / chunks with text.
        memory_bytes: of the lane's replicas, the larger of before and after.
        wrong_lengths: completed answers that are not as long as was asked.
        notes: what a reader must know to trust the row.
    """

    lane: str
    workload: str
    concurrency: int
    requests: int
    planned_requests: int
    failures: int
    output_tokens_per_s: float | None
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    inter_chunk_s: Percentiles
    tokens_per_chunk: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    memory_bytes: float | None
    wrong_lengths: int
    cut: bool
    duration_s: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaneSummary:
    """A lane over the whole run; memory is the largest value seen, None when no replica told."""

    lane: str
    strategy: str
    engine: str
    replicas: int
    memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class FailureCount:
    """How often a reason ended a request of a lane; warm-up included, for it can fail too."""

    lane: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures: what `summary.json` holds."""

    run: RunInfo
    stages: tuple[StageSummary, ...]
    lanes: tuple[LaneSummary, ...]
    crossovers: tuple[Crossover, ...]
    failures: tuple[FailureCount, ...]

    @property
    def requests(self) -> int:
        return sum(stage.requests for stage in self.stages)

    @property
    def num_failures(self) -> int:
        return sum(stage.failures for stage in self.stages)


_ADAPTER = TypeAdapter(Summary)


def summary_json(summary: Summary) -> str:
    return _ADAPTER.dump_json(summary, indent=1).decode() + "\n"


def summarize_dir(directory: Path) -> Summary:
    """The summary of a run on disk.

    Raises:
        ValueError: a file of the run is missing or damaged; the text names it.
    """
    path = directory / REQUESTS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: is missing; is this the directory of a run?")
    return summarize(read_run(directory), list(read_records(path)))


def summarize(run: RunFile, records: Sequence[RequestRecord]) -> Summary:
    """The summary of a run and its records, in any order."""
    by_stage: dict[str, list[RequestRecord]] = {stage.plan.key: [] for stage in run.stages}
    for record in records:
        label = record.label
        if not label.is_warmup:
            by_stage[label.stage].append(record)
    stages = tuple(
        summarize_stage(stage, by_stage[stage.plan.key], run.run.output_tokens) for stage in run.stages
    )
    lanes = _lanes(run)
    strategies = {lane.lane: lane.strategy for lane in lanes}
    return Summary(
        run=run.run,
        stages=stages,
        lanes=lanes,
        crossovers=find_crossovers(stages, strategies),
        failures=_failures(records),
    )


def summarize_stage(stage: StageRun, records: Sequence[RequestRecord], output_tokens: int) -> StageSummary:
    """One stage in figures.

    Args:
        records: those of the stage, warm-up left out.
        output_tokens: the length that was asked of every answer.
    """
    completed = [record for record in records if record.is_completed]
    timelines = [record.timeline for record in completed]
    tokens = sum(record.output_tokens or 0 for record in completed)
    chunks = sum(len(record.chunk_at_s) for record in completed)
    counts, notes = _speculation(stage.before, stage.after, stage.plan.lane)
    return StageSummary(
        lane=stage.plan.lane,
        workload=stage.plan.workload,
        concurrency=stage.plan.load.users if isinstance(stage.plan.load, ClosedLoop) else 0,
        requests=len(records),
        planned_requests=stage.plan.requests,
        failures=len(records) - len(completed),
        output_tokens_per_s=output_tokens_per_s(records),
        ttft_s=_percentiles(ttft_s(timeline) for timeline in timelines),
        tpot_s=_percentiles(tpot for timeline in timelines if (tpot := tpot_s(timeline)) is not None),
        e2e_s=_percentiles(e2e_latency_s(timeline) for timeline in timelines),
        inter_chunk_s=_percentiles(
            gap for timeline in timelines for gap in inter_chunk_latencies_s(timeline)
        ),
        tokens_per_chunk=tokens / chunks if chunks else None,
        acceptance_rate=acceptance_rate(counts) if counts else None,
        mean_acceptance_length=mean_acceptance_length(counts) if counts else None,
        memory_bytes=_memory_bytes((stage.before, stage.after), stage.plan.lane),
        wrong_lengths=sum(record.output_tokens != output_tokens for record in completed),
        cut=stage.is_cut,
        duration_s=stage.finished_at_s - stage.started_at_s,
        notes=tuple(notes) + _count_notes(stage, records),
    )


def output_tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Output tokens of completed requests / (last finish - first schedule); None when none completed.

    The first schedule is that of any request: time spent on failures is not taken out.
    """
    completed = [record for record in records if record.is_completed]
    if not completed:
        return None
    started_at_s = min(record.scheduled_at_s for record in records)
    finished_at_s = max(record.finished_at_s for record in completed)
    return sum(record.output_tokens or 0 for record in completed) / (finished_at_s - started_at_s)


def _percentiles(values: Iterable[float]) -> Percentiles:
    found = list(values)
    return Percentiles(percentile(found, 50), percentile(found, 95))


def _speculation(before: Scrape, after: Scrape, lane: str) -> tuple[SpeculationCounts | None, list[str]]:
    """What the lane's engines drafted between two scrapes, or None and why it is not known."""
    earlier, later = before.speculation(lane), after.speculation(lane)
    # A replica that came or went in between took part of the stage's counts with it.
    if earlier.keys() != later.keys():
        return None, ["acceptance unknown: the lane's replicas changed during the stage, or did not answer"]
    if not later:
        return None, []
    total = SpeculationCounts(0, 0, 0)
    for replica, counts in later.items():
        if counts.num_drafts < earlier[replica].num_drafts:
            return None, [f"acceptance unknown: counters of replica {replica} went back during the stage"]
        grown = counts - earlier[replica]
        total = SpeculationCounts(
            total.num_drafts + grown.num_drafts,
            total.draft_tokens + grown.draft_tokens,
            total.accepted_tokens + grown.accepted_tokens,
        )
    return total, []


def _memory_bytes(scrapes: Iterable[Scrape], lane: str) -> float | None:
    sizes = [size for scrape in scrapes if (size := scrape.memory_bytes(lane)) is not None]
    return max(sizes, default=None)


def _count_notes(stage: StageRun, records: Sequence[RequestRecord]) -> tuple[str, ...]:
    notes = list(dict.fromkeys(stage.before.errors + stage.after.errors))
    if stage.is_cut:
        notes.append(f"cut: {len(records)} of {stage.plan.requests} requests have a record")
    failures = sum(not record.is_completed for record in records)
    if (stage.locust_requests, stage.locust_failures) != (len(records), failures):
        notes.append(
            f"Locust counts {stage.locust_requests} requests and {stage.locust_failures} failures, "
            f"the records {len(records)} and {failures}"
        )
    if elsewhere := sorted({r.served_by_lane for r in records if r.served_by_lane} - {stage.plan.lane}):
        notes.append(f"answered by another lane: {', '.join(elsewhere)}")
    return tuple(notes)


def _lanes(run: RunFile) -> tuple[LaneSummary, ...]:
    """The lanes that ran, in that order."""
    scrapes = [scrape for stage in run.stages for scrape in (stage.before, stage.after)]
    strategies = {lane["name"]: str(lane["strategy"]) for lane in run.run.config.get("lanes", [])}
    lanes = []
    for name in dict.fromkeys(stage.plan.lane for stage in run.stages):
        replicas = [replica for replica in run.run.replicas if replica.get("lane") == name]
        engines = {_engine_name(replica) for replica in replicas}
        lanes.append(
            LaneSummary(
                lane=name,
                strategy=strategies.get(name, "unknown"),
                engine=", ".join(sorted(engines)) or "unknown",
                replicas=len(replicas),
                memory_bytes=_memory_bytes(scrapes, name),
            )
        )
    return tuple(lanes)


def _engine_name(replica: Mapping[str, Any]) -> str:
    """Engine and version; some versions begin with the engine's name already."""
    engine, version = str(replica.get("engine")), str(replica.get("engine_version") or "")
    return version if version.startswith(engine) else f"{engine} {version}".strip()


def _failures(records: Sequence[RequestRecord]) -> tuple[FailureCount, ...]:
    failed = [record for record in records if not record.is_completed]
    counts = Counter((record.label.lane, record.reason or "unknown") for record in failed)
    examples = {(record.label.lane, record.reason or "unknown"): record.error or "" for record in failed}
    return tuple(
        FailureCount(lane, reason, count, examples[lane, reason])
        for (lane, reason), count in counts.most_common()
    )
