"""Runs made by hand for the tests: what was measured is known, so what must come out is too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtest.client.lab import ReplicaScrape, Scrape
from loadtest.client.record import RequestLabel, RequestRecord, to_row
from loadtest.offer.load import ClosedLoop
from loadtest.run.directory import REQUESTS_FILE, RunFile, RunInfo, RunStatus, StageRun, write_run
from loadtest.run.plan import StagePlan
from serving.core.request import Outcome
from serving.core.speculation import SpeculationCounts

STRATEGIES = {"sequential": "sequential", "batched": "batched", "speculative": "speculative"}


def stage_plan(lane: str, workload: str, users: int, requests: int = 1000) -> StagePlan:
    return StagePlan(lane, workload, ClosedLoop(users), requests)


def record(
    lane: str,
    concurrency: int = 1,
    number: int = 0,
    *,
    workload: str = "copy",
    scheduled_at_s: float = 0.0,
    ttft_s: float = 0.1,
    gap_s: float = 0.02,
    chunks: int = 11,
    tokens: int | None = None,
    reason: str | None = None,
    asked: int | None = 11,
    is_warmup: bool = False,
) -> RequestRecord:
    """A request with evenly spaced chunks; with a reason, one that failed after them."""
    stamps = tuple(scheduled_at_s + ttft_s + gap_s * index for index in range(chunks))
    return RequestRecord(
        label=RequestLabel(
            f"{lane}-{concurrency}-{number}",
            lane,
            workload,
            stage_plan(lane, workload, concurrency).key,
            number,
            is_warmup,
        ),
        outcome=Outcome.COMPLETED if reason is None else Outcome.FAILED,
        scheduled_at_s=scheduled_at_s,
        finished_at_s=stamps[-1] if stamps else scheduled_at_s,
        dispatched_at_s=scheduled_at_s,
        sent_at_s=scheduled_at_s,
        chunk_at_s=stamps,
        reason=reason,
        error=None if reason is None else f"<b>{reason}</b> in words",
        served_by_lane=lane,
        prompt_tokens=100,
        output_tokens=chunks if tokens is None else tokens,
        asked_output_tokens=asked,
    )


def users_of(record: RequestRecord) -> int:
    """The users of the closed loop that a record's stage is named after."""
    return int(record.label.stage.rsplit("/", 1)[-1].split()[0])


def scrape(
    lane: str, drafts: tuple[int, int, int] | None = None, memory_bytes: float | None = 2**30
) -> Scrape:
    counts = None if drafts is None else SpeculationCounts(*drafts)
    return Scrape((ReplicaScrape(lane, f"{lane}-1", counts, memory_bytes),))


def stage_run(
    records: Sequence[RequestRecord],
    before: Scrape = Scrape(),  # noqa: B008 - frozen
    after: Scrape = Scrape(),  # noqa: B008 - frozen
    planned: int | None = None,
    is_cut: bool = False,
    plan: StagePlan | None = None,
) -> StageRun:
    """The stage that these records are all of; a closed loop unless a plan says otherwise."""
    label = records[0].label
    return StageRun(
        plan=plan or stage_plan(label.lane, label.workload, users_of(records[0]), planned or len(records)),
        started_at_s=0.0,
        finished_at_s=max(each.finished_at_s for each in records),
        is_cut=is_cut,
        before=before,
        after=after,
        locust_requests=len(records),
        locust_failures=sum(not each.is_completed for each in records),
    )


def run_file(stages: Sequence[StageRun], output_tokens: int = 11, engine: str = "vllm") -> RunFile:
    lanes = list(dict.fromkeys(stage.plan.lane for stage in stages))
    info = RunInfo(
        id="20260102-030405-test",
        name="test",
        started_at="2026-01-02T03:04:05+00:00",
        duration_s=12.0,
        status=RunStatus.COMPLETE,
        seed=7,
        output_tokens=output_tokens,
        planned_requests=sum(stage.plan.requests for stage in stages),
        base_url="http://127.0.0.1:8000",
        machine={
            "cpu_model": "Abacus 9000",
            "usable_cores": 2,
            "instruction_sets": ["avx2"],
            "memory_bytes": 8 * 2**30,
            "gpus": [],
            "os": "Test OS",
            "kernel": "1.0",
        },
        versions={"tandem": "0.1.0", "vllm": "0.32.0"},
        config={"lanes": [{"name": lane, "strategy": STRATEGIES[lane]} for lane in lanes]},
        model={"name": "smollm2-135m", "dtype": "bfloat16", "device": "cpu"},
        replicas=[
            {"replica": f"{lane}-1", "lane": lane, "engine": engine, "engine_version": "1.2"}
            for lane in lanes
        ],
    )
    return RunFile(info, tuple(stages))


def whole_run(engine: str = "vllm") -> tuple[RunFile, list[RequestRecord]]:
    """Three lanes at concurrency 1, 4 and 8; speculation halves TPOT at 1, ties at 4 and doubles it at 8."""
    gaps_s = {
        "sequential": {1: 0.02, 4: 0.02, 8: 0.02},
        "batched": {1: 0.02, 4: 0.02, 8: 0.02},
        "speculative": {1: 0.01, 4: 0.02, 8: 0.04},
    }
    stages, records = [], []
    for lane, by_level in gaps_s.items():
        for workload in ("copy", "story"):
            for level, gap_s in by_level.items():
                wait_s = 0.1 * level if lane == "sequential" else 0.1
                found = [
                    record(lane, level, number, workload=workload, ttft_s=wait_s, gap_s=gap_s)
                    for number in range(level * 2)
                ]
                drafts = ((0, 0, 0), (10, 40, 20)) if lane == "speculative" else (None, None)
                stages.append(stage_run(found, scrape(lane, drafts[0]), scrape(lane, drafts[1])))
                records += found
        records.append(record(lane, is_warmup=True, ttft_s=9.0))
    return run_file(stages, engine=engine), records


def write_whole_run(directory: Path, run: RunFile, records: Sequence[RequestRecord]) -> None:
    write_run(run, directory)
    (directory / REQUESTS_FILE).write_text("".join(to_row(each) + "\n" for each in records))
