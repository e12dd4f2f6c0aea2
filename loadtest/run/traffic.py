"""A stage's traffic: sends its requests when they are due, collects what came of them, stops in time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from gevent.event import Event

from loadtest.client.record import ClientReason, RequestRecord
from loadtest.client.sse_client import StreamingClient
from loadtest.judge.slo import Outlook, Slo
from loadtest.offer.load import Arrival, ClosedLoop
from loadtest.run.dispatch import Connections, keep_schedule
from loadtest.run.exporter import LaneWorkload
from loadtest.run.plan import StagePlan, arrivals_of
from loadtest.run.sender import MadeRequest, Sender

MAX_IN_FLIGHT = 4096  # of an open loop: each is a connection, and a server this far behind is lost
MIN_REQUESTS_TO_JUDGE = 20


class Traffic:
    """What closed and open loops share: counts, records, and how a stage ends.

    Attributes:
        num_users: Locust users that run it.
        done: set when nothing is in flight and nothing more will be sent.
        records: of requests that ended, those that do not count included.
        num_counted: of them, those that count.
        in_flight: the instant each unfinished request was due, by its place in the stage.
        arrivals: the schedule of an open loop; empty in a closed one.
        num_dispatched: requests begun.
        stop_reason, stop_detail: why it ends early, if it does; the detail gives value and bound.
    """

    num_users = 1

    def __init__(self, sender: Sender, plan: StagePlan, on_record: Callable[[RequestRecord], None]) -> None:
        self.plan = plan
        self.done = Event()
        self.records: list[RequestRecord] = []
        self.in_flight: dict[int, float] = {}
        self.arrivals: tuple[Arrival, ...] = ()
        self.num_dispatched = 0
        self.num_counted = 0
        self.num_failed = 0
        self.stop_reason: ClientReason | None = None
        self.stop_detail = ""
        self._sender = sender
        self._on_record = on_record
        self._outlook: Outlook | None = None
        self._num_judged = 0
        self._stopped = Event()
        self._connections = Connections(sender.connect)

    @property
    def num_finished(self) -> int:
        return len(self.records)

    @property
    def lane_workload(self) -> LaneWorkload:
        return self.plan.lane, self.plan.workload

    @property
    def num_busy(self) -> int:
        """Requests in flight; of a closed loop, its users."""
        return len(self.in_flight)

    def run_user(self) -> None:
        """One Locust user's part in the stage, from its first request to its last."""
        raise NotImplementedError

    @property
    def progress(self) -> str:
        """How far it is, in words."""
        return f"{self.num_counted} of {self.plan.requests} requests"

    def share(self, elapsed_s: float) -> float:
        """How much of it is done `elapsed_s` after its start, 0 to 1."""
        return min(1.0, self.num_counted / self.plan.requests)

    def stop(self, reason: ClientReason, detail: str = "") -> None:
        """End the requests in flight and send no more. The first reason stays."""
        if self.stop_reason is None:
            self.stop_reason, self.stop_detail = reason, detail
        self._stopped.set()
        self._connections.cancel(self.stop_reason)

    def judge(self, slo: Slo) -> None:
        """Stop if the objective cannot be attained any more, however well everything goes from here on.

        An unfinished request may have its first token already, so its age counts against E2E limits only.
        """
        if self.stop_reason is not None:
            return
        if self._outlook is None:
            self._outlook = Outlook(slo, self.plan.requests)
        # Each record is judged once: all of them each time would hold up a client that has to send in time.
        for record in self.records[self._num_judged :]:
            if record.label.counts:
                self._outlook.ended(record)
        self._num_judged = len(self.records)
        now_s, first = self._sender.clock(), self.plan.num_before
        offsets = range(first, first + self.plan.requests)
        ages_s = [now_s - due_at_s for offset, due_at_s in self.in_flight.items() if offset in offsets]
        if not self._outlook.can_hold(ages_s):
            detail = (
                f"{self._outlook.num_lost} of {self.num_counted} requests missed {slo.text}: "
                "it cannot hold any more (stop_early)"
            )
            self.stop(ClientReason.STAGE_HOPELESS, detail)

    def _measure(self, client: StreamingClient, request: MadeRequest, due_at_s: float) -> None:
        self.num_dispatched += 1
        self.in_flight[request.offset] = due_at_s
        try:
            record = client.send(request.label, request.body, due_at_s)
        finally:
            del self.in_flight[request.offset]
        self.records.append(record)
        self.num_counted += record.label.counts
        self.num_failed += record.label.counts and not record.is_completed
        self._on_record(record)
        self._judge_errors()

    def _judge_errors(self) -> None:
        finished, failed = self.num_counted, self.num_failed
        if self.stop_reason is not None or finished < MIN_REQUESTS_TO_JUDGE:
            return
        most = self._sender.plan.max_error_rate
        if failed > most * finished:
            detail = f"{failed} of {finished} requests failed, more than {most:.0%} (max_error_rate)"
            self.stop(ClientReason.STAGE_HOPELESS, detail)


