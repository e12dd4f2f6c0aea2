"""From records and scrapes to `summary.json`: a whole run. Its stages: `stage_summary`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.analysis.crossover import find_crossovers
from loadtest.analysis.stage_summary import Repeat, make_repeat, memory_bytes, summarize_stage
from loadtest.analysis.summary import FailureCount, LaneSummary, Summary
from loadtest.client.health import ClientCeiling
from loadtest.client.lane_models import lane_models
from loadtest.client.record import ClientReason, RequestRecord, read_records
from loadtest.judge.capacity import Capacity, CapacitySearch, Probe, rounded
from loadtest.judge.slo import Slo, parse_slo
from loadtest.offer.load import OpenLoop
from loadtest.run.directory import REQUESTS_FILE, RunFile, read_run
from serving.core.lane import has_model


def read_measured(directory: Path) -> tuple[RunFile, list[RequestRecord]]:
    """A run on disk and its records.

    Raises:
        ValueError: a file of the run is missing or damaged; the text names it.
    """
    path = directory / REQUESTS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: is missing; is this the directory of a run?")
    return read_run(directory), list(read_records(path))


def summarize_dir(directory: Path) -> Summary:
    """The summary of a run on disk.

    Raises:
        ValueError: as `read_measured`.
    """
    return summarize(*read_measured(directory))


def summarize(run: RunFile, records: Sequence[RequestRecord]) -> Summary:
    """The summary of a run and its records, in any order. Records of a stage that never ended are left out."""
    by_stage: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_stage.setdefault(record.label.stage, []).append(record)
    slo = None if run.run.slo is None else parse_slo(run.run.slo)
    repeats = [make_repeat(stage, by_stage.get(stage.plan.key, [])) for stage in run.stages]
    groups: dict[str, list[Repeat]] = {}
    for repeat in repeats:
        groups.setdefault(repeat.stage.plan.group, []).append(repeat)
    stages = tuple(summarize_stage(group, slo, run.run.ceiling) for group in groups.values())
    lanes = _lanes(run)
    return Summary(
        run=run.run,
        slo=run.run.slo,
        ceiling=run.run.ceiling,
        stages=stages,
        lanes=lanes,
        # What speculation does is seen beside the same model without it.
        crossovers=tuple(
            crossover
            for path in dict.fromkeys(lane.model and lane.model.path for lane in lanes)
            for crossover in find_crossovers(
                stages,
                {lane.lane: lane.strategy for lane in lanes if (lane.model and lane.model.path) == path},
            )
        ),
        capacities=() if run.run.search is None or slo is None else _capacities(run, repeats, slo),
        # What the tool withdrew when a stage was done is nobody's failure.
        failures=_failures([record for record in records if record.reason != ClientReason.STAGE_DONE]),
    )


def probe_of(repeat: Repeat, slo: Slo, ceiling: ClientCeiling | None = None) -> Probe:
    """What one stage of a capacity search says.

    Raises:
        ValueError: its load is not a rate, or no request of it ended.
    """
    load = repeat.stage.plan.load
    if not isinstance(load, OpenLoop):
        raise ValueError(f"stage {repeat.stage.plan.key}: a capacity search needs rates, not {load.kind!r}")
    stage = summarize_stage([repeat], slo, ceiling)
    if stage.slo is None:
        raise ValueError(
            f"stage {repeat.stage.plan.key}: no request ended, so nothing is known of the objective"
        )
    # Given up early, it has records of its first part only.
    is_hopeless = repeat.stage.stop_reason == ClientReason.STAGE_HOPELESS
    return Probe(
        rate_per_s=rounded(load.rate_per_s),
        repeat=repeat.stage.plan.repeat,
        attainment=stage.slo.attainment.value,
        holds=stage.slo.holds and not is_hopeless,
        is_valid=not stage.invalid,
        mean_in_flight=stage.mean_in_flight,
        binding=stage.slo.binding,
    )


def _capacities(run: RunFile, repeats: Sequence[Repeat], slo: Slo) -> tuple[Capacity, ...]:
    """The searches of a sweep, gone through again with what their stages measured."""
    assert run.run.search is not None
    searches: dict[tuple[str, str], CapacitySearch] = {}
    for repeat in repeats:
        plan = repeat.stage.plan
        if repeat.stage.stop_reason == ClientReason.INTERRUPTED:
            continue
        probe = probe_of(repeat, slo, run.run.ceiling)
        if (plan.lane, plan.workload) not in searches:
            # Each lane has a first guess of its own.
            settings = replace(run.run.search, first_rate_per_s=probe.rate_per_s)
            searches[plan.lane, plan.workload] = CapacitySearch(plan.lane, plan.workload, settings)
        searches[plan.lane, plan.workload].record(probe)
    return tuple(search.result() for search in searches.values())


def _lanes(run: RunFile) -> tuple[LaneSummary, ...]:
    """The lanes that ran, in that order."""
    scrapes = [scrape for stage in run.stages for scrape in (stage.before, stage.after)]
    strategies = {lane["name"]: str(lane["strategy"]) for lane in run.run.config.get("lanes", [])}
    models = lane_models(run.run.config, run.run.replicas)
    lanes = []
    for name in dict.fromkeys(stage.plan.lane for stage in run.stages):
        replicas = [replica for replica in run.run.replicas if replica.get("lane") == name]
        engines = {_engine_name(replica) for replica in replicas}
        lanes.append(
            LaneSummary(
                lane=name,
                strategy=strategies.get(name, "unknown"),
                engine=", ".join(sorted(engines)) or "unknown",
                has_model=all(map(has_model, replicas)),
                replicas=len(replicas),
                memory_bytes=memory_bytes(scrapes, name),
                model=models.get(name),
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
