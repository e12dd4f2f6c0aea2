"""What a run found, in sentences with their numbers. Nothing here is known before the data."""

from __future__ import annotations

from loadtest.crossover import Crossing, Crossover, Verdict
from loadtest.rundir import RunStatus
from loadtest.summary import Estimate, StageSummary, Summary


def findings(summary: Summary) -> tuple[str, ...]:
    """The opening of the report: throughput and its price, what speculation did, and whether all went well."""
    parts = [_throughput(summary), *(_speculation(each) for each in summary.crossovers), _failures(summary)]
    return tuple(part for part in parts if part)


def crossing_text(crossing: Crossing, levels: tuple[float, ...]) -> str:
    """A verdict in words, for the levels measured."""
    span = f"{levels[0]:g} to {levels[-1]:g}" if len(levels) > 1 else f"{levels[0]:g}"
    points = " and ".join(f"{level:.1f}" for level in crossing.levels)
    return {
        Verdict.ALWAYS: f"pays at every concurrency measured, {span}",
        Verdict.NEVER: f"pays at no concurrency measured, {span}",
        Verdict.UP_TO: f"pays up to a concurrency of about {points}",
        Verdict.FROM: f"pays only above a concurrency of about {points}",
        Verdict.MIXED: f"changes between paying and not paying at a concurrency of about {points}",
        Verdict.UNKNOWN: "could not be compared",
    }[crossing.verdict]


def _throughput(summary: Summary) -> str:
    """The best stage, and what its peers of the same work and concurrency did."""
    best = max(
        (stage for stage in summary.stages if stage.output_tokens_per_s is not None),
        key=lambda stage: stage.output_tokens_per_s.value if stage.output_tokens_per_s else 0,
        default=None,
    )
    if best is None:
        return "No request completed, so there are no figures."
    peers = [
        stage
        for stage in summary.stages
        if (stage.workload, stage.concurrency) == (best.workload, best.concurrency)
        and stage.lane != best.lane
    ]
    text = (
        f"The highest throughput was {_rate(best)}, on the lane {best.lane} with the workload {best.workload} "
        f"at concurrency {best.concurrency} (TTFT p50 {_time(best.ttft_s.p50)}, TPOT p50 {_time(best.tpot_s.p50)})"
    )
    others = ", ".join(f"{peer.lane} {_rate(peer)} (TTFT p50 {_time(peer.ttft_s.p50)})" for peer in peers)
    return f"{text}; for the same work: {others}." if others else f"{text}."


def _speculation(crossover: Crossover) -> str:
    levels = tuple(each.level for each in crossover.speed_ups)
    by_tpot, by_rate = (crossing_text(each, levels) for each in (crossover.tpot, crossover.throughput))
    ratios = ", ".join(
        f"{each.tpot:.2f} at {each.level:g}" for each in crossover.speed_ups if each.tpot is not None
    )
    verdict = (
        f"{by_tpot}, both by TPOT and by tokens/s"
        if by_tpot == by_rate
        else f"{by_tpot} by TPOT; it {by_rate} by tokens/s"
    )
    speed_up = f" (TPOT of {crossover.baseline} / TPOT of {crossover.lane}: {ratios})" if ratios else ""
    return f"On {crossover.workload}, the lane {crossover.lane} {verdict}{speed_up}."


def _failures(summary: Summary) -> str:
    planned, recorded = summary.run.planned_requests, summary.requests
    text = f"Of {planned} planned requests "
    if recorded == planned and not summary.num_failures:
        return text + "all completed."
    text += f"{recorded - summary.num_failures} completed, {summary.num_failures} failed"
    if recorded < planned:
        text += f" and {planned - recorded} have no record"
    return text + "."


def _rate(stage: StageSummary) -> str:
    rate = stage.output_tokens_per_s
    return "no completed request" if rate is None else f"{rate.value:.0f} tokens/s"


def _time(time_s: Estimate | None) -> str:
    if time_s is None:
        return "unknown"
    value_s = time_s.value
    return f"{value_s:.1f} s" if value_s >= 1 else f"{value_s * 1000:.0f} ms"


def warnings(summary: Summary) -> tuple[str, ...]:
    """What takes weight from the figures, for the top of the report."""
    found = []
    if simulated := [lane.lane for lane in summary.lanes if "simulated" in lane.engine]:
        found.append(
            f"Simulated engine in {', '.join(simulated)}: these figures say nothing about a model or a machine."
        )
    if summary.run.status is not RunStatus.COMPLETE:
        found.append(f"The run is {summary.run.status}: not every planned request has a record.")
    if cut := [f"{stage.lane}/{stage.workload}/{stage.concurrency}" for stage in summary.stages if stage.cut]:
        found.append(f"Cut before their end: {', '.join(cut)}.")
    if wrong := sum(stage.wrong_lengths for stage in summary.stages):
        found.append(
            f"{wrong} answers are not {summary.run.output_tokens} tokens long: the lanes did not do the same work."
        )
    if summary.failures:
        count = sum(failure.count for failure in summary.failures)
        found.append(f"{count} requests did not complete; the reasons are listed below.")
    return tuple(found)
