"""What a run found, in sentences with their numbers. Nothing here is known before the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from loadtest.analysis.summary import Crossing, Crossover, StageSummary, Summary, Verdict
from loadtest.client.lane_models import alike
from loadtest.client.record import ClientReason
from loadtest.judge.estimate import Estimate
from loadtest.judge.settled import ASSUMED_STAGE_SD
from loadtest.judge.wording import count, estimate, number, rate, share, time
from loadtest.report import capacity_findings
from loadtest.run.directory import RunStatus

ADVICE = (
    "What to do: give the load tool a core that nothing else uses, or another machine; offer less, or spread "
    "the load over more processes; then run again. Where client and server disagree, look for other traffic "
    "on the lab and for a replica that restarted."
)


CONCURRENCY = "concurrency "
DISTURBED_RATIO = 1.5  # of tokens/s; runs with nothing beside them had 1.1 to 1.3


@dataclass(frozen=True, slots=True)
class Invalidity:
    """Why figures of a run may not be used, for the very top of the report."""

    headline: str
    advice: str = ADVICE


def invalidity(summary: Summary) -> Invalidity | None:
    """None for a run that may be used: every stage, or in a sweep enough probes of every lane."""
    if summary.is_valid:
        return None
    bad = [stage for stage in summary.stages if stage.invalid]
    if spoilt := summary.spoilt_capacities:
        lanes = [capacity.lane for capacity in spoilt]
        bad = [stage for stage in bad if stage.lane in lanes]
        headline = (
            f"INVALID: {count(len(bad), 'stage')} of {', '.join(lanes)} may not be used. "
            "No capacity is known there."
        )
    elif len(bad) == len(summary.stages):
        headline = (
            f"INVALID: all {count(len(bad), 'stage')} may not be used. Nothing is concluded from this run."
        )
    else:
        headline = (
            f"INVALID: {len(bad)} of {count(len(summary.stages), 'stage')} may not be used. "
            "Nothing is concluded from them."
        )
    return Invalidity(headline)


def findings(summary: Summary) -> tuple[str, ...]:
    """The opening of the report: the answer, what speculation did, and whether all went well.

    Stages that may not be used are left out of every sentence but the last.
    """
    usable = [stage for stage in summary.stages if not stage.invalid]
    if summary.capacities:
        parts = list(capacity_findings.sentences(summary))
    else:
        parts = [*_objective(usable, summary.slo), *_throughputs(usable, summary)]
    parts += [_speculation(each) for each in summary.crossovers if each.speed_ups]
    return (*parts, *power(summary.crossovers), *_alike(summary), *_disturbed(usable), _failures(summary))


def _disturbed(stages: Sequence[StageSummary]) -> Iterator[str]:
    """Whether the machine was another one from repeat to repeat."""
    known = [[rate for rate in stage.repeat_tokens_per_s if rate] for stage in stages]
    ratios = [max(rates) / min(rates) for rates in known if len(rates) > 1]
    if ratios and (middle := median(ratios)) > DISTURBED_RATIO:
        yield (
            f"The machine was not the same throughout: one repeat of a stage gave {middle:.1f} times the tokens/s "
            f"of another of the same stage (median of {count(len(ratios), 'stage')}). Other work used it, or it is "
            "shared. Run again with nothing else on it before you believe a comparison."
        )


def crossing_text(crossing: Crossing, unit: str = "users") -> str:
    """What is settled of a ratio and what is not, in words."""
    if crossing.verdict is Verdict.UNKNOWN:
        return "could not be compared"
    parts = [
        f"{said} at {_levels(levels, unit)}"
        for said, levels in (
            ("pays", crossing.pays),
            ("costs", crossing.costs),
            ("cannot be told apart", crossing.open),
        )
        if levels
    ]
    text = ", ".join(parts)
    if len(crossing.levels) == 1:
        text += f" (about even at {_levels(crossing.levels, unit, '.1f')})"
    return text


def _levels(levels: Sequence[float], unit: str, form: str = "g") -> str:
    *most, last = (f"{level:{form}}" for level in levels)
    shown = f"{', '.join(most)} and {last}" if most else last
    if not unit.startswith("users"):
        return f"{shown} requests/s"
    return f"{shown} user" + ("" if shown == "1" else "s")


def _objective(stages: Sequence[StageSummary], slo: str | None) -> Iterator[str]:
    """Of a run with an objective: where the most goodput was, and which loads each lane held."""
    judged = [(stage, stage.slo) for stage in stages if stage.slo is not None]
    if not judged:
        return
    best, kept = max(judged, key=lambda each: each[1].goodput_per_s.value)
    if kept.goodput_per_s.value == 0:
        yield f"No request met the objective {slo}."
        return
    yield (
        f"Within {slo} the highest goodput was {rate(kept.goodput_per_s)}, on the lane {best.lane} with "
        f"{best.workload} at {_load(best)}, where {share(kept.attainment)} of requests met it"
        + (
            ". Failures count as misses."
            if kept.holds
            else f"; it does not hold there: {kept.binding} binds."
        )
    )
    for lane, workload in dict.fromkeys((stage.lane, stage.workload) for stage, _ in judged):
        own = [(stage, slo_) for stage, slo_ in judged if (stage.lane, stage.workload) == (lane, workload)]
        held = [_load(stage) for stage, each in own if each.holds]
        broken = [f"{_load(stage)} ({each.binding})" for stage, each in own if not each.holds]
        text = f"On {workload}, {lane} holds it at {_listed(held) or 'no load measured'}"
        yield text + (f"; not at {_listed(broken)}." if broken else ".")


def lanes_that_count_alike(summary: Summary) -> tuple[tuple[str, ...], ...]:
    """Lanes in groups that count the same tokens; all are one where the lab did not say what they serve."""
    models = {lane.lane: lane.model for lane in summary.lanes if lane.model is not None}
    return (
        alike(models) if len(models) == len(summary.lanes) else (tuple(lane.lane for lane in summary.lanes),)
    )


def _throughputs(stages: Sequence[StageSummary], summary: Summary) -> Iterator[str]:
    """Tokens/s are compared among lanes that count the same tokens."""
    groups = lanes_that_count_alike(summary)
    if len(groups) == 1:
        yield _throughput(stages, summary)
        return
    for group in groups:
        if own := [stage for stage in stages if stage.lane in group]:
            yield f"Of {_listed(group)}: {_throughput(own, summary)}"


def _alike(summary: Summary) -> Iterator[str]:
    """What may be compared, where not all may."""
    groups = lanes_that_count_alike(summary)
    if len(groups) == 1:
        return
    names = {lane.lane: lane.model.name for lane in summary.lanes if lane.model is not None}
    told = "; ".join(
        f"{_listed(group)} ({', '.join(dict.fromkeys(names[lane] for lane in group))})" for group in groups
    )
    yield (
        f"Lanes of one tokenizer: {told}. Tokens/s and TPOT are compared only among these; requests/s, TTFT and "
        "E2E latency between all, if their answers are worth the same."
    )


def _throughput(stages: Sequence[StageSummary], summary: Summary) -> str:
    """The best stage, and what its peers under the same work and load did."""
    rates = [(stage, stage.output_tokens_per_s) for stage in stages if stage.output_tokens_per_s is not None]
    if not rates:
        if len(stages) < len(summary.stages):
            return "No stage that may be used has figures, so there is no answer."
        return "No request completed, so there are no figures."
    best, throughput = max(rates, key=lambda each: each[1].value)
    peers = [
        stage
        for stage in stages
        if (stage.workload, stage.load) == (best.workload, best.load) and stage.lane != best.lane
    ]
    text = (
        f"The highest throughput was {number(throughput.value, None)} tokens/s, on the lane {best.lane} with the "
        f"workload {best.workload} at {_load(best)} (TTFT p50 {_time(best.ttft_s.p50)}, TPOT p50 "
        f"{_time(best.tpot_s.p50)})"
    )
    others = ", ".join(
        f"{peer.lane} {_tokens_per_s(peer)} (TTFT p50 {_time(peer.ttft_s.p50)})" for peer in peers
    )
    return f"{text}; for the same work: {others}." if others else f"{text}."


def _speculation(crossover: Crossover) -> str:
    by_tpot, by_rate = (
        crossing_text(each, crossover.unit) for each in (crossover.tpot, crossover.throughput)
    )
    tpots, rates = (
        ", ".join(
            f"{estimate(ratio, 2)} at {each.level:g}"
            for each in crossover.speed_ups
            if (ratio := getattr(each, name)) is not None
        )
        for name in ("tpot", "throughput")
    )
    parts = [f"Speculation on {crossover.workload} ({crossover.lane} against {crossover.baseline}): "]
    if crossover.tpot.verdict is crossover.throughput.verdict and by_tpot == by_rate:
        parts.append(f"it {by_tpot}, by TPOT ({tpots}) and by tokens/s ({rates}).")
    else:
        parts.append(
            f"by TPOT it {by_tpot} ({tpots or 'no ratio'}); by tokens/s it {by_rate} ({rates or 'no ratio'})."
        )
    if crossover.left_out:
        left_out = _levels(crossover.left_out, crossover.unit)
        parts.append(f" Left out, for a stage there may not be used or was cut: {left_out}.")
    return "".join(parts)


def power(crossovers: Sequence[Crossover]) -> Iterator[str]:
    """The smallest speed-ups that a run could settle, and what its intervals rest on."""
    for repeats, group in groupby(crossovers, key=lambda each: each.repeats):
        smallest = [
            each
            for crossover in group
            for each in (crossover.smallest_tpot, crossover.smallest_throughput)
            if each is not None
        ]
        if not smallest:
            continue
        sizes = " to ".join(dict.fromkeys(f"{size:.2f}" for size in (min(smallest), max(smallest))))
        rests = (
            f"{repeats} repeats of each level"
            if repeats > 1
            else f"one run of each level and an assumed {ASSUMED_STAGE_SD:.0%} between two runs of a stage: "
            "--repeats 3 measures it"
        )
        yield f"A ratio above {sizes}, or below its inverse, is settled by this run. It rests on {rests}."


def _failures(summary: Summary) -> str:
    planned, recorded = summary.run.planned_requests, summary.requests
    if summary.run.search is not None:
        if not summary.num_failures:
            return f"Of {count(recorded, 'request')} all completed."
        given_up = _given_up(summary)
        text = f"Of {count(recorded, 'request')} {recorded - summary.num_failures} completed"
        text += f", {summary.num_failures - given_up} failed"
        if given_up:
            text += f" and {given_up} were given up with probes that could not hold any more"
        return text + "."
    text = f"Of {planned} planned requests "
    if recorded == planned and not summary.num_failures:
        return text + "all completed."
    text += f"{recorded - summary.num_failures} completed, {summary.num_failures} failed"
    if recorded < planned:
        text += f" and {planned - recorded} have no record"
    return text + "."


def _given_up(summary: Summary) -> int:
    """Requests that the tool ended because their stage was decided."""
    return sum(each.count for each in summary.failures if each.reason == ClientReason.STAGE_HOPELESS)


def _listed(loads: Sequence[str]) -> str:
    """Loads with commas, and the word `concurrency` but once in a row of them."""
    before = ["", *loads]
    return ", ".join(
        load.removeprefix(CONCURRENCY) if last.startswith(CONCURRENCY) else load
        for last, load in zip(before, loads, strict=False)
    )


def _load(stage: StageSummary) -> str:
    return f"{CONCURRENCY}{stage.concurrency}" if stage.concurrency is not None else stage.load.label


def _tokens_per_s(stage: StageSummary) -> str:
    tokens_per_s = stage.output_tokens_per_s
    return "no completed request" if tokens_per_s is None else f"{number(tokens_per_s.value, None)} tokens/s"


def _time(time_s: Estimate | None) -> str:
    """The value alone: the opening is for reading, the table has the intervals."""
    return time(None if time_s is None else time_s.value)


def warnings(summary: Summary) -> tuple[str, ...]:
    """What takes weight from the figures, for the top of the report."""
    sentences = []
    if simulated := [lane.lane for lane in summary.lanes if not lane.has_model]:
        sentences.append(
            f"Simulated engine in {', '.join(simulated)}: these figures say nothing about a model or a machine."
        )
    if summary.run.status is not RunStatus.COMPLETE:
        sentences.append(f"The run is {summary.run.status}: not every planned request has a record.")
    if summary.run.search is not None:
        # A search gives hopeless probes up and makes invalid ones again: neither weakens what it found.
        if bad := sum(not probe.is_valid for each in summary.capacities for probe in each.probes):
            sentences.append(f"{count(bad, 'probe')} came out invalid and counted for nothing.")
    elif cut := [stage.key for stage in summary.stages if stage.cut]:
        sentences.append(f"Cut before their end: {', '.join(cut)}.")
    if wrong := sum(stage.wrong_lengths for stage in summary.stages):
        sentences.append(f"{wrong} answers are not as long as was asked: the lanes did not do the same work.")
    reasons: Counter[str] = Counter()
    for failure in summary.failures:
        if failure.reason != ClientReason.STAGE_HOPELESS:
            reasons[failure.reason] += failure.count
    if failed := reasons.total():
        named = ", ".join(f"{of_it} {reason}" for reason, of_it in reasons.most_common())
        sentences.append(f"{count(failed, 'request')} did not complete: {named}.")
    return tuple(sentences)
