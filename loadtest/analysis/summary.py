"""What `summary.json` holds: a run in figures. Computed in `loadtest.analysis.run_summary`, shown by the report.

Intervals are 95 percent. Latencies are in seconds and of completed requests only, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter

from loadtest.client.health import ClientCeiling
from loadtest.client.lane_models import LaneModel
from loadtest.judge.capacity import Capacity
from loadtest.judge.estimate import Estimate
from loadtest.judge.slo import SloSummary
from loadtest.offer.load import Load
from loadtest.run.directory import RunInfo


@dataclass(frozen=True, slots=True)
class Percentiles:
    """None when there is nothing to take them of."""

    p50: Estimate | None
    p95: Estimate | None
    p99: Estimate | None


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """How well the load tool kept up.

    Attributes:
        dispatch_lag_*: from the instant a request was due to the instant the tool began on it; open loop only.
        read_lag_p99_s: of each request's longest: from data in the kernel to data read.
        kernel_stamped: share of requests whose arrivals the kernel stamped.
        cpu_share, loop_lag_p99_s: as in `ClientHealth`, the worst repeat's; None when not measured.
        of_ceiling: tokens/s read / the ceiling's; None without a ceiling.
    """

    dispatch_lag_p50_s: float | None
    dispatch_lag_p99_s: float | None
    read_lag_p99_s: float | None
    kernel_stamped: float
    cpu_share: float | None
    loop_lag_p99_s: float | None
    of_ceiling: float | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """One quantity as client and server saw it.

    Attributes:
        tolerance: the largest difference that passes, in the quantity's own unit.
    """

    quantity: str
    client: float
    server: float
    tolerance: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class StageSummary:
    """A lane under a workload and a load, its repeats together.

    Attributes:
        requests: records of those that count; failures are among them.
        planned_requests: what the plan asked for; more than `requests` when the stage was cut.
        failures: records that did not complete, whatever the reason.
        offered_per_s: requests/s of the schedule; None in a closed loop.
        achieved_per_s: requests/s that the tool really began.
        output_tokens_per_s: output tokens that came in the steady part (`analysis/window.py`) / its length.
        whole_tokens_per_s: output tokens of completed requests / (last finish - first schedule): how the load came
            and went is in it.
        repeat_tokens_per_s, repeat_tpot_p50_s: of each repeat by itself.
        window_s: length of the steady part, all repeats together.
        mean_in_flight: mean number of requests between due and end.
        tokens_per_chunk: output tokens / chunks with text.
        prefix_hit_rate: prompt tokens found in the engine's prefix cache / prompt tokens; None when not told.
        memory_bytes: of the lane's replicas, the largest seen.
        wrong_lengths: completed answers that are not as long as was asked.
        invalid: why these figures may not be used; empty when they may.
        notes: what a reader must know to trust the row.
    """

    lane: str
    workload: str
    load: Load
    repeats: int
    requests: int
    planned_requests: int
    failures: int
    offered_per_s: float | None
    achieved_per_s: float
    output_tokens_per_s: Estimate | None
    whole_tokens_per_s: float | None
    repeat_tokens_per_s: tuple[float | None, ...]
    repeat_tpot_p50_s: tuple[float | None, ...]
    window_s: float
    mean_in_flight: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    inter_chunk_s: Percentiles
    tokens_per_chunk: float | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    passes_per_token: float | None
    prefix_hit_rate: float | None
    memory_bytes: float | None
    wrong_lengths: int
    cut: bool
    duration_s: float
    slo: SloSummary | None
    client: ClientSummary
    agreements: tuple[Agreement, ...]
    invalid: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def key(self) -> str:
        """What names the stage in notes and warnings."""
        return f"{self.lane}/{self.workload}/{self.load.label}"

    @property
    def concurrency(self) -> int | None:
        """Users of a closed loop; None for any other load."""
        return self.load.users if self.load.kind == "closed" else None


@dataclass(frozen=True, slots=True)
class LaneSummary:
    """A lane over the whole run.

    Attributes:
        has_model: whether its engines computed with a model; where not, its figures say nothing of one.
        model: what it served; None in a run of a lab that did not say.
        memory_bytes: the largest seen; None when no replica told.
    """

    lane: str
    strategy: str
    engine: str
    has_model: bool
    replicas: int
    memory_bytes: float | None
    model: LaneModel | None = None


@dataclass(frozen=True, slots=True)
class FailureCount:
    """How often a reason ended a request of a lane; warm-up included, for it can fail too."""

    lane: str
    reason: str
    count: int
    example: str


class Verdict(StrEnum):
    """What the intervals of a ratio say about the levels measured."""

    ALWAYS = "pays at every level measured"
    NEVER = "pays at no level measured"
    UP_TO = "pays at low levels, costs at high ones"
    FROM = "costs at low levels, pays at high ones"
    MIXED = "crosses more than once"
    PARTLY = "settled at some levels only"
    OPEN = "cannot be told apart at any level"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Speculative against baseline at one level; above 1 speculation pays. None: not measured on both.

    Attributes:
        level: users of a closed loop, requests/s of an open one; the crossover names the unit.
        tpot: baseline TPOT p50 / speculative TPOT p50.
        throughput: speculative tokens/s / baseline tokens/s.
    """

    level: float
    tpot: Estimate | None
    throughput: Estimate | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """How one of the two ratios stands to 1.

    Attributes:
        pays, costs, open: levels at which its interval is above 1, below it, and holds it.
        levels: where it crosses 1 between two settled levels, interpolated on a log scale.
    """

    verdict: Verdict
    pays: tuple[float, ...]
    costs: tuple[float, ...]
    open: tuple[float, ...]
    levels: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Crossover:
    """A speculative lane against the baseline lane on one workload, over levels of one kind of load.

    Attributes:
        unit: of the levels: `users`, or `requests/s` and the process of arrivals.
        left_out: levels with a stage that may not be used, or was cut.
        smallest_tpot, smallest_throughput: the smallest speed-up that this many repeats of these stages can settle.
        repeats: of each level; with 1 the intervals rest on an assumed difference between runs.
    """

    workload: str
    lane: str
    baseline: str
    unit: str
    speed_ups: tuple[SpeedUp, ...]
    tpot: Crossing
    throughput: Crossing
    left_out: tuple[float, ...] = ()
    smallest_tpot: float | None = None
    smallest_throughput: float | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole run.

    Attributes:
        slo: the objective in its own words; None when none was given.
        capacities: of a sweep; empty for a bench.
    """

    run: RunInfo
    slo: str | None
    ceiling: ClientCeiling | None
    stages: tuple[StageSummary, ...]
    lanes: tuple[LaneSummary, ...]
    crossovers: tuple[Crossover, ...]
    capacities: tuple[Capacity, ...]
    failures: tuple[FailureCount, ...]

    @property
    def requests(self) -> int:
        return sum(stage.requests for stage in self.stages)

    @property
    def num_failures(self) -> int:
        return sum(stage.failures for stage in self.stages)

    @property
    def spoilt_capacities(self) -> tuple[Capacity, ...]:
        """Those that are not known, with invalid probes among theirs."""
        return tuple(
            capacity
            for capacity in self.capacities
            if capacity.rate_per_s is None and not all(probe.is_valid for probe in capacity.probes)
        )

    @property
    def is_valid(self) -> bool:
        """Whether every stage's figures may be used; of a sweep, whether every search had the probes it needs.

        A capacity rests on valid probes alone: the search makes an invalid one again. That a lane holds no
        rate is a result too, unless it is for want of valid probes.
        """
        if self.capacities:
            return not self.spoilt_capacities
        return not any(stage.invalid for stage in self.stages)


_ADAPTER = TypeAdapter(Summary)


def summary_json(summary: Summary) -> str:
    return _ADAPTER.dump_json(summary, indent=1).decode() + "\n"
