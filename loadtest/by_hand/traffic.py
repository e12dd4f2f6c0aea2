"""What one process of Locust sends: users who ask and wait, or its share of a schedule."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event

from loadtest.by_hand.exporter import export
from loadtest.client.openai_server import find_server
from loadtest.client.record import ClientReason, RequestLabel
from loadtest.client.sse_client import ClientSettings, StreamingClient
from loadtest.offer.arrivals import notes, parse_load, schedule
from loadtest.offer.load import Arrival, ClosedLoop, OpenLoop, TraceReplay
from loadtest.offer.request_body import Dialect
from loadtest.offer.workload import load_workload
from loadtest.run.dispatch import Connections, keep_schedule
from loadtest.run.exporter import EndedRequest, LaneWorkload, ProgressCounter, ended_request
from loadtest.run.locust_stats import report_cut_off, report_to_locust
from serving.core.addresses import server_root
from serving.core.client_key import client_key
from serving.core.lane import ANY_LANE
from serving.core.request import Outcome

logger = logging.getLogger(__name__)

LEAD_S = 1.0  # from the order to begin to the schedule's first instant, so that every worker is ready
PROMPTS_PER_WORKER = 1_000_000
CUT_OFF_WITHIN_S = 1.0  # a request notices that its connection is gone


@dataclass(frozen=True, slots=True)
class Share:
    """Every `of`-th arrival of a schedule, from number `index` on.

    Attributes:
        begin_at_s: when the schedule's 0 is, by the clock on the wall, which is all that processes have in
            common; None: in `LEAD_S`.
    """

    index: int = 0
    of: int = 1
    begin_at_s: float | None = None


WHOLE = Share()


def open_load(text: str) -> OpenLoop | TraceReplay:
    """The load that `--load` names.

    Raises:
        ValueError: it is none of rates and traces.
    """
    load = parse_load(text)
    if isinstance(load, ClosedLoop):
        raise ValueError(
            f"load {text!r} is a closed loop, which --users makes; --load takes rates and traces"
        )
    return load


def arrivals_asked(options: Any) -> tuple[Arrival, ...]:
    """The whole schedule of an open loop, the same in every process.

    Raises:
        ValueError: the load is none of rates and traces, or its trace cannot be read.
    """
    load = open_load(options.load)
    return schedule(load, f"{options.seed}/{options.workload}/{load.label}/0")


def api_key() -> str | None:
    """For whatever server is asked; a lab's own key goes before the one that is for all services."""
    return client_key() or os.environ.get("OPENAI_API_KEY") or None


def base_url(environment: Any) -> str:
    """Of the server that `--host`, or Locust's page, names."""
    return server_root(environment.host or "")


