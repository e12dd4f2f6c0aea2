"""A lab as it might be: requests through the scheduler's own core onto replicas of any lanes, in virtual time.

Network, gateway and the scheduler's own time are what a lane says of a request that is alone, whatever the load;
clients neither leave nor set deadlines.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serving.config import SchedulerConfig
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.core.speculation.acceptance import extended
from serving.core.speculation.text_kind import TextKind
from serving.scheduler.core import SchedulerCore
from serving.scheduler.lane_costs import LaneCost, LaneCosts, mean_rates
from serving.simulation.calibrated import CalibratedReplica, LaneModel, SimulatedSequence
from serving.simulation.lab import EXPIRY_TICK_S

CORES = "the machine"
PROGRESS_EVERY = 1_000  # requests that ended

Floats = npt.NDArray[np.float64]


class Offered(NamedTuple):
    """One request.

    Attributes:
        kind: index of its kind of text, of those that `LaneModel.acceptance` knows.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    kind: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What a replica did, until the last request of all ended.

    Attributes:
        busy_share: of that time, in which it was in a step: nearly all of it where somebody is always there. Of
            shared cores, what it had of them.
        slots_share: of its slots, on the mean over that time, that served requests held.
    """

    lane: str
    busy_share: float
    slots_share: float
    num_steps: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What became of the requests, in order of arrival; shape (requests,) each.

    Attributes:
        arrived_at_s: when each was sent.
        ttft_s, e2e_s: infinite where a request was refused, or not reached before the run was given up.
        tpot_s: 0 for answers of one token, which have none; infinite as the others.
        output_tokens: asked for.
        ended: whether each was served or refused.
        served_by: number of the replica, by its place in `replicas`; -1 where it was refused, or not placed yet.
        num_refused: by the scheduler.
        lasted_s: virtual time, to the end of the last request.
        was_given_up: whether `watch` ended it.
    """

    arrived_at_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    output_tokens: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]
    served_by: npt.NDArray[np.int64]
    num_refused: int
    lasted_s: float
    was_given_up: bool
    replicas: tuple[ReplicaUse, ...]


class Watch:
    """Told of every request that ends; may give the run up. This one never does."""

    def ended(self, ttft_s: float, tpot_s: float, e2e_s: float) -> None:
        """All infinite for one that was refused."""

    def is_lost(self) -> bool:
        return False


