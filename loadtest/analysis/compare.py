"""Two runs side by side: each figure's ratio B / A with its interval, and what may be said of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loadtest.analysis.run_summary import read_measured, summarize
from loadtest.analysis.summary import Percentiles, StageSummary, Summary
from loadtest.client.record import RequestRecord
from loadtest.judge.capacity import Capacity
from loadtest.judge.estimate import Estimate, is_settled, ratio_of_estimates
from loadtest.judge.intervals import geometric_mean_of_repeats, percentile_ratio
from loadtest.judge.settled import ASSUMED_STAGE_SD, with_stage_noise
from loadtest.offer.load import OpenLoop
from loadtest.run.differences import Difference, find_differences
from serving.core.latency import e2e_latency_s, percentile, tpots_s, ttfts_s

# Answers and prompts of two runs are drawn anew; a larger difference in their mean length is other work.
SIZE_TOLERANCE = 0.05

TOKEN_FIGURES = ("tokens/s", "TPOT")
MAX_STAGES_NAMED = 12  # of a run, in an error


class Change(StrEnum):
    """What a ratio says of B."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "not distinguishable"  # its interval holds 1
    UNKNOWN = "no interval"
    INVALID = "INVALID"  # of a stage that may not be used


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of A and of B.

    Attributes:
        unit: of `a` and `b`.
        ratio: B / A.
        basis: what the interval rests on, or why there is none.
    """

    quantity: str
    unit: str
    a: float | None
    b: float | None
    ratio: Estimate | None
    change: Change
    basis: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A lane of A and a lane of B under the same workload and load; load is empty for a capacity."""

    workload: str
    load: str
    lane_a: str
    lane_b: str
    ratios: tuple[Ratio, ...]

    @property
    def lanes(self) -> str:
        return self.lane_a if self.lane_a == self.lane_b else f"{self.lane_b} / {self.lane_a}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Run B against run A.

    Attributes:
        only_in_a, only_in_b: stages without a counterpart.
        warnings: what takes weight from the ratios.
    """

    run_a: str
    run_b: str
    capacities: tuple[Pair, ...]
    stages: tuple[Pair, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    differences: tuple[Difference, ...]
    warnings: tuple[str, ...]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return self.capacities + self.stages


_ADAPTER = TypeAdapter(Comparison)


def comparison_json(comparison: Comparison) -> str:
    return _ADAPTER.dump_json(comparison, indent=1).decode() + "\n"


@dataclass(frozen=True, slots=True)
class StageSamples:
    """What a stage's completed requests measured, its repeats together. Lengths are means, in tokens.

    Attributes:
        by_repeat: the same of each repeat.
    """

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    e2e_s: tuple[float, ...]
    prompt_tokens: float
    output_tokens: float
    by_repeat: tuple[StageSamples, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run with the samples behind its percentiles, by the key of the stage's summary."""

    summary: Summary
    samples: Mapping[str, StageSamples]


def load_run(directory: Path) -> LoadedRun:
    """Read a run and summarize it.

    Raises:
        ValueError: a file of the run is missing or damaged; the text names it.
    """
    run, records = read_measured(directory)
    groups = {stage.plan.key: stage.plan.group for stage in run.stages}
    by_group: dict[str, dict[str, list[RequestRecord]]] = {}
    for record in records:
        # Records of a stage that never ended are in no figure.
        if record.is_completed and record.label.counts and record.label.stage in groups:
            repeats = by_group.setdefault(groups[record.label.stage], {})
            repeats.setdefault(record.label.stage, []).append(record)
    return LoadedRun(
        summarize(run, records),
        {group: _samples_of_repeats(repeats.values()) for group, repeats in by_group.items()},
    )


def _samples_of_repeats(repeats: Iterable[Sequence[RequestRecord]]) -> StageSamples:
    each = tuple(repeats)
    together = _samples([record for records in each for record in records])
    return replace(together, by_repeat=tuple(map(_samples, each)))


def _samples(completed: Sequence[RequestRecord]) -> StageSamples:
    timelines = [record.timeline for record in completed]
    return StageSamples(
        ttft_s=tuple(ttfts_s(timelines)),
        tpot_s=tuple(tpots_s(timelines)),
        e2e_s=tuple(e2e_latency_s(timeline) for timeline in timelines),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in completed) / len(completed),
        output_tokens=sum(record.output_tokens or 0 for record in completed) / len(completed),
    )


