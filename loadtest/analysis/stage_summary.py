"""One row of a run's summary: the repeats of a stage, from records and scrapes to figures.

Latencies are defined in `serving.core.latency`, acceptance in `serving.core.speculation`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from statistics import fmean
from typing import TypeVar

from loadtest.analysis.client_view import achieved_per_s, offered_per_s, summarize_client
from loadtest.analysis.server_view import ServerView, add_speculation, agreements, view
from loadtest.analysis.summary import Agreement, ClientSummary, Percentiles, StageSummary
from loadtest.analysis.validity import invalid_reasons
from loadtest.analysis.window import Window, ended_in, mean_in_flight, offered_s, steady_window, tokens_in
from loadtest.client.health import ClientCeiling
from loadtest.client.lab import Scrape
from loadtest.client.record import ClientReason, RequestRecord
from loadtest.judge.estimate import Estimate
from loadtest.judge.intervals import mean_of_rates, percentile_estimate
from loadtest.judge.slo import Slo, decided, evaluate
from loadtest.offer.load import ClosedLoop, Load
from loadtest.run.directory import StageRun
from serving.core.lane import ANY_LANE
from serving.core.latency import (
    RequestTimeline,
    e2e_latency_s,
    inter_chunk_latencies_s,
    percentile,
    tpots_s,
    ttfts_s,
)
from serving.core.speculation import acceptance_rate, mean_acceptance_length, passes_per_token

_T = TypeVar("_T")

NO_CONNECTION = frozenset({ClientReason.CONNECT, ClientReason.CONNECT_TIMEOUT})


@dataclass(frozen=True, slots=True)
class Repeat:
    """One repeat of a stage.

    Attributes:
        records: those that count.
        others: those of the stage that do not; the server counted them all the same.
        window: its steady part; None when there is none.
    """

    stage: StageRun
    records: tuple[RequestRecord, ...]
    others: tuple[RequestRecord, ...] = ()
    window: Window | None = None

    @property
    def everything(self) -> tuple[RequestRecord, ...]:
        return self.records + self.others

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens that came in the steady part / its length; None without one, or when nothing came."""
        if self.window is None:
            return None
        return tokens_in(self.window, self.everything) / self.window.length_s or None

    @property
    def requests_per_s(self) -> float | None:
        """How fast requests were served or, in an open loop, asked for; None where neither is known."""
        if not isinstance(self.stage.plan.load, ClosedLoop):
            span_s = offered_s(self.stage.plan, self.stage.started_at_s, self.everything)
            return len(self.records) / span_s if span_s else None
        if self.window is None:
            return None
        return ended_in(self.window, self.everything) / self.window.length_s

    @property
    def tpot_p50_s(self) -> float | None:
        return percentile(tpots_s(record.timeline for record in self.records if record.is_completed), 50)

    @property
    def num_due(self) -> int:
        """Requests that should have a record: those planned, or in a stage that was cut, those it came to."""
        return len(self.records) if self.stage.is_cut else self.stage.plan.requests


def make_repeat(stage: StageRun, records: Iterable[RequestRecord]) -> Repeat:
    """A stage that ran, with all of its records."""
    everything = tuple(records)
    return Repeat(
        stage,
        tuple(record for record in everything if record.label.counts),
        tuple(record for record in everything if not record.label.counts),
        steady_window(stage.plan, stage.started_at_s, everything),
    )


