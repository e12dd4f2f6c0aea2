"""From records and scrapes to `summary.json`: the only place where the load lab computes a figure.

Latencies are defined in `serving.core.latency`, acceptance in `serving.core.speculation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.crossover import find_crossovers
from loadtest.lab import Scrape
from loadtest.record import RequestRecord, read_records
from loadtest.rundir import REQUESTS_FILE, RunFile, StageRun, read_run
from loadtest.summary import (
    ClientSummary,
    Estimate,
    FailureCount,
    LaneSummary,
    Percentiles,
    StageSummary,
    Summary,
)
from serving.core.latency import e2e_latency_s, inter_chunk_latencies_s, percentile, tpot_s, ttft_s
from serving.core.speculation import SpeculationCounts, acceptance_rate, mean_acceptance_length


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
        if not record.label.is_warmup:
            by_stage[record.label.stage].append(record)
    groups: dict[str, list[Repeat]] = {}
    for stage in run.stages:
        groups.setdefault(stage.plan.group, []).append(Repeat(stage, tuple(by_stage[stage.plan.key])))
    stages = tuple(summarize_stage(repeats) for repeats in groups.values())
    lanes = _lanes(run)
    return Summary(
        run=run.run,
        slo=run.run.slo,
        ceiling=run.run.ceiling,
        stages=stages,
        lanes=lanes,
        crossovers=find_crossovers(stages, {lane.lane: lane.strategy for lane in lanes}),
        capacities=(),
        failures=_failures(records),
    )


@dataclass(frozen=True, slots=True)
class Repeat:
    """One repeat of a stage and its records, warm-up left out."""

    stage: StageRun
    records: tuple[RequestRecord, ...]

    @property
    def window_s(self) -> float:
        """First schedule to last finish, of any request; 0 without a record."""
        if not self.records:
            return 0.0
        first_s = min(record.scheduled_at_s for record in self.records)
        return max(record.finished_at_s for record in self.records) - first_s


def summarize_stage(repeats: Sequence[Repeat]) -> StageSummary:
    """The repeats of one stage as one row; there is at least one."""
    stages = [repeat.stage for repeat in repeats]
    plan = stages[0].plan
    records = [record for repeat in repeats for record in repeat.records]
    completed = [record for record in records if record.is_completed]
    timelines = [record.timeline for record in completed]
    tokens = sum(record.output_tokens or 0 for record in completed)
    chunks = sum(len(record.chunk_at_s) for record in completed)
    counts, notes = _speculation(stages[0].before, stages[-1].after, plan.lane)
    for repeat in repeats:
        notes += _notes(repeat)
    return StageSummary(
        lane=plan.lane,
        workload=plan.workload,
        load=plan.load,
        repeats=len(repeats),
        requests=len(records),
        planned_requests=sum(stage.plan.requests for stage in stages),
        failures=len(records) - len(completed),
        offered_per_s=None,
        achieved_per_s=_ratio(len(records), sum(repeat.window_s for repeat in repeats)),
        output_tokens_per_s=_mean([output_tokens_per_s(repeat.records) for repeat in repeats]),
        mean_in_flight=_ratio(
            sum(e2e_latency_s(record.timeline) for record in records),
            sum(repeat.window_s for repeat in repeats),
        ),
        ttft_s=_percentiles(ttft_s(timeline) for timeline in timelines),
        tpot_s=_percentiles(tpot for timeline in timelines if (tpot := tpot_s(timeline)) is not None),
        e2e_s=_percentiles(e2e_latency_s(timeline) for timeline in timelines),
        inter_chunk_s=_percentiles(
            gap for timeline in timelines for gap in inter_chunk_latencies_s(timeline)
        ),
        tokens_per_chunk=tokens / chunks if chunks else None,
        acceptance_rate=acceptance_rate(counts) if counts else None,
        mean_acceptance_length=mean_acceptance_length(counts) if counts else None,
        prefix_hit_rate=None,
        memory_bytes=_memory_bytes(
            (scrape for stage in stages for scrape in (stage.before, stage.after)), plan.lane
        ),
        wrong_lengths=sum(
            record.asked_output_tokens is not None and record.output_tokens != record.asked_output_tokens
            for record in completed
        ),
        cut=any(stage.is_cut for stage in stages),
        duration_s=sum(stage.finished_at_s - stage.started_at_s for stage in stages),
        slo=None,
        client=ClientSummary(None, None, None, 0.0, None, None, None),
        agreements=(),
        invalid=(),
        notes=tuple(notes),
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
    p50, p95, p99 = (
        None if (value := percentile(found, q)) is None else Estimate(value) for q in (50, 95, 99)
    )
    return Percentiles(p50, p95, p99)


def _mean(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return Estimate(sum(known) / len(known)) if known else None


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


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


def _notes(repeat: Repeat) -> list[str]:
    stage, records = repeat.stage, repeat.records
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
    return notes


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