class PlannedLab:
    """One run; build a new one for the next.

    Args:
        fleet: each lane, and how many replicas it has.
        offered: the requests, in order of time.
        num_users: of a closed loop: the first so many requests are each the first of a user, sent when it says; a
            user whose request has ended sends the next of all at once, whatever its `at_s`.
        num_cells: schedulers; replicas are dealt out to them in turn, and a request goes to one by chance.
        seed: of that chance, and of how many drafts are accepted.
        text_kinds: what the scheduler takes each kind of text for, by `Offered.kind`; beyond its end it is open.
        lane_costs: what the scheduler expects of lanes, for placement `adaptive`; None: what they do.
        shares_cores: all replicas take turns on the same cores; else each has its own.

    Raises:
        ValueError: a cell would have no replica, or replicas of several cells would share cores.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        fleet: Sequence[tuple[LaneModel, int]],
        offered: Sequence[Offered],
        *,
        num_users: int | None = None,
        num_cells: int = 1,
        seed: int = 0,
        text_kinds: Sequence[TextKind] = (),
        lane_costs: LaneCosts | None = None,
        shares_cores: bool = False,
    ) -> None:
        lanes = [lane for lane, num_replicas in fleet for _ in range(num_replicas)]
        if not 1 <= num_cells <= len(lanes):
            raise ValueError(f"{num_cells} cells of {len(lanes)} replicas: each cell needs one at least")
        if shares_cores and num_cells > 1:
            raise ValueError(f"{num_cells} cells: replicas that share cores are in one")
        self._rng = random.Random(seed)
        if lane_costs is None:
            lane_costs = {lane.name: _cost_of(lane, text_kinds) for lane, _ in fleet}
        self._cores = [SchedulerCore(config, lane_costs=lane_costs) for _ in range(num_cells)]
        self._text_kinds = text_kinds
        self._lanes = lanes
        self._replicas = [CalibratedReplica(lane, self._rng) for lane in lanes]
        self._core_of = [self._cores[number % num_cells] for number in range(len(lanes))]
        self._number_of: dict[str, int] = {}
        self._num_served = [0] * len(lanes)
        self._held_s = [0.0] * len(lanes)
        for number, lane in enumerate(lanes):
            info = _replica_info(lane, number, CORES if shares_cores else "")
            self._number_of[info.replica_id] = number
            self._core_of[number].replica_ready(info)
        # A heap of when stretches end, with the replica's number. What a replica has meanwhile changed stays in it
        # and is passed over. Replicas have a clock of their own: on shared cores, the time each gets.
        self._due: list[tuple[float, int]] = []
        self._ticks: list[tuple[float, int]] = []  # a heap of when cells look for overdue requests
        self._ticking: set[int] = set()
        self._shares_cores = shares_cores
        self._now_s = 0.0
        self._replicas_s = 0.0  # their clock

        self._offered = offered
        self._arrived_at_s = array("d", (request.at_s for request in offered))
        self._users_free_at_s = None if num_users is None else sorted(self._arrived_at_s[:num_users])
        infinite = array("d", [math.inf]) * len(offered)
        self._granted_at_s, self._first_at_s = infinite[:], infinite[:]
        self._ttft_s, self._tpot_s, self._e2e_s = infinite[:], infinite[:], infinite[:]
        self._ended = bytearray(len(offered))
        self._served_by = array("q", [-1]) * len(offered)
        self._num_ended = self._num_refused = 0
        self._watch = Watch()

    def run(
        self, *, watch: Watch | None = None, progress: Callable[[int], None] = lambda num_ended: None
    ) -> PlannedRun:
        """Run until the last request has ended, or the watch has seen enough.

        Args:
            progress: told now and then how many requests have ended.
        """
        self._watch = watch or self._watch
        num_requests = len(self._offered)
        num_arrived = 0
        next_news = PROGRESS_EVERY
        was_given_up = False
        while num_arrived < num_requests or self._num_ended < num_requests:
            arrives_at_s = self._next_arrival_s(num_arrived)
            ends_at_s = self._next_end_s()
            ticks_at_s = self._ticks[0][0] if self._ticks else math.inf
            if ends_at_s <= min(arrives_at_s, ticks_at_s):
                self._now_s = ends_at_s
                self._replicas_s, number = heapq.heappop(self._due)
                if self._replicas[number].ends_at_s == self._replicas_s:
                    self._end_stretch(number, ends_at_s)
            elif ticks_at_s <= arrives_at_s:
                self._pass_until(ticks_at_s)
                self._tick(heapq.heappop(self._ticks)[1], ticks_at_s)
            else:
                self._pass_until(arrives_at_s)
                if self._users_free_at_s is not None:
                    self._arrived_at_s[num_arrived] = heapq.heappop(self._users_free_at_s)
                self._arrive(num_arrived, arrives_at_s)
                num_arrived += 1
            if self._num_ended >= next_news:
                next_news += PROGRESS_EVERY
                progress(self._num_ended)
                if self._watch.is_lost():
                    was_given_up = True
                    break
        return self._result(self._now_s, was_given_up)

    def _turns(self) -> int:
        """How many replicas take turns now: so much slower is the clock of each."""
        if not self._shares_cores:
            return 1
        return max(1, sum(replica.ends_at_s is not None for replica in self._replicas))

    def _next_end_s(self) -> float:
        if not self._due:
            return math.inf
        ends_at_s = self._due[0][0]
        if not self._shares_cores:
            return ends_at_s
        return self._now_s + max(0.0, ends_at_s - self._replicas_s) * self._turns()

    def _pass_until(self, now_s: float) -> None:
        if self._shares_cores:
            self._replicas_s += (now_s - self._now_s) / self._turns()
        else:
            self._replicas_s = now_s
        self._now_s = now_s

    def _next_arrival_s(self, num_arrived: int) -> float:
        if num_arrived == len(self._offered):
            return math.inf
        if self._users_free_at_s is None:
            return self._arrived_at_s[num_arrived]
        return self._users_free_at_s[0] if self._users_free_at_s else math.inf

    def _arrive(self, number: int, now_s: float) -> None:
        request = self._offered[number]
        cell = self._rng.randrange(len(self._cores)) if len(self._cores) > 1 else 0
        core = self._cores[cell]
        kinds = self._text_kinds
        kind = kinds[request.kind] if request.kind < len(kinds) else TextKind.OPEN
        asked = SchedulingRequest(str(number), None, request.prompt_tokens, request.output_tokens, kind=kind)
        if core.submit(asked, now_s) is None:
            self._dispatch(core, now_s, set())
            if core.num_waiting and cell not in self._ticking:
                self._ticking.add(cell)
                heapq.heappush(self._ticks, (now_s + EXPIRY_TICK_S, cell))
        else:
            self._refuse(number, now_s)

    def _dispatch(self, core: SchedulerCore, now_s: float, idle: set[int]) -> None:
        """Place who can be placed; then all replicas that do nothing begin, so that whoever came now shares a step.

        Args:
            idle: replicas that have just ended a stretch.
        """
        for grant in core.dispatch(now_s):
            number = int(grant.lease.request_id)
            place = self._number_of[grant.replica.replica_id]
            replica = self._replicas[place]
            request = self._offered[number]
            self._granted_at_s[number] = now_s
            self._served_by[number] = place
            self._num_served[place] += 1
            ends_at_s = replica.ends_at_s
            replica.join(
                SimulatedSequence(number, request.prompt_tokens, request.output_tokens, request.kind),
                self._replicas_s,
            )
            if ends_at_s is None:
                idle.add(place)
            elif replica.ends_at_s is not None and replica.ends_at_s != ends_at_s:
                heapq.heappush(self._due, (replica.ends_at_s, place))
        for place in idle:
            self._start(place)

    def _start(self, place: int) -> None:
        if (ends_at_s := self._replicas[place].start(self._replicas_s)) is not None:
            heapq.heappush(self._due, (ends_at_s, place))

    def _end_stretch(self, place: int, now_s: float) -> None:
        core = self._core_of[place]
        first_tokens, finished = self._replicas[place].end()
        for sequence in first_tokens:
            self._first_at_s[sequence.number] = now_s
        for sequence in finished:
            self._held_s[place] += now_s - self._granted_at_s[sequence.number]
            self._finish(core, sequence, now_s)
        if core.num_waiting:
            self._dispatch(core, now_s, {place})
        else:
            self._start(place)

    def _finish(self, core: SchedulerCore, sequence: SimulatedSequence, now_s: float) -> None:
        number = sequence.number
        arrived_at_s = self._arrived_at_s[number]
        first_at_s = self._first_at_s[number]
        overhead_s = self._lanes[self._served_by[number]].overhead_s
        self._ttft_s[number] = first_at_s - arrived_at_s + overhead_s
        self._e2e_s[number] = now_s - arrived_at_s + overhead_s
        more = sequence.output_tokens - 1
        self._tpot_s[number] = (now_s - first_at_s) / more if more else 0.0
        first_token_s = first_at_s - self._granted_at_s[number]
        core.release(
            str(number),
            now_s,
            RequestEnd(
                ReplicaVerdict.HEALTHY, first_token_s, sequence.output_tokens, num_steps=sequence.num_steps
            ),
        )
        self._note(number, now_s + overhead_s)

    def _refuse(self, number: int, now_s: float) -> None:
        self._num_refused += 1
        self._note(number, now_s)

    def _note(self, number: int, known_at_s: float) -> None:
        if self._users_free_at_s is not None:
            heapq.heappush(self._users_free_at_s, known_at_s)
        self._ended[number] = 1
        self._num_ended += 1
        self._watch.ended(self._ttft_s[number], self._tpot_s[number], self._e2e_s[number])

    def _tick(self, cell: int, now_s: float) -> None:
        core = self._cores[cell]
        for waiting, _ in core.expire(now_s):
            self._refuse(int(waiting.request.request_id), now_s)
        if core.num_waiting:
            heapq.heappush(self._ticks, (now_s + EXPIRY_TICK_S, cell))
        else:
            self._ticking.discard(cell)

    def _result(self, now_s: float, was_given_up: bool) -> PlannedRun:
        return PlannedRun(
            np.array(self._arrived_at_s),
            np.array(self._ttft_s),
            np.array(self._tpot_s),
            np.array(self._e2e_s),
            np.array([request.output_tokens for request in self._offered], dtype=np.int64),
            np.frombuffer(self._ended, dtype=np.bool_),
            np.array(self._served_by),
            self._num_refused,
            now_s,
            was_given_up,
            tuple(self._use(place, now_s or math.inf) for place in range(len(self._replicas))),
        )

    def _use(self, place: int, lasted_s: float) -> ReplicaUse:
        lane, replica = self._lanes[place], self._replicas[place]
        return ReplicaUse(
            lane.name,
            replica.busy_s / lasted_s,
            self._held_s[place] / (lasted_s * lane.max_num_seqs),
            replica.num_steps,
            self._num_served[place],
        )


def _cost_of(lane: LaneModel, text_kinds: Sequence[TextKind]) -> LaneCost:
    by_kind: dict[TextKind, list[int]] = {}
    for number, kind in enumerate(text_kinds[: len(lane.acceptance)]):
        by_kind.setdefault(kind, []).append(number)
    most = max(lane.drafts_by_batch)
    shares = dict(enumerate(lane.draft_share))
    return LaneCost(
        lane.cost,
        lane.drafts_by_batch,
        {
            kind: mean_rates([extended(lane.acceptance[number], most) for number in numbers])
            for kind, numbers in by_kind.items()
        },
        {
            kind: sum(shares.get(number, 1.0) for number in numbers) / len(numbers)
            for kind, numbers in by_kind.items()
        },
    )


def _replica_info(lane: LaneModel, number: int, cores: str) -> ReplicaInfo:
    replica_id = f"{lane.name}-{number}"
    drafts = any(lane.drafts_by_batch)
    return ReplicaInfo(
        replica_id=replica_id,
        lane=lane.name,
        strategy=Strategy.SPECULATIVE if drafts else Strategy.BATCHED,
        url=f"http://{replica_id}.invalid",
        max_running=lane.max_num_seqs,
        takes_unpinned=True,
        cores=cores,
    )