def summarize_stage(
    repeats: Sequence[Repeat], slo: Slo | None = None, ceiling: ClientCeiling | None = None
) -> StageSummary:
    """The repeats of one stage as one row; there is at least one."""
    stages = [repeat.stage for repeat in repeats]
    plan = stages[0].plan
    records = [record for repeat in repeats for record in repeat.records]
    completed = [record for record in records if record.is_completed]
    timelines = [record.timeline for record in completed]
    tokens = sum(record.output_tokens or 0 for record in completed)
    chunks = sum(len(record.chunk_at_s) for record in completed)
    views = [view(stage.before, stage.after, plan.lane) for stage in stages]
    drafted = _all_known([seen.speculation for seen in views])
    prefixes = _all_known([seen.prefix for seen in views])
    queries = sum(prefix.queries for prefix in prefixes)
    counts = reduce(add_speculation, drafted) if drafted else None
    agreed, invalid = _judge(repeats, views, ceiling)
    rates = _known(repeat.tokens_per_s for repeat in repeats)
    served_per_s = _mean(_known(repeat.requests_per_s for repeat in repeats))
    return StageSummary(
        lane=plan.lane,
        workload=plan.workload,
        load=plan.load,
        repeats=len(repeats),
        requests=len(records),
        planned_requests=sum(stage.plan.requests for stage in stages),
        failures=len(records) - len(completed),
        offered_per_s=_mean(_known(_offered_per_s(each) for each in repeats)),
        achieved_per_s=_mean([achieved_per_s(plan.load, each.records) for each in repeats]) or 0.0,
        output_tokens_per_s=mean_of_rates(rates),
        whole_tokens_per_s=_mean(_known(output_tokens_per_s(repeat.everything) for repeat in repeats)),
        repeat_tokens_per_s=tuple(repeat.tokens_per_s for repeat in repeats),
        repeat_tpot_p50_s=tuple(repeat.tpot_p50_s for repeat in repeats),
        window_s=sum(repeat.window.length_s for repeat in repeats if repeat.window is not None),
        mean_in_flight=_mean(
            [mean_in_flight(each.window, each.everything) for each in repeats if each.window is not None]
        )
        or 0.0,
        ttft_s=_percentiles(ttfts_s(timelines)),
        tpot_s=_percentiles(tpots_s(timelines)),
        e2e_s=_percentiles(e2e_latency_s(timeline) for timeline in timelines),
        inter_chunk_s=_gap_percentiles(timelines),
        tokens_per_chunk=tokens / chunks if chunks else None,
        acceptance_rate=acceptance_rate(counts) if counts else None,
        mean_acceptance_length=mean_acceptance_length(counts) if counts else None,
        passes_per_token=passes_per_token(counts) if counts else None,
        prefix_hit_rate=sum(prefix.hits for prefix in prefixes) / queries if queries else None,
        memory_bytes=memory_bytes(
            (scrape for stage in stages for scrape in (stage.before, stage.after)), plan.lane
        ),
        wrong_lengths=sum(
            record.asked_output_tokens is not None and record.output_tokens != record.asked_output_tokens
            for record in completed
        ),
        cut=any(stage.is_cut for stage in stages),
        duration_s=sum(stage.finished_at_s - stage.started_at_s for stage in stages),
        slo=evaluate(slo, records, served_per_s or 0.0)
        if slo is not None and decided(slo, records)
        else None,
        client=_client(plan.load, repeats, ceiling),
        agreements=agreed,
        invalid=invalid,
        notes=tuple(
            note
            for repeat, seen in zip(repeats, views, strict=True)
            for note in (*seen.notes, *_notes(repeat))
        ),
    )


def _judge(
    repeats: Sequence[Repeat], views: Sequence[ServerView], ceiling: ClientCeiling | None
) -> tuple[tuple[Agreement, ...], tuple[str, ...]]:
    """Agreements and reasons of invalidity of each repeat: a bad one does not hide among the others."""
    agreed: list[Agreement] = []
    invalid: list[str] = []
    for repeat, seen in zip(repeats, views, strict=True):
        plan = repeat.stage.plan
        prefix = f"repeat {plan.repeat + 1}: " if len(repeats) > 1 else ""
        ours = agreements(seen, repeat.everything)
        ttft = percentile(ttfts_s(each.timeline for each in repeat.records if each.is_completed), 50)
        reasons = invalid_reasons(
            _client(plan.load, [repeat], ceiling),
            offered_per_s=_offered_per_s(repeat),
            achieved_per_s=achieved_per_s(plan.load, repeat.records),
            ttft_p50_s=ttft,
            agreements=ours,
            unreached=_share(
                sum(each.reason in NO_CONNECTION for each in repeat.records), len(repeat.records)
            ),
        )
        if (missing := repeat.stage.locust_requests - len(repeat.records)) > 0:
            reasons += (f"{missing} requests were sent and have no record",)
        agreed += [replace(each, quantity=prefix + each.quantity) for each in ours]
        invalid += [prefix + reason for reason in reasons]
    return tuple(agreed), tuple(invalid)


