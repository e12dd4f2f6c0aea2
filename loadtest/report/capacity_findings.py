"""The answer of a sweep in sentences: which lane serves the most within the objective, and what binds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadtest.analysis.summary import Summary
from loadtest.judge.capacity import Capacity
from loadtest.judge.estimate import Estimate, is_settled, ratio_of_estimates
from loadtest.judge.wording import count, estimate, number, rate, share
from serving.core.lane import DRAFTING, Strategy


def sentences(summary: Summary) -> Iterator[str]:
    """For each workload: the best lane and its lead, the others, and what speculation did."""
    for workload in dict.fromkeys(capacity.workload for capacity in summary.capacities):
        capacities = [capacity for capacity in summary.capacities if capacity.workload == workload]
        ranked = sorted(_known(capacities), key=lambda each: each[1].value, reverse=True)
        if ranked:
            yield from _answer(ranked, summary)
        else:
            yield f"On {workload} no lane was found to hold {summary.slo}."
        yield from (_not_found(each) for each in capacities if each.rate_per_s is None)
        yield from _speculation(ranked, summary)


def _known(capacities: Sequence[Capacity]) -> list[tuple[Capacity, Estimate]]:
    return [(each, each.rate_per_s) for each in capacities if each.rate_per_s is not None]


def _answer(ranked: Sequence[tuple[Capacity, Estimate]], summary: Summary) -> Iterator[str]:
    (best, best_rate), others = ranked[0], ranked[1:]
    run = summary.run
    text = (
        f"On {best.workload}, with {run.model['name']} ({run.model['dtype']} on {run.model['device']}) on "
        f"{hardware(summary)}, the lane {best.lane} serves {_rate(best, best_rate)} within {summary.slo}"
    )
    if others:
        text += _lead(ranked[0], others[0])
    elif len(summary.lanes) == 1:
        text += "; no other lane was tried"
    yield f"{text}. Failures count as misses."
    yield _limit(best)
    for capacity, rate_per_s in others:
        yield f"{capacity.lane} serves {_rate(capacity, rate_per_s)}. {_limit(capacity)}"


def hardware(summary: Summary) -> str:
    """The lab's processors, in a few words."""
    machine = summary.run.machine
    if gpus := [gpu["name"] for gpu in machine["gpus"]]:
        return " and ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return f"{count(machine['usable_cores'], 'core')} of {machine['cpu_model']}"


def _rate(capacity: Capacity, rate_per_s: Estimate) -> str:
    return ("at least " if capacity.is_lower_bound else "") + rate(rate_per_s)


def _lead(best: tuple[Capacity, Estimate], next_: tuple[Capacity, Estimate]) -> str:
    (first, first_rate), (second, second_rate) = best, next_
    peer = f"the next best, {second.lane}"
    if second.is_lower_bound:
        return f"; {second.lane} still held at the highest rate tried for it, so no ratio is given"
    ratio = ratio_of_estimates(second_rate, first_rate)
    if is_settled(ratio) is False:
        return f"; it cannot be told apart from {peer} (ratio {estimate(ratio, 2)})"
    least = "at least " if first.is_lower_bound else ""
    text = f", {least}{estimate(ratio, 2)} times {peer}"
    return text if is_settled(ratio) else f"{text} (a ratio without an interval: it needs repeats)"


def _limit(capacity: Capacity) -> str:
    """What broke above the rate, and how many were in flight at it."""
    in_flight = (
        ""
        if capacity.mean_in_flight is None
        else f" {number(capacity.mean_in_flight, 1)} requests are in flight at that rate."
    )
    if capacity.is_lower_bound:
        return f"It still held at the highest rate tried, so its limit is not known.{in_flight}"
    if capacity.binding is None:
        return f"What binds above it is not known.{in_flight}"
    return f"Above it {capacity.binding} breaks first.{in_flight}"


def _not_found(capacity: Capacity) -> str:
    """Why a lane has no capacity."""
    valid = [probe for probe in capacity.probes if probe.is_valid]
    if not capacity.probes:
        return f"{capacity.lane} was not probed, so nothing is known of it."
    if not valid:
        return f"{capacity.lane}: {_all(len(capacity.probes))} INVALID, so nothing is known of it."
    lowest = min(valid, key=lambda probe: probe.rate_per_s)
    if lowest.holds:
        return f"{capacity.lane}: the search ended before it found a rate that it can keep up."
    return (
        f"{capacity.lane} held it at no rate tried: at the lowest, {rate(lowest.rate_per_s)}, "
        f"{share(lowest.attainment)} of requests met it; {lowest.binding or 'no single limit'} binds."
    )


def _all(probes: int) -> str:
    return "the only probe is" if probes == 1 else f"all {probes} probes are"


def _speculation(ranked: Sequence[tuple[Capacity, Estimate]], summary: Summary) -> Iterator[str]:
    """Each speculative lane against the batched one, where the first sentence does not say it already."""
    strategies = {lane.lane: lane.strategy for lane in summary.lanes}
    base = next((each for each in ranked if strategies.get(each[0].lane) == Strategy.BATCHED), None)
    if base is None or base[0].is_lower_bound:
        return
    models = {lane.lane: lane.model and lane.model.path for lane in summary.lanes}
    for capacity, rate_per_s in ranked:
        if models.get(capacity.lane) != models.get(base[0].lane):
            continue  # what another model does says nothing of speculation
        if strategies.get(capacity.lane) not in DRAFTING or [capacity, base[0]] == [
            each for each, _ in ranked[:2]
        ]:
            continue
        ratio = ratio_of_estimates(base[1], rate_per_s)
        if is_settled(ratio) is False:
            verdict = "neither raises nor lowers it measurably"
        elif capacity.is_lower_bound:
            verdict = "is not known to its limit" if ratio.value < 1 else "raises it"
        else:
            verdict = "raises it" if ratio.value > 1 else "lowers it"
        yield (
            f"Against {base[0].lane} in the rate within the objective, speculation ({capacity.lane}) {verdict}: "
            f"{estimate(ratio, 2)} times."
        )