class ClosedTraffic(Traffic):
    """Users that each send, read the answer to its end, think, and send again.

    They come one after another, for users who begin together stay together, and wait for each other ever after.
    All go on until the last request that counts has ended, so that each of these met the same load. Then a request
    whose answer has not begun is withdrawn, and the others run to their ends.

    Args:
        come_within_s: the time over which they come: about what one request takes.
    """

    def __init__(
        self,
        sender: Sender,
        plan: StagePlan,
        on_record: Callable[[RequestRecord], None],
        come_within_s: float = 0.0,
    ) -> None:
        super().__init__(sender, plan, on_record)
        assert isinstance(plan.load, ClosedLoop)
        self.num_users = plan.load.users
        self._think_time_s = plan.load.think_time_s
        self._come_every_s = come_within_s / self.num_users
        self._places = itertools.count()
        self._offsets = itertools.count()
        self._num_left = 0

    @property
    def num_busy(self) -> int:
        return self.num_users

    def run_user(self) -> None:
        """Send the stage's next request, one after another, on a connection of its own."""
        client = self._connections.take()
        try:
            self._pause(next(self._places) * self._come_every_s)
            while not self._stopped.is_set():
                request = self._sender.request(self.plan, next(self._offsets))
                self._measure(client, request, self._sender.clock())
                self._pause(self._think_time_s)
        finally:
            self._connections.give_back(client)
            self._num_left += 1
            if self._num_left == self.num_users:
                self._connections.close()
                self.done.set()

    def _pause(self, pause_s: float) -> None:
        if pause_s:  # gevent takes a wait of 0 for one without end
            self._stopped.wait(pause_s)

    def _measure(self, client: StreamingClient, request: MadeRequest, due_at_s: float) -> None:
        super()._measure(client, request, due_at_s)
        if self.num_counted >= self.plan.requests and not self._stopped.is_set():
            self._stopped.set()
            self._connections.withdraw(ClientReason.STAGE_DONE)


class OpenTraffic(Traffic):
    """Requests sent at their instants, however many are unanswered.

    Each has a greenlet and a connection of its own.
    """

    def __init__(
        self,
        sender: Sender,
        plan: StagePlan,
        on_record: Callable[[RequestRecord], None],
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        super().__init__(sender, plan, on_record)
        self.arrivals = arrivals_of(plan, sender.plan.seed)
        # Texts are read, and the tokenizer is loaded, by the first prompt: not while the schedule runs.
        sender.workload(plan).request(sender.plan.seed, plan.first_prompt)
        self._max_in_flight = max_in_flight

    def run_user(self) -> None:
        """Keep the schedule, then wait for the answers that are still under way."""
        clock = self._sender.clock
        try:
            keep_schedule(enumerate(self.arrivals), clock(), clock, self._stopped, self._make, self._serve)
        finally:
            self._connections.close()
            self.done.set()

    @property
    def progress(self) -> str:
        return (
            f"{self.num_dispatched} of {len(self.arrivals)} requests sent, "
            f"{len(self.in_flight)} in flight, {self.num_finished} ended"
        )

    def share(self, elapsed_s: float) -> float:
        return min(1.0, elapsed_s / self.plan.estimated_s) if self.plan.estimated_s else 1.0

    def _make(self, offset: int, arrival: Arrival) -> MadeRequest:
        return self._sender.request(self.plan, offset, arrival)

    def _serve(self, request: MadeRequest, due_at_s: float) -> None:
        if len(self.in_flight) >= self._max_in_flight:
            detail = f"{len(self.in_flight)} requests in flight (max_in_flight={self._max_in_flight})"
            self.stop(ClientReason.STAGE_HOPELESS, detail)
        if self.stop_reason is not None:
            return
        client = self._connections.take()
        try:
            self._measure(client, request, due_at_s)
        finally:
            self._connections.give_back(client)


class WarmUp(Traffic):
    """One request before a stage, so that the stage does not pay for a cold engine."""

    def __init__(
        self,
        sender: Sender,
        plan: StagePlan,
        on_record: Callable[[RequestRecord], None],
        output_tokens: int | None = None,
    ) -> None:
        super().__init__(sender, plan, on_record)
        self._output_tokens = output_tokens

    def run_user(self) -> None:
        """Send it."""
        client = self._connections.take()
        try:
            request = self._sender.warm_up(self.plan, self._output_tokens)
            self.records.append(client.send(request.label, request.body, self._sender.clock()))
            self._on_record(self.records[-1])
        finally:
            self._connections.give_back(client)
            self._connections.close()
            self.done.set()


def make_traffic(
    sender: Sender,
    plan: StagePlan,
    on_record: Callable[[RequestRecord], None],
    max_in_flight: int = MAX_IN_FLIGHT,
    come_within_s: float = 0.0,
) -> Traffic:
    """The traffic of a stage.

    Args:
        come_within_s: as for `ClosedTraffic`.

    Raises:
        ValueError: the plan asks for more requests than its schedule holds.
    """
    if isinstance(plan.load, ClosedLoop):
        return ClosedTraffic(sender, plan, on_record, come_within_s)
    return OpenTraffic(sender, plan, on_record, max_in_flight)
