"""Runs that make a plan: each lane with as few replicas as hold the objective, or fleets that are given."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.judge.slo import Slo
from loadtest.simulate.lanes import Candidate
from loadtest.simulate.verdict import SloWatch, Verdict, judge, percentile
from serving.calibration.profile import KIND_OF_WORKLOAD
from serving.config import SchedulerConfig
from serving.core.speculation.text_kind import TextKind
from serving.progress import Say
from serving.simulation.plan import least_replicas
from serving.simulation.planned_lab import Offered, PlannedLab, PlannedRun

Fleet = tuple[tuple[Candidate, int], ...]


@dataclass(frozen=True, slots=True)
class LaneUse:
    """What a lane of a fleet did.

    Attributes:
        num_requests: that it served.
        by_text: of them, by kind of text.
        slots_share: of its slots that requests held, on the mean over the time until the last one of all ended.
    """

    lane: str
    replicas: int
    num_requests: int
    by_text: dict[str, int]
    slots_share: float


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """A fleet that was simulated.

    Attributes:
        name: of its lanes.
        replicas: of all lanes together.
        ttft_s, tpot_s: p50 and p95, of the requests that were served; 0 where none was.
        output_tokens_per_s: of served requests, over the time until the last one ended.
        slots_share: of all slots that requests held, on the mean over that time.
        took_s: of the simulation, by the wall clock.
        lanes: each of its lanes.
    """

    name: str
    replicas: int
    verdict: Verdict
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    output_tokens_per_s: float
    slots_share: float
    num_refused: int
    num_ended: int
    was_given_up: bool
    took_s: float
    lanes: tuple[LaneUse, ...] = ()


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane, and the fewest of its replicas that hold; `enough` is None where the most do not.

    Attributes:
        tried: every fleet that was simulated for it, in order.
    """

    lane: str
    enough: PlannedFleet | None
    tried: tuple[PlannedFleet, ...]

    @property
    def one_too_few(self) -> PlannedFleet | None:
        """The largest fleet that does not hold; None where one replica is enough."""
        failed = [fleet for fleet in self.tried if not fleet.verdict.holds]
        return max(failed, key=lambda fleet: fleet.replicas, default=None)

    @property
    def least_possible(self) -> int:
        """The fewest replicas that may be enough: one more than the most that are settled to be too few."""
        most = math.inf if self.enough is None else self.enough.replicas
        too_few = [
            fleet.replicas
            for fleet in self.tried
            if fleet.verdict.is_settled and not fleet.verdict.holds and fleet.replicas < most
        ]
        return 1 + max(too_few, default=0)

    @property
    def most_possible(self) -> int | None:
        """The fewest replicas that are settled to be enough; None where that is known of no fleet."""
        enough = [fleet.replicas for fleet in self.tried if fleet.verdict.is_settled and fleet.verdict.holds]
        return min(enough, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether so many requests settle how many replicas are the fewest, or that the most are not enough."""
        if self.enough is None:
            return self.one_too_few is not None and self.one_too_few.verdict.is_settled
        return self.least_possible == self.most_possible


class Planner:
    """Simulates fleets on the same requests.

    Args:
        cell_replicas: replicas of one scheduler's cell at most; None: one scheduler for all.
        seed: of how many drafts are accepted.
        text: the mix's kinds of text, by name.
        shares_cores: all replicas of a fleet take turns on the same cores.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        offered: Sequence[Offered],
        slo: Slo,
        say: Say,
        *,
        cell_replicas: int | None,
        seed: int,
        text: Sequence[str],
        shares_cores: bool = False,
    ) -> None:
        self._config = config
        self._offered = offered
        self._slo = slo
        self._say = say
        self._cell_replicas = cell_replicas
        self._seed = seed
        self._text = tuple(text)
        self._text_of = np.array([request.kind for request in offered])
        self._text_kinds = [KIND_OF_WORKLOAD.get(name, TextKind.OPEN) for name in text]
        self._shares_cores = shares_cores

    def fewest(self, candidate: Candidate, most: int) -> LanePlan:
        """Search for the fewest replicas of a lane that hold."""
        tried: list[PlannedFleet] = []

        def holds(replicas: int) -> bool:
            tried.append(self.simulate(((candidate, replicas),), gives_up=True))
            return tried[-1].verdict.holds

        duration_s = self._offered[-1].at_s - self._offered[0].at_s
        rate_rps = len(self._offered) / duration_s if duration_s else math.inf
        guess = math.ceil(min(rate_rps / candidate.capacity_rps, most))
        found = least_replicas(holds, guess, most)
        enough = next((fleet for fleet in tried if fleet.replicas == found), None)
        return LanePlan(candidate.name, enough, tuple(tried))

    def simulate(self, fleet: Fleet, *, gives_up: bool = False) -> PlannedFleet:
        """Simulate one fleet; where it may be given up, no longer than the objective can hold."""
        name = " + ".join(candidate.name for candidate, _ in fleet)
        replicas = sum(count for _, count in fleet)
        what = f"{name}, {replicas} replica{'s' if replicas > 1 else ''}"
        self._say(f"simulating {what}")
        num_cells = 1 if self._cell_replicas is None else math.ceil(replicas / self._cell_replicas)
        started_at_s = time.perf_counter()
        lab = PlannedLab(
            self._config,
            [(candidate.model, count) for candidate, count in fleet],
            self._offered,
            num_cells=num_cells,
            seed=self._seed,
            text_kinds=self._text_kinds,
            shares_cores=self._shares_cores,
        )
        run = lab.run(
            watch=SloWatch(self._slo, len(self._offered)) if gives_up else None,
            progress=lambda ended: self._progress(what, ended),
        )
        took_s = time.perf_counter() - started_at_s
        return self._planned(name, replicas, run, took_s)

    def _progress(self, what: str, ended: int) -> None:
        tenths = 10 * ended // len(self._offered)
        # Where there is no terminal each change is a line.
        self._say(f"simulating {what}: {10 * tenths}% of {len(self._offered):,} requests")

    def _planned(self, name: str, replicas: int, run: PlannedRun, took_s: float) -> PlannedFleet:
        served = np.isfinite(run.e2e_s)
        ttft_s, tpot_s = run.ttft_s[served], run.tpot_s[served]
        return PlannedFleet(
            name=name,
            replicas=replicas,
            verdict=judge(self._slo, run),
            ttft_s=(percentile(ttft_s, 0.5), percentile(ttft_s, 0.95)) if served.any() else (0.0, 0.0),
            tpot_s=(percentile(tpot_s, 0.5), percentile(tpot_s, 0.95)) if served.any() else (0.0, 0.0),
            output_tokens_per_s=float(run.output_tokens[served].sum()) / run.lasted_s
            if run.lasted_s
            else 0.0,
            slots_share=float(np.mean([use.slots_share for use in run.replicas])),
            num_refused=run.num_refused,
            num_ended=int(run.ended.sum()),
            was_given_up=run.was_given_up,
            took_s=took_s,
            lanes=self._lane_uses(run),
        )

    def _lane_uses(self, run: PlannedRun) -> tuple[LaneUse, ...]:
        is_served = run.ended & (run.served_by >= 0)
        uses = []
        for lane in dict.fromkeys(use.lane for use in run.replicas):
            places = [place for place, use in enumerate(run.replicas) if use.lane == lane]
            text_of = self._text_of[is_served & np.isin(run.served_by, places)]
            uses.append(
                LaneUse(
                    lane,
                    len(places),
                    len(text_of),
                    {name: int((text_of == kind).sum()) for kind, name in enumerate(self._text)},
                    float(np.mean([run.replicas[place].slots_share for place in places])),
                )
            )
        return tuple(uses)
