"""Locust as people know it, against any OpenAI-compatible server:

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
    locust -f loadtest/locustfile.py --host ... --headless --users 4 --run-time 1m --csv out --html out.html
    locust -f loadtest/locustfile.py --host ... --headless --load poisson:4/s,60s
    locust -f loadtest/locustfile.py --host ... --master    and, once for each core,    ... --worker

Rows TTFT, TPOT, E2E and ICL max for each lane and workload; charts of the first three at /latency on Locust's
page; the same for Prometheus at 127.0.0.1:9465 (TANDEM_LOAD_METRICS_ADDRESS, TANDEM_LOAD_METRICS_PORT; 0: not).
An API key is read from TANDEM_API_KEY, else from OPENAI_API_KEY.
`tandem bench` measures stages of a fixed size and writes a report.
"""

# Locust patches the interpreter: it must come before whatever imports ssl or socket.
# isort: off
from locust import User, constant, events, task
from locust.exception import StopUser
from locust.runners import WORKER_REPORT_INTERVAL, MasterRunner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC
# isort: on

import argparse
import itertools
import logging
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

# Given as a path, this file must find its package without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loadtest.arrivals import parse_load, schedule
from loadtest.dispatch import Connections, keep_schedule
from loadtest.exporter import ended_request
from loadtest.load import Arrival, ClosedLoop
from loadtest.load_progress import Place, ProgressCounter
from loadtest.locust_charts import add_charts
from loadtest.locust_exporter import export
from loadtest.locust_stats import report_to_locust
from loadtest.openai_server import Server, ServerError, find_server
from loadtest.record import ClientReason, RequestLabel
from loadtest.request_body import Dialect
from loadtest.sse_client import ClientSettings, StreamingClient
from loadtest.workload import DEFAULT_OUTPUT_TOKENS, load_workload
from serving.core.client_key import client_key
from serving.core.errors import ConfigError
from serving.core.lane import ANY_LANE

logger = logging.getLogger(__name__)

LEAD_S = 1.0  # from the order to begin to the schedule's first instant, so that every worker is ready
SHARE, SHARE_DONE = "tandem_share", "tandem_share_done"  # messages between master and workers
PROMPTS_PER_WORKER = 1_000_000
EXIT_USAGE = 2
EXIT_FAILED = 3