def _client(load: Load, repeats: Sequence[Repeat], ceiling: ClientCeiling | None) -> ClientSummary:
    return summarize_client(
        load,
        [record for repeat in repeats for record in repeat.records],
        [repeat.stage.client for repeat in repeats if repeat.stage.client is not None],
        ceiling,
        max((output_tokens_per_s(repeat.everything) or 0.0 for repeat in repeats), default=None),
    )


def _offered_per_s(repeat: Repeat) -> float | None:
    return offered_per_s(repeat.stage.plan.load, repeat.records, repeat.num_due)


def output_tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Output tokens of completed requests / (last finish - first schedule); None when none completed.

    Both instants are those of any request: time spent on failures is not taken out.
    """
    completed = [record for record in records if record.is_completed]
    if not completed:
        return None
    started_at_s = min(record.scheduled_at_s for record in records)
    finished_at_s = max(record.finished_at_s for record in records)
    return sum(record.output_tokens or 0 for record in completed) / (finished_at_s - started_at_s)


def _percentiles(values: Iterable[float]) -> Percentiles:
    sample = list(values)
    return Percentiles(*(percentile_estimate(sample, q) for q in (50, 95, 99)))


def _gap_percentiles(timelines: Iterable[RequestTimeline]) -> Percentiles:
    """Without intervals: gaps of one stream depend on each other, and so do those of streams in one batch."""
    gaps_s = [gap for timeline in timelines for gap in inter_chunk_latencies_s(timeline)]
    values = (percentile(gaps_s, q) for q in (50, 95, 99))
    return Percentiles(*(None if value is None else Estimate(value) for value in values))


def _all_known(values: Sequence[_T | None]) -> list[_T]:
    """The values, or nothing when one of them is not known."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _share(above: float, below: float) -> float:
    return above / below if below else 0.0


def _notes(repeat: Repeat) -> list[str]:
    stage, records = repeat.stage, repeat.records
    notes = list(dict.fromkeys(stage.before.errors + stage.after.errors))
    if records and repeat.window is None:
        notes.append("no steady part: no answer was whole before the load ended, so tokens/s are not known")
    if stage.trace is not None:
        notes += [f"trace: {fault}" for fault in stage.trace.faults]
    if stage.is_cut:
        notes.append(f"cut: {len(records)} of {stage.plan.requests} requests have a record")
    failures = sum(not record.is_completed for record in records)
    if (stage.locust_requests, stage.locust_failures) != (len(records), failures):
        notes.append(
            f"Locust counts {stage.locust_requests} requests and {stage.locust_failures} failures, "
            f"the records {len(records)} and {failures}"
        )
    served = Counter(record.served_by_lane for record in records if record.served_by_lane)
    if stage.plan.lane == ANY_LANE:
        if served:
            counts = ", ".join(f"{lane} {count}" for lane, count in sorted(served.items()))
            notes.append(f"where the scheduler sent them: {counts}")
    elif elsewhere := sorted(served.keys() - {stage.plan.lane}):
        notes.append(f"answered by another lane: {', '.join(elsewhere)}")
    return notes


def memory_bytes(scrapes: Iterable[Scrape], lane: str) -> float | None:
    sizes = [size for scrape in scrapes if (size := scrape.memory_bytes(lane)) is not None]
    return max(sizes, default=None)