def compare(a: LoadedRun, b: LoadedRun, lanes: tuple[str, str] | None = None) -> Comparison:
    """B against A.

    Args:
        lanes: the lane of A and the lane of B to compare; None for lanes of the same name, or for
            the only lane of each.

    Raises:
        ValueError: a lane is not in its run, or the runs share no lane or no stage.
    """
    pairs = pair_lanes(a.summary, b.summary, lanes)
    stages_a, stages_b = (
        {(stage.lane, stage.workload, stage.load.label): stage for stage in run.summary.stages}
        for run in (a, b)
    )
    matched = [
        (stage, stages_b[partner, stage.workload, stage.load.label])
        for lane, partner in pairs
        for stage in a.summary.stages
        if stage.lane == lane and (partner, stage.workload, stage.load.label) in stages_b
    ]
    keys_a, keys_b = {ours.key for ours, _ in matched}, {theirs.key for _, theirs in matched}
    wanted_a, wanted_b = {lane for lane, _ in pairs}, {lane for _, lane in pairs}
    if lanes is None:  # without a choice every lane was meant
        wanted_a, wanted_b = ({lane.lane for lane in run.summary.lanes} for run in (a, b))
    capacities = tuple(_capacity_pairs(a.summary, b.summary, pairs))
    if not matched and not capacities:
        each = (
            f"{name} ({run.summary.run.id}) has {_stages_of(run.summary)}"
            for name, run in (("A", a), ("B", b))
        )
        raise ValueError(f"the runs have no stage in common to compare: {'; '.join(each)}")
    differences = tuple(_differences(a.summary, b.summary, pairs))
    return Comparison(
        run_a=a.summary.run.id,
        run_b=b.summary.run.id,
        capacities=capacities,
        stages=tuple(_stage_pair(ours, theirs, a, b) for ours, theirs in matched),
        only_in_a=tuple(s.key for s in stages_a.values() if s.lane in wanted_a and s.key not in keys_a),
        only_in_b=tuple(s.key for s in stages_b.values() if s.lane in wanted_b and s.key not in keys_b),
        differences=differences,
        warnings=tuple(_warnings(a, b, matched, differences)),
    )


def _stages_of(summary: Summary) -> str:
    keys = [stage.key for stage in summary.stages]
    more = f" and {len(keys) - MAX_STAGES_NAMED} more" if len(keys) > MAX_STAGES_NAMED else ""
    return (", ".join(keys[:MAX_STAGES_NAMED]) or "none") + more