def _checked(check: Callable[[str], Any]) -> Callable[[str], str]:
    """An option's type: text that `check` accepts."""

    def read(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return read


def _check_load(text: str) -> None:
    if text and isinstance(parse_load(text), ClosedLoop):
        raise ValueError(
            f"load {text!r} is a closed loop, which --users makes; --load takes rates and traces"
        )


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_arguments(parser: Any) -> None:
    parser.add_argument("--server", choices=("auto", *Dialect), default="auto", help="What answers there.")
    parser.add_argument("--model", default="", help="Model to ask for; empty: the first of /v1/models.")
    parser.add_argument("--lane", default="", help="Lane to pin, on a Tandem lab; empty lets it choose.")
    parser.add_argument("--workload", type=_checked(load_workload), default="copy", help="What is asked.")
    parser.add_argument(
        "--load", type=_checked(_check_load), default="", help="Open loop: poisson:4/s,60s and so on."
    )
    parser.add_argument(
        "--output-tokens", type=int, default=DEFAULT_OUTPUT_TOKENS, help="Length of an answer."
    )
    parser.add_argument("--seed", type=int, default=0, help="Of prompts and arrivals; 0: a fresh one.")


def _api_key() -> str | None:
    """For whatever server is asked; a lab's own key goes before the one that is for all services."""
    return client_key() or os.environ.get("OPENAI_API_KEY") or None


class Traffic:
    """What this process sends: the server it found, and its part of an open loop's schedule."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._numbers = itertools.count()
        self._server: Server | None = None
        self._stopped = Event()
        self._connections = Connections(self.connect)
        self._progress = ProgressCounter(time.perf_counter)
        self._count_ended = export(environment, self._progress.read)
        self.num_dispatched = 0
        self._num_ended = 0
        self.share: dict[str, Any] = {"index": 0, "of": 1, "begin_at": 0.0}

    def connect(self) -> StreamingClient:
        return StreamingClient(ClientSettings(self._environment.host, api_key=_api_key()))

    @property
    def place(self) -> Place:
        """Lane and workload as far as they are known before an answer is there."""
        options, server = self._environment.parsed_options, self._server
        anywhere = ANY_LANE if server is None or server.dialect is Dialect.TANDEM else server.model
        return options.lane or anywhere, options.workload

    @property
    def num_busy(self) -> int:
        """Users of a closed loop, or requests in flight of an open one."""
        if self._environment.parsed_options.load:
            return self.num_dispatched - self._num_ended
        return int(self._environment.runner.user_count)

    def begin(self) -> None:
        """Find the server, and start the schedule if there is one."""
        environment, options = self._environment, self._environment.parsed_options
        self._server = find_server(environment.host, options.server, options.model, _api_key())
        worker = getattr(environment.runner, "worker_index", 0)
        self._numbers = itertools.count(worker * PROMPTS_PER_WORKER)
        self._stopped.clear()
        self._connections = Connections(self.connect)
        self.num_dispatched = self._num_ended = 0
        self._progress.is_run_active = True
        if not options.load:
            self._progress.began(self)
        else:
            gevent.spawn(self._run_schedule).link_exception(lambda _: _fail(environment))

    def stop(self) -> None:
        self._stopped.set()
        self._connections.cancel(ClientReason.INTERRUPTED)
        self._progress.ended()
        self._progress.is_run_active = False

    def ask_next(self, client: StreamingClient) -> None:
        """One request of a closed loop."""
        self._ask(client, next(self._numbers), time.perf_counter())

    def _run_schedule(self) -> None:
        """This process's share, every n-th arrival, each as soon as it is due."""
        options, share = self._environment.parsed_options, self.share
        load = parse_load(options.load)
        assert not isinstance(load, ClosedLoop)
        arrivals = tuple(enumerate(schedule(load, f"{options.seed}/{options.workload}/{load.label}/0")))
        mine = arrivals[share["index"] :: share["of"]]
        # The master names the instant by the clock on the wall, which is all that processes have in common.
        lead_s = share["begin_at"] - time.time() if share["begin_at"] else LEAD_S
        began_at_s = time.perf_counter() + lead_s
        self._progress.began(self, [began_at_s + arrival.at_s for _, arrival in mine])
        keep_schedule(mine, began_at_s, time.perf_counter, self._stopped, self._serve)
        self._connections.close()
        if not self._stopped.is_set():
            _say_done(self._environment, len(mine))

    def _serve(self, number: int, due_at_s: float, arrival: Arrival) -> None:
        client = self._connections.take()
        try:
            self._ask(client, number, due_at_s, arrival)
        finally:
            self._connections.give_back(client)

    def _ask(
        self, client: StreamingClient, number: int, due_at_s: float, arrival: Arrival | None = None
    ) -> None:
        options, server = self._environment.parsed_options, self._server
        if server is None:  # the start failed and has said why
            raise StopUser
        body = load_workload(options.workload, output_tokens=options.output_tokens).body(
            model=server.model_for(options.lane),
            seed=options.seed,
            number=number,
            arrival=arrival,
            dialect=server.dialect,
        )
        label = RequestLabel(f"locust-{uuid.uuid4().hex}", options.lane, options.workload, "locust", number)
        self.num_dispatched += 1
        try:
            record = client.send(label, body, scheduled_at_s=due_at_s)
        finally:
            self._num_ended += 1
        lane = record.served_by_lane or options.lane or server.model
        self._count_ended(ended_request(record, record.served_by_lane or self.place[0]))
        report_to_locust(self._environment, f"{lane}/{options.workload}", record)


@events.init.add_listener  # type: ignore[untyped-decorator]
def _prepare(environment: Any, web_ui: Any, **_: Any) -> None:
    runner = environment.runner
    try:
        environment.traffic = Traffic(environment)
    except ValueError as error:
        logger.error("%s", error)
        sys.exit(EXIT_USAGE)
    environment.shares_left = 0
    if web_ui is not None:
        add_charts(environment)
    if isinstance(runner, WorkerRunner):
        runner.register_message(SHARE, _take_share)
    if isinstance(runner, MasterRunner):
        runner.register_message(SHARE_DONE, _count_share)
    options = environment.parsed_options
    if options is not None and not options.seed:
        options.seed = secrets.randbelow(2**31 - 1) + 1
        logger.info("seed %d", options.seed)


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Any, **_: Any) -> None:
    runner = environment.runner
    if isinstance(runner, MasterRunner):
        workers = runner.clients.ready
        environment.shares_left = len(workers)
        for index, worker in enumerate(sorted(workers, key=lambda worker: str(worker.id))):
            share = {"index": index, "of": len(workers), "begin_at": time.time() + LEAD_S}
            runner.send_message(SHARE, share, client_id=worker.id)
        return
    try:
        environment.traffic.begin()
    except (ServerError, ConfigError, ValueError) as error:
        logger.error("%s", error)
        _fail(environment)


@events.test_stopping.add_listener  # type: ignore[untyped-decorator]
def _stop(environment: Any, **_: Any) -> None:
    environment.traffic.stop()


def _take_share(environment: Any, msg: Any, **_: Any) -> None:
    environment.traffic.share = msg.data


def _say_done(environment: Any, num_requests: int) -> None:
    """The share is sent and answered: tell the master, or end the test."""
    logger.info("schedule done: %d requests", num_requests)
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message(SHARE_DONE)
    else:
        _end_test(environment)


def _count_share(environment: Any, **_: Any) -> None:
    environment.shares_left -= 1
    if environment.shares_left == 0:
        _end_test(environment)


def _fail(environment: Any) -> None:
    environment.process_exit_code = EXIT_FAILED
    gevent.spawn(environment.runner.quit)


def _end_test(environment: Any) -> None:
    # Locust writes its CSV, and workers report, at intervals only: what came last must not be missing.
    is_master = isinstance(environment.runner, MasterRunner)
    settle_s = 2 * CSV_STATS_INTERVAL_SEC + (WORKER_REPORT_INTERVAL if is_master else 0)
    gevent.spawn_later(
        settle_s, environment.runner.stop if environment.web_ui is not None else environment.runner.quit
    )


class ChatUser(User):  # type: ignore[misc]
    """Asks, reads the answer to its end, and asks again; under an open loop it only stands by."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.client = self.environment.traffic.connect()

    def on_stop(self) -> None:
        self.client.close()

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        if self.environment.parsed_options.load:
            gevent.sleep(1)
        else:
            self.environment.traffic.ask_next(self.client)
