"""The stages of a sweep: each lane's capacity search in turn, so that a machine that drifts does so for all.

Pure: it says what to run next and takes in what was measured. `loadtest.sweep` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.analysis.run_summary import probe_of
from loadtest.analysis.stage_summary import Repeat
from loadtest.client.health import ClientCeiling
from loadtest.judge.capacity import CapacitySearch, SearchSettings
from loadtest.judge.slo import Slo
from loadtest.offer.arrivals import schedule
from loadtest.offer.load import Process, constant_rate
from loadtest.run.plan import StagePlan, schedule_seed
from loadtest.run.planning import plan_open


@dataclass(frozen=True, slots=True)
class ProbeLength:
    """How long a probe offers its rate: long enough for both, yet not longer than `most_s`.

    Attributes:
        least_s: seconds, at least.
        requests: expected requests, at least.
    """

    least_s: float = 20.0
    requests: int = 30
    most_s: float = 60.0

    def duration_s(self, rate_per_s: float) -> float:
        return min(self.most_s, max(self.least_s, self.requests / rate_per_s))


class CapacitySweep:
    """Ask `next_stage`, run it, `record` it, until there is none. What it finds is in the records.

    Attributes:
        ceiling: of the client, by which a probe may be invalid; known only when the run begins.

    Args:
        settings: of each search; `first_rate_per_s` is where every lane begins.
        seed: of prompts and arrivals.
    """

    def __init__(
        self,
        lanes: Sequence[str],
        workload: str,
        slo: Slo,
        settings: SearchSettings,
        length: ProbeLength,
        *,
        process: Process,
        output_tokens: int | None,
        seed: int,
    ) -> None:
        self._searches = {lane: CapacitySearch(lane, workload, settings) for lane in lanes}
        self._turns = list(lanes)
        self._workload = workload
        self._slo = slo
        self._length = length
        self._process = process
        self._output_tokens = output_tokens
        self._seed = seed
        self.ceiling: ClientCeiling | None = None
        self._first_prompts: dict[str, int] = {}
        self._next_prompt = 0

    def next_stage(self) -> StagePlan | None:
        """The next probe of the lane whose turn it is; None when every search is done or spent."""
        while self._turns:
            lane = self._turns[0]
            asked = self._searches[lane].next_probe()
            if asked is not None:
                return self._stage(lane, *asked)
            self._turns.pop(0)
        return None

    def record(self, repeat: Repeat) -> None:
        """Take in the stage that was asked for."""
        self._record(repeat, repeat.stage.finished_at_s - repeat.stage.started_at_s)

    def replay(self, repeat: Repeat) -> None:
        """Take in a stage of an earlier part of the sweep, in the order they ran; its time is not counted.

        Raises:
            ValueError: the lane's search asks for another.
        """
        plan = repeat.stage.plan
        search = self._searches.get(plan.lane)
        probe = None if search is None else search.next_probe()
        asked = None if probe is None else self._stage(plan.lane, *probe)
        if asked is None or (asked.key, asked.first_prompt, asked.requests) != (
            plan.key, plan.first_prompt, plan.requests,
        ):  # fmt: skip
            what = "nothing more" if asked is None else f"{asked.key} with {asked.requests} requests"
            raise ValueError(
                f"stage {plan.key} with {plan.requests} requests cannot be gone through again: "
                f"by its settings the search asks for {what} there"
            )
        self._record(repeat, took_s=0.0)

    def _record(self, repeat: Repeat, took_s: float) -> None:
        lane = repeat.stage.plan.lane
        self._searches[lane].record(probe_of(repeat, self._slo, self.ceiling), took_s)
        self._turns.remove(lane)
        self._turns.append(lane)

    def _stage(self, lane: str, rate_per_s: float, repeat: int) -> StagePlan:
        duration_s = self._length.duration_s(rate_per_s)
        while True:
            load = constant_rate(rate_per_s, duration_s, self._process)
            if schedule(
                load, schedule_seed(StagePlan(lane, self._workload, load, 1, repeat=repeat), self._seed)
            ):
                break
            duration_s *= 2  # a low rate can leave a stretch without any arrival
        stage = plan_open(lane, self._workload, load, self._output_tokens, self._seed, repeat)
        # Lanes get the same prompts at the same rate and repeat; no other stage uses them.
        name = f"{load.label}/{repeat}"
        if name not in self._first_prompts:
            self._first_prompts[name] = self._next_prompt
            self._next_prompt += stage.prompts_end
        return replace(stage, first_prompt=self._first_prompts[name], stop_early=True)