class Traffic:
    """What this process sends, test after test.

    Attributes:
        run: the test that is on, or the last one; None before the first, and where none could begin.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._progress = ProgressCounter(time.perf_counter)
        self._count_ended = export(environment, self._progress.read)
        self.run: Run | None = None

    def connect(self) -> StreamingClient:
        return StreamingClient(
            ClientSettings(
                base_url(self._environment),
                api_key=api_key(),
                needs_done=self._environment.parsed_options.needs_done,
            )
        )

    def begin(self, share: Share | None, done: Callable[[int], None], fail: Callable[[str], None]) -> None:
        """Find the server, and start the schedule if there is one.

        Args:
            share: of the schedule; None for nothing.
            done: called with the number of requests when this process's share is sent and answered.
            fail: called with the error when the schedule could not be kept.

        Raises:
            ServerError: the server cannot be reached.
            ConfigError: the key's variable holds what no key can be.
            ValueError: an option asks for what cannot be done.
        """
        self.run = None
        run = Run(self._environment, self._count_ended, self.connect)
        if not run.is_open_loop:
            self._progress.began(run)
        elif share is not None:
            mine, began_at_s = run.share_of_schedule(share)
            self._progress.began(run, [began_at_s + arrival.at_s for _, arrival in mine])

            def keep() -> None:
                if run.keep_schedule(mine, began_at_s):
                    done(len(mine))

            gevent.spawn(keep).link_exception(
                lambda ended: fail(f"the schedule broke off: {ended.exception!r}")
            )
        self._progress.is_run_active = True
        self.run = run

    def stop(self) -> None:
        """End what is on: requests in flight are cancelled, and nothing more is sent."""
        if self.run is not None:
            self.run.stop()
        self._progress.ended()
        self._progress.is_run_active = False


class Run:
    """One test of this process, from its start to its stop.

    Its options are those of its start: whoever changes them on Locust's page means the next test.
    """

    def __init__(
        self,
        environment: Any,
        count_ended: Callable[[EndedRequest], None],
        connect: Callable[[], StreamingClient],
    ) -> None:
        self._environment = environment
        self._options = options = copy.copy(environment.parsed_options)
        self._workload = load_workload(options.workload, output_tokens=options.output_tokens)
        load_notes = notes(open_load(options.load)) if options.load else ()
        for note in (*load_notes, *self._workload.notes):
            logger.warning("%s", note)
        self._server = find_server(
            base_url(environment), options.server, options.model, api_key(), say=logger.warning
        )
        worker = getattr(environment.runner, "worker_index", 0)
        self._numbers = itertools.count(worker * PROMPTS_PER_WORKER)
        self._count_ended = count_ended
        self._connections = Connections(connect)
        self._stopped = Event()
        self._all_answered = Event()  # of an open loop
        self.is_open_loop = bool(options.load)
        self.num_dispatched = 0
        self.num_cut_off = 0
        self._num_ended = 0

    @property
    def lane_workload(self) -> LaneWorkload:
        """Lane and workload as far as they are known before an answer is there."""
        anywhere = ANY_LANE if self._server.dialect is Dialect.TANDEM else self._server.model
        return self._options.lane or anywhere, self._options.workload

    @property
    def num_busy(self) -> int:
        """Users of a closed loop, or requests in flight of an open one."""
        if self.is_open_loop:
            return self.num_dispatched - self._num_ended
        return int(self._environment.runner.user_count)

    def stop(self) -> None:
        """Send no more. What is in flight has Locust's `--stop-timeout` to end, and is then cut off.

        Locust itself does so with the users of a closed loop.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self.is_open_loop and self.num_busy:
            if self._environment.stop_timeout:  # gevent takes a wait of 0 for one without end
                self._all_answered.wait(self._environment.stop_timeout)
            self._connections.cancel(ClientReason.INTERRUPTED)
            self._all_answered.wait(CUT_OFF_WITHIN_S)

    def ask_next(self, client: StreamingClient) -> bool:
        """One request of a closed loop; False when the test has been stopped."""
        if self._stopped.is_set():
            return False
        made = self._make(next(self._numbers))
        self._ask(client, *made, time.perf_counter())
        return True

    def share_of_schedule(self, share: Share) -> tuple[tuple[tuple[int, Arrival], ...], float]:
        """The arrivals of a share with their numbers, and when the schedule's 0 is on this process's clock."""
        mine = tuple(enumerate(arrivals_asked(self._options)))[share.index :: share.of]
        lead_s = LEAD_S if share.begin_at_s is None else share.begin_at_s - time.time()
        return mine, time.perf_counter() + lead_s

    def keep_schedule(self, mine: tuple[tuple[int, Arrival], ...], began_at_s: float) -> bool:
        """Send each arrival as soon as it is due, and wait for the answers; False when the test was stopped."""
        try:
            keep_schedule(mine, began_at_s, time.perf_counter, self._stopped, self._make, self._serve)
        finally:
            self._all_answered.set()
        self._connections.close()
        return not self._stopped.is_set()

    def _serve(self, made: tuple[RequestLabel, dict[str, Any]], due_at_s: float) -> None:
        client = self._connections.take()
        try:
            self._ask(client, *made, due_at_s)
        finally:
            self._connections.give_back(client)

    def _make(self, number: int, arrival: Arrival | None = None) -> tuple[RequestLabel, dict[str, Any]]:
        options, server = self._options, self._server
        body = self._workload.body(
            model=server.model_for(options.lane),
            seed=options.seed,
            number=number,
            arrival=arrival,
            dialect=server.dialect,
        )
        label = RequestLabel(f"locust-{uuid.uuid4().hex}", options.lane, options.workload, "locust", number)
        return label, body

    def _ask(
        self, client: StreamingClient, label: RequestLabel, body: dict[str, Any], due_at_s: float
    ) -> None:
        options, server = self._options, self._server
        self.num_dispatched += 1
        try:
            record = client.send(label, body, scheduled_at_s=due_at_s)
        except gevent.GreenletExit:  # Locust ends a user in the middle of its request
            self._cut_off()
            raise
        finally:
            self._num_ended += 1
        if record.reason == ClientReason.INTERRUPTED:
            self._cut_off()
            return
        lane = record.served_by_lane or options.lane or server.model
        self._count_ended(ended_request(record, record.served_by_lane or self.lane_workload[0]))
        report_to_locust(self._environment, f"{lane}/{options.workload}", record)

    def _cut_off(self) -> None:
        """A request did not end because the test did, or because Locust took its user away."""
        self.num_cut_off += 1
        self._count_ended(EndedRequest(*self.lane_workload, str(Outcome.CANCELLED), 0, None, None, None))
        report_cut_off(
            self._environment, "/".join((self._options.lane or self._server.model, self._options.workload))
        )
