"""A simulated lab: a trace through the scheduler's core onto simulated replicas, in virtual time.

Network, gateway and scheduler take no time here; what is left is waiting, prefill and decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from serving.config import SchedulerConfig
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import Outcome, ReplicaVerdict, RequestEnd
from serving.scheduler.core import SchedulerCore
from serving.simulation.events import EventLoop
from serving.simulation.replica import EngineSequence, ReplicaModel, SimulatedReplica
from serving.simulation.results import SimulatedRequest, SimulatedRun
from serving.simulation.traffic import Arrival

EXPIRY_TICK_S = 0.25  # the service looks for overdue requests as often
LANE = "simulated"


class SimulatedLab:
    """One run; build a new one for the next."""

    def __init__(
        self, config: SchedulerConfig, model: ReplicaModel, num_replicas: int, trace: Sequence[Arrival]
    ) -> None:
        self.loop = EventLoop()
        self.core = SchedulerCore(config)
        self._replicas = {f"{LANE}-{number}": SimulatedReplica(model) for number in range(num_replicas)}
        self._requests = {arrival.request.request_id: SimulatedRequest(arrival) for arrival in trace}
        self._tenants = {arrival.request.tenant for arrival in trace}
        self._served_while_all_wait = Counter(dict.fromkeys(self._tenants, 0))
        self._num_to_come = len(trace)
        for replica_id in self._replicas:
            self.core.replica_ready(
                ReplicaInfo(
                    replica_id=replica_id,
                    lane=LANE,
                    strategy=Strategy.BATCHED,
                    url=f"http://{replica_id}.invalid",
                    max_running=model.max_num_seqs,
                    takes_unpinned=True,
                )
            )
        for simulated in self._requests.values():
            self.loop.at(simulated.arrival.at_s, lambda simulated=simulated: self._arrive(simulated))  # type: ignore[misc]

    def run(self) -> SimulatedRun:
        """Run until the last request has ended."""
        self.loop.at(EXPIRY_TICK_S, self._tick)
        self.loop.run()
        return SimulatedRun(tuple(self._requests.values()), dict(self._served_while_all_wait))

    def _arrive(self, simulated: SimulatedRequest) -> None:
        self._num_to_come -= 1
        if refusal := self.core.submit(simulated.arrival.request, self.loop.now_s):
            simulated.end(Outcome.REJECTED, refusal.reason)
        self._dispatch()

    def _dispatch(self) -> None:
        now_s = self.loop.now_s
        for grant in self.core.dispatch(now_s):
            simulated = self._requests[grant.lease.request_id]
            simulated.granted_at_s = now_s
            replica = self._replicas[grant.replica.replica_id]
            request = simulated.arrival.request
            replica.join(
                EngineSequence(request.request_id, request.prompt_tokens, simulated.arrival.output_tokens)
            )
            self._wake(replica)

    def _wake(self, replica: SimulatedReplica) -> None:
        if not replica.is_stepping:
            # As an event of its own, so that all who are granted at this instant share the step.
            replica.is_stepping = True
            self.loop.at(self.loop.now_s, lambda: self._start_step(replica))

    def _start_step(self, replica: SimulatedReplica) -> None:
        if (ends_at_s := replica.start_step(self.loop.now_s)) is not None:
            self.loop.at(ends_at_s, lambda: self._end_step(replica))

    def _end_step(self, replica: SimulatedReplica) -> None:
        served = replica.end_step(self.loop.now_s)
        self._count(served)
        for sequence in served:
            simulated = self._requests[sequence.request_id]
            if sequence.made == 1:
                simulated.first_token_at_s = self.loop.now_s
            if sequence.is_done:
                self._finish(simulated, sequence)
        self._dispatch()
        self._wake(replica)

    def _finish(self, simulated: SimulatedRequest, sequence: EngineSequence) -> None:
        assert simulated.granted_at_s is not None, "it ran"
        assert simulated.first_token_at_s is not None, "it has its last token"
        simulated.finished_at_s = self.loop.now_s
        simulated.end(Outcome.COMPLETED)
        first_token_s = simulated.first_token_at_s - simulated.granted_at_s
        end = RequestEnd(ReplicaVerdict.HEALTHY, first_token_s, sequence.made)
        self.core.release(sequence.request_id, self.loop.now_s, end)

    def _count(self, served: Sequence[EngineSequence]) -> None:
        if self._tenants <= self.core.waiting_by_tenant().keys():
            for sequence in served:
                tokens = 1 + (sequence.prompt_tokens if sequence.made == 1 else 0)
                tenant = self._requests[sequence.request_id].arrival.request.tenant
                self._served_while_all_wait[tenant] += tokens

    def _tick(self) -> None:
        for waiting, refusal in self.core.expire(self.loop.now_s):
            self._requests[waiting.request.request_id].end(Outcome.REJECTED, refusal.reason)
        self._dispatch()
        if self._num_to_come or self.core.num_waiting:
            self.loop.at(self.loop.now_s + EXPIRY_TICK_S, self._tick)