def pair_lanes(a: Summary, b: Summary, lanes: tuple[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Which lane of A stands against which of B.

    Raises:
        ValueError: a lane is not in its run, or the runs share none.
    """
    of_a, of_b = ([lane.lane for lane in summary.lanes] for summary in (a, b))
    if lanes is not None:
        for lane, known, run in ((lanes[0], of_a, a.run.id), (lanes[1], of_b, b.run.id)):
            if lane not in known:
                raise ValueError(f"--lanes: run {run} has no lane {lane!r}; it has {', '.join(known)}")
        return (lanes,)
    if len(of_a) == len(of_b) == 1:
        return ((of_a[0], of_b[0]),)
    if shared := tuple((lane, lane) for lane in of_a if lane in of_b):
        return shared
    raise ValueError(
        f"the runs share no lane: A has {', '.join(of_a) or 'none'}, B has {', '.join(of_b) or 'none'}; "
        "name one of each with --lanes A,B"
    )


def change_of(ratio: Estimate | None, is_higher_better: bool) -> Change:
    """What a ratio B / A says of B; an interval that holds 1 says nothing."""
    settled = None if ratio is None else is_settled(ratio)
    if ratio is None or settled is None:
        return Change.UNKNOWN
    if not settled:
        return Change.SAME
    return Change.BETTER if (ratio.value > 1) == is_higher_better else Change.WORSE


def _stage_pair(ours: StageSummary, theirs: StageSummary, a: LoadedRun, b: LoadedRun) -> Pair:
    ratios = [
        _of_estimates("tokens/s", "tokens/s", ours.output_tokens_per_s, theirs.output_tokens_per_s, _repeats)
    ]
    if ours.slo and theirs.slo and a.summary.slo == b.summary.slo:
        # Not goodput: how many requests two Poisson schedules hold differs by chance, and says nothing of servers.
        kept = ours.slo.attainment, theirs.slo.attainment
        ratios.append(_of_estimates("attainment", "share", *kept, _attainments))
    ratios += _latency_ratios(ours, theirs, a.samples.get(ours.key), b.samples.get(theirs.key))
    if not _count_alike(a.summary, ours.lane, b.summary, theirs.lane):
        ratios = [
            _of_other_tokens(ratio) if ratio.quantity.startswith(TOKEN_FIGURES) else ratio for ratio in ratios
        ]
    if ours.invalid or theirs.invalid:
        ratios = [_invalidated(ratio) for ratio in ratios]
    return Pair(ours.workload, ours.load.label, ours.lane, theirs.lane, tuple(ratios))


def _count_alike(a: Summary, lane_a: str, b: Summary, lane_b: str) -> bool:
    """Whether both lanes count the same tokens; so it is taken to be where a run does not say what they served."""
    of_a, of_b = (
        next((each.model for each in summary.lanes if each.lane == lane), None)
        for summary, lane in ((a, lane_a), (b, lane_b))
    )
    return of_a is None or of_b is None or of_a.counts_like(of_b)


def _of_other_tokens(ratio: Ratio) -> Ratio:
    return replace(
        ratio, ratio=None, change=Change.UNKNOWN, basis="not compared: the tokenizers differ, or are not told"
    )


def _repeats(has_interval: bool) -> str:
    return "repeats of both" if has_interval else "no interval: it needs 2 repeats of each"


def _attainments(has_interval: bool) -> str:
    return "shares that met the objective" if has_interval else "no interval: none of the shares, or one of 0"


def _of_estimates(
    quantity: str,
    unit: str,
    a: Estimate | None,
    b: Estimate | None,
    basis: Any,
    is_higher_better: bool = True,
) -> Ratio:
    ratio = ratio_of_estimates(a, b) if a is not None and b is not None and a.value > 0 else None
    return Ratio(
        quantity,
        unit,
        _value(a),
        _value(b),
        ratio,
        change_of(ratio, is_higher_better),
        basis(ratio is not None and ratio.low is not None),
    )


def _latency_ratios(
    ours: StageSummary, theirs: StageSummary, a: StageSamples | None, b: StageSamples | None
) -> Iterator[Ratio]:
    for name, of_a, of_b, metric in (
        ("TTFT", ours.ttft_s, theirs.ttft_s, "ttft_s"),
        ("TPOT", ours.tpot_s, theirs.tpot_s, "tpot_s"),
        ("E2E", ours.e2e_s, theirs.e2e_s, "e2e_s"),
    ):
        for q in (50, 95):
            yield _percentile_ratio(f"{name} p{q}", q, (of_a, of_b), (a, b), metric)


def _percentile_ratio(
    quantity: str,
    q: int,
    percentiles: tuple[Percentiles, Percentiles],
    runs: tuple[StageSamples | None, StageSamples | None],
    metric: str,
) -> Ratio:
    a, b = ((each.p50 if q == 50 else each.p95) for each in percentiles)
    if a is None or b is None or a.value <= 0:
        return Ratio(
            quantity,
            "s",
            _value(a),
            _value(b),
            None,
            Change.UNKNOWN,
            "nothing measured in one of them",
        )
    # Where a percentile has no interval of its own, resampling so few requests would invent one.
    ratio: Estimate | None
    if a.low is None or b.low is None:
        ratio, basis = Estimate(b.value / a.value), "no interval: too few requests"
    else:
        ratio, basis = settling_ratio(runs, metric, q)
    return Ratio(quantity, "s", a.value, b.value, ratio, change_of(ratio, is_higher_better=False), basis)


def settling_ratio(
    runs: tuple[StageSamples | None, StageSamples | None], metric: str, q: int
) -> tuple[Estimate | None, str]:
    """B / A of a percentile: from the repeats of both, else from their requests and the noise between two runs.

    Requests of one stage share its batches and its machine, so their spread alone says too much.
    """
    repeats_a, repeats_b = ([getattr(each, metric) for each in run.by_repeat] if run else [] for run in runs)
    if min(len(repeats_a), len(repeats_b)) > 1:
        means = [
            geometric_mean_of_repeats([value for sample in each if (value := percentile(sample, q))])
            for each in (repeats_a, repeats_b)
        ]
        if means[0] is not None and means[1] is not None:
            return ratio_of_estimates(means[0], means[1]), f"{len(repeats_a)} and {len(repeats_b)} repeats"
    sample_a, sample_b = (getattr(run, metric) if run else () for run in runs)
    ratio = percentile_ratio(sample_b, sample_a, q)
    basis = (
        f"bootstrap over {len(sample_a)} and {len(sample_b)} requests, and an assumed {ASSUMED_STAGE_SD:.0%} "
        "between two runs of a stage"
    )
    return with_stage_noise(ratio), basis


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _invalidated(ratio: Ratio) -> Ratio:
    return Ratio(
        ratio.quantity, ratio.unit, ratio.a, ratio.b, None, Change.INVALID, "one of the stages is INVALID"
    )


def _capacity_pairs(a: Summary, b: Summary, lanes: Sequence[tuple[str, str]]) -> Iterator[Pair]:
    theirs = {(capacity.lane, capacity.workload): capacity for capacity in b.capacities}
    for lane, partner in lanes:
        for ours in (capacity for capacity in a.capacities if capacity.lane == lane):
            if other := theirs.get((partner, ours.workload)):
                yield Pair(ours.workload, "", lane, partner, (_capacity_ratio(ours, other, a.slo == b.slo),))


def _capacity_ratio(a: Capacity, b: Capacity, is_same_slo: bool) -> Ratio:
    rates = a.rate_per_s, b.rate_per_s
    made = _of_estimates("capacity", "requests/s", *rates, _repeats)
    reason = None
    if not is_same_slo:
        reason = "the objectives differ"
    elif None in rates:
        reason = "none was found in one of them"
    elif a.is_lower_bound or b.is_lower_bound:
        reason = "one of them is only a lower bound"
    if reason is None:
        return made
    return Ratio(made.quantity, made.unit, made.a, made.b, None, Change.UNKNOWN, reason)


def _differences(a: Summary, b: Summary, lanes: Sequence[tuple[str, str]]) -> Iterator[Difference]:
    of_a, of_b = _circumstances(a), _circumstances(b)
    for lane, partner in lanes:
        name = f"lane {lane}" if lane == partner else f"lane {lane} / {partner}"
        of_a[name], of_b[name] = _lane(a, lane), _lane(b, partner)
    return find_differences(of_a, of_b, absent="not told")


def _circumstances(summary: Summary) -> dict[str, Any]:
    """What the figures of a run depend on, its lanes left out."""
    run = summary.run
    return {
        "machine": _machine(run.machine),
        "versions": run.versions,
        "model": run.model,
        "config": {key: value for key, value in run.config.items() if key not in ("lanes", "model")},
        "seed": run.seed,
        "objective": summary.slo or "none",
        "status": str(run.status),
    }


def _machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What a machine's speed depends on. Bytes differ from boot to boot, so memory is in GiB."""
    known = {key: value for key, value in machine.items() if key not in ("memory_bytes", "kernel", "python")}
    return known | {"memory_gib": round(machine.get("memory_bytes", 0) / 2**30)}


def _lane(summary: Summary, name: str) -> dict[str, Any]:
    """A lane's settings, its name left out."""
    lanes = summary.run.config.get("lanes", [])
    settings: dict[str, Any] = next((lane for lane in lanes if lane.get("name") == name), {})
    return {key: value for key, value in settings.items() if key != "name"}


def _warnings(
    a: LoadedRun,
    b: LoadedRun,
    matched: Sequence[tuple[StageSummary, StageSummary]],
    differences: Sequence[Difference],
) -> Iterator[str]:
    for name, run in (("A", a.summary), ("B", b.summary)):
        if invalid := [stage.key for stage in run.stages if stage.invalid]:
            yield f"INVALID: run {name} ({run.run.id}) in {', '.join(invalid)}. Nothing is said of these stages."
        if simulated := [lane.lane for lane in run.lanes if not lane.has_model]:
            yield f"Run {name} has a simulated engine in {', '.join(simulated)}: it says nothing of a model."
    kinds = dict.fromkeys(each.name.partition(".")[0] for each in differences)
    if apart := [kind for kind in kinds if kind in ("machine", "versions", "model", "config", "objective")]:
        yield f"The runs differ in {', '.join(apart)}: a ratio may come from that. The list is below."
    if a.summary.run.seed == b.summary.run.seed and a.summary.run.id != b.summary.run.id:
        yield (
            f"Both runs have the seed {a.summary.run.seed}, so B repeats the prompts of A: "
            "a prefix cache that was not emptied in between flatters B."
        )
    for ours, theirs in matched:
        yield from _size_warnings(ours, theirs, a.samples.get(ours.key), b.samples.get(theirs.key))


def _size_warnings(
    ours: StageSummary, theirs: StageSummary, a: StageSamples | None, b: StageSamples | None
) -> Iterator[str]:
    where = f"{ours.workload} at {ours.load.label}, {ours.lane}"
    match ours.load, theirs.load:
        case OpenLoop(), OpenLoop() if ours.load.duration_s != theirs.load.duration_s:
            yield (
                f"{where}: {ours.load.duration_s:g} s of load in A and {theirs.load.duration_s:g} s in B: where a "
                "queue grows, the longer one looks worse."
            )
    if a is not None and b is not None:
        for name, x, y in (
            ("prompts", a.prompt_tokens, b.prompt_tokens),
            ("answers", a.output_tokens, b.output_tokens),
        ):
            if abs(y - x) > SIZE_TOLERANCE * max(x, y):
                yield f"{where}: {name} have {x:.0f} tokens in A and {y:.0f} in B on average: not the same work."
    if ours.failures or theirs.failures:
        yield (
            f"{where}: {ours.failures} of {ours.requests} requests failed in A, {theirs.failures} of "
            f"{theirs.requests} in B; latencies are of the others."
        )
