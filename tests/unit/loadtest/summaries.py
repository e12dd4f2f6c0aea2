"""Summaries made by hand, in the shape of `loadtest.analysis.summary`: for tests of what is said of figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loadtest.analysis.crossover import find_crossovers
from loadtest.analysis.summary import (
    Agreement,
    ClientSummary,
    FailureCount,
    LaneSummary,
    Percentiles,
    StageSummary,
    Summary,
)
from loadtest.client.health import ClientCeiling
from loadtest.judge.capacity import Capacity, Probe, SearchSettings
from loadtest.judge.estimate import Estimate
from loadtest.judge.slo import SloSummary
from loadtest.offer.load import ClosedLoop, Load, constant_rate
from loadtest.run.directory import RunInfo
from tests.unit.loadtest.runs import STRATEGIES, run_file

SLO = "ttft_p95<2s,tpot_p95<300ms"
TOO_LATE = "the client was late: dispatch lag p99 is 180 ms, the limit 50 ms"


def spread(value: float, relative: float = 0.1) -> Estimate:
    return Estimate(value, value * (1 - relative), value * (1 + relative))


def percentiles(p50: float) -> Percentiles:
    return Percentiles(spread(p50), spread(p50 * 1.5), Estimate(p50 * 2))


def objective(attainment: float, rate_per_s: float, binding: str | None = "ttft_p95<2s") -> SloSummary:
    return SloSummary(
        attainment=Estimate(attainment, max(0.0, attainment - 0.04), min(1.0, attainment + 0.02)),
        goodput_per_s=spread(attainment * rate_per_s),
        holds=attainment >= 0.95,
        misses={} if attainment == 1 else {"ttft_p95<2s": 3},
        binding=None if attainment == 1 else binding,
    )


def stage(
    lane: str = "batched",
    load: Load | None = None,
    *,
    workload: str = "copy",
    requests: int = 40,
    failures: int = 0,
    tokens_per_s: float | None = 80.0,
    ttft_s: float = 0.4,
    tpot_s: float = 0.05,
    slo: SloSummary | None = None,
    agreements: tuple[Agreement, ...] = (),
    invalid: tuple[str, ...] = (),
) -> StageSummary:
    load = load or ClosedLoop(4)
    rate_per_s = load.rate_per_s if load.kind == "open" else None
    has_figures = tokens_per_s is not None
    nothing = Percentiles(None, None, None)
    return StageSummary(
        lane=lane,
        workload=workload,
        load=load,
        repeats=2,
        requests=requests,
        planned_requests=requests,
        failures=failures,
        offered_per_s=rate_per_s,
        achieved_per_s=rate_per_s or 3.1,
        output_tokens_per_s=spread(tokens_per_s) if tokens_per_s is not None else None,
        whole_tokens_per_s=tokens_per_s,
        repeat_tokens_per_s=(tokens_per_s, tokens_per_s),
        repeat_tpot_p50_s=(tpot_s, tpot_s) if has_figures else (None, None),
        window_s=20.0,
        mean_in_flight=3.8,
        ttft_s=percentiles(ttft_s) if has_figures else nothing,
        tpot_s=percentiles(tpot_s) if has_figures else nothing,
        e2e_s=percentiles(ttft_s + 47 * tpot_s) if has_figures else nothing,
        inter_chunk_s=percentiles(tpot_s) if has_figures else nothing,
        tokens_per_chunk=1.0 if has_figures else None,
        acceptance_rate=0.61 if lane == "speculative" else None,
        mean_acceptance_length=3.4 if lane == "speculative" else None,
        passes_per_token=1 / 3.4 if lane == "speculative" else None,
        prefix_hit_rate=None,
        memory_bytes=2**30,
        wrong_lengths=0,
        cut=False,
        duration_s=30.0,
        slo=slo,
        client=ClientSummary(
            dispatch_lag_p50_s=0.0012 if rate_per_s else None,
            dispatch_lag_p99_s=0.18 if invalid else 0.011 if rate_per_s else None,
            read_lag_p99_s=0.004,
            kernel_stamped=1.0,
            cpu_share=0.31,
            loop_lag_p99_s=0.006,
            of_ceiling=0.012,
        ),
        agreements=agreements,
        invalid=invalid,
        notes=(),
    )


def probe(
    rate_per_s: float, attainment: float, binding: str = "ttft_p95<2s", *, is_valid: bool = True
) -> Probe:
    holds = attainment >= 0.95
    return Probe(
        rate_per_s=rate_per_s,
        repeat=0,
        attainment=attainment,
        holds=holds,
        is_valid=is_valid,
        mean_in_flight=rate_per_s * 2.5,
        binding=None if holds else binding,
    )


def capacity(
    lane: str,
    rate_per_s: float | None,
    *,
    relative: float = 0.06,
    is_lower_bound: bool = False,
    probes: Sequence[Probe] | None = None,
) -> Capacity:
    made = rate_per_s if rate_per_s is not None else 0.5
    if probes is None:
        probes = [] if rate_per_s is None else [probe(made / 2, 1.0), probe(made, 0.97)]
        probes += [] if is_lower_bound else [probe(made * 1.25, 0.8)]
    return Capacity(
        lane=lane,
        workload="copy",
        rate_per_s=None if rate_per_s is None else spread(rate_per_s, relative),
        by_repeat=() if rate_per_s is None else (rate_per_s, rate_per_s),
        is_lower_bound=is_lower_bound,
        binding=None if is_lower_bound else "ttft_p95<2s",
        mean_in_flight=None if rate_per_s is None else rate_per_s * 2.5,
        probes=tuple(probes),
    )


def stage_of(lane: str, each: Probe) -> StageSummary:
    """The stage that a probe was."""
    return stage(
        lane,
        constant_rate(each.rate_per_s, 20),
        tokens_per_s=48 * each.rate_per_s,
        ttft_s=0.2 + 0.3 * each.rate_per_s**2 * (1 if each.holds else 3),
        slo=objective(each.attainment, each.rate_per_s),
        invalid=() if each.is_valid else (TOO_LATE,),
    )


def info(lanes: Sequence[str], planned: int) -> RunInfo:
    """A run of these lanes."""
    made = run_file([]).run
    return replace(
        made,
        planned_requests=planned,
        output_tokens=48,
        config={"lanes": [{"name": lane, "strategy": STRATEGIES[lane]} for lane in lanes]},
    )


def summary(
    stages: Sequence[StageSummary] = (),
    capacities: Sequence[Capacity] = (),
    *,
    slo: str | None = None,
    failures: tuple[FailureCount, ...] = (),
    engine: str = "vllm 0.32.0",
) -> Summary:
    """A run of these stages; a sweep's stages are those of its probes unless they are given."""
    found = list(stages) or [stage_of(each.lane, probe) for each in capacities for probe in each.probes]
    lanes = list(dict.fromkeys([each.lane for each in found] + [each.lane for each in capacities]))
    return Summary(
        run=replace(
            info(lanes, sum(each.planned_requests for each in found)),
            search=SearchSettings(first_rate_per_s=1.0) if capacities else None,
        ),
        slo=SLO if capacities else slo,
        ceiling=ClientCeiling(streams=64, tokens_per_s=31_000.0, requests_per_s=900.0),
        stages=tuple(found),
        lanes=tuple(
            LaneSummary(lane, STRATEGIES[lane], engine, "simulated" not in engine, 1, 2.0**30)
            for lane in lanes
        ),
        crossovers=find_crossovers(found, STRATEGIES),
        capacities=tuple(capacities),
        failures=failures,
    )


def sweep() -> Summary:
    """Speculation serves most, batching next, one at a time least."""
    return summary(
        capacities=(
            capacity("sequential", 0.4),
            capacity("batched", 1.3),
            capacity("speculative", 1.9),
        )
    )
