"""Locust as people know it, against any OpenAI-compatible server:

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
    locust -f loadtest/locustfile.py --host ... --headless --users 4 --run-time 1m --csv out --html out.html
    locust -f loadtest/locustfile.py --host ... --headless --load poisson:4/s,60s
    locust -f loadtest/locustfile.py --host ... --master    and, once for each core,    ... --worker

Rows TTFT, TPOT, E2E and ICL max for each lane and workload, of completed requests; charts of the first three at
/latency on Locust's page; the same for Prometheus at 127.0.0.1:9465 (TANDEM_LOAD_METRICS_ADDRESS,
TANDEM_LOAD_METRICS_PORT; 0: not).
An API key is read from TANDEM_API_KEY, else from OPENAI_API_KEY.
`tandem bench` measures stages of a fixed size and writes a report.
"""

# Locust patches the interpreter: it must come before whatever imports ssl or socket.
# isort: off
from locust import User, constant, events, task
from locust.exception import StopUser
from locust.runners import HEARTBEAT_INTERVAL, WORKER_REPORT_INTERVAL, MasterRunner, WorkerRunner
from locust.stats import CSV_STATS_INTERVAL_SEC
# isort: on

import argparse
import logging
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event

# Given as a path, this file must find its package without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loadtest.by_hand.charts import add_charts
from loadtest.by_hand.exporter import workers_present
from loadtest.by_hand.shares import Shares
from loadtest.by_hand.traffic import LEAD_S, WHOLE, Share, Traffic, arrivals_asked, open_load
from loadtest.client.openai_server import ServerError
from loadtest.judge.wording import count
from loadtest.offer.request_body import Dialect
from loadtest.offer.workload import DEFAULT_OUTPUT_TOKENS, load_workload
from loadtest.run.locust_stats import CUT_OFF
from serving.core.errors import ConfigError
from serving.core.exit_codes import LOAD_FAILED, ExitCode

logger = logging.getLogger(__name__)

SHARE_DONE, FAILED = "tandem_share_done", "tandem_failed"  # messages from workers to their master

prepared = Event()


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
    if text:
        open_load(text)


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
    parser.add_argument(
        "--needs-done",
        action="store_true",
        help="Answers without [DONE] are cut off, even if they are whole.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Of prompts and arrivals; 0: a fresh one.")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _prepare(environment: Any, web_ui: Any, **_: Any) -> None:
    runner = environment.runner
    try:
        environment.traffic = Traffic(environment)
    except ValueError as error:
        logger.error("%s", error)
        sys.exit(ExitCode.USAGE)
    environment.shares = Shares({})
    environment.ending = None
    if web_ui is not None:
        add_charts(environment)
    if isinstance(runner, MasterRunner):
        runner.register_message(SHARE_DONE, _count_share)
        runner.register_message(FAILED, _hear_failure)
    prepared.set()


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Any, **_: Any) -> None:
    prepared.wait()  # a worker that joins a running test is told to start while it is still being made
    runner, options = environment.runner, environment.parsed_options
    if environment.ending is not None:
        environment.ending.kill(block=False)  # the end of the test before is not that of this one
    environment.starter, environment.process_exit_code = gevent.getcurrent(), None
    # A worker has its options, the seed included, from the master.
    if not isinstance(runner, WorkerRunner) and not options.seed:
        options.seed = secrets.randbelow(2**31 - 1) + 1
        logger.info("seed %d", options.seed)
    try:
        if isinstance(runner, MasterRunner):
            load_workload(
                options.workload, output_tokens=options.output_tokens
            )  # the page lets anything through
            if options.load:
                _share_out(environment)
        else:
            environment.traffic.begin(
                _share(environment),
                lambda num_requests: _say_done(environment, num_requests),
                lambda error: _fail(environment, error),
            )
    except (ServerError, ConfigError, ValueError) as error:
        _fail(environment, str(error))
        if not isinstance(runner, WorkerRunner):
            raise gevent.GreenletExit from None  # ends Locust's start before a user or a worker hears of it


@events.test_stopping.add_listener  # type: ignore[untyped-decorator]
def _stop(environment: Any, **_: Any) -> None:
    # Locust stops a test by itself when its last worker is gone.
    _look_for_workers(environment)
    environment.shares = Shares({})
    environment.traffic.stop()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def _settle(environment: Any, **_: Any) -> None:
    run = environment.traffic.run
    if run is not None and run.num_cut_off:
        logger.warning(
            "%s under way at the end of the test: cut off, and in no row but %r (--stop-timeout gives them time)",
            count(run.num_cut_off, "request"),
            CUT_OFF,
        )
    if environment.parsed_options.csv_prefix and not isinstance(environment.runner, WorkerRunner):
        # Locust writes its CSV at intervals only: what came last must not be missing.
        gevent.sleep(2 * CSV_STATS_INTERVAL_SEC)


def _share_out(environment: Any) -> None:
    """Give every worker its part of the schedule, and watch that none is waited for in vain."""
    workers, options = sorted(workers_present(environment.runner)), environment.parsed_options
    arrivals = arrivals_asked(options)
    environment.shares = Shares(
        {worker: len(arrivals[index :: len(workers)]) for index, worker in enumerate(workers)}
    )
    # Locust sends every worker the master's options when it tells it to start.
    options.tandem_workers, options.tandem_begin_at_s = workers, time.time() + LEAD_S
    gevent.spawn(_watch_shares, environment, environment.shares)


def _share(environment: Any) -> Share | None:
    """This process's part of a schedule; None for a worker that was not there when it was shared out."""
    runner, options = environment.runner, environment.parsed_options
    if not isinstance(runner, WorkerRunner) or not options.load:
        return WHOLE
    if runner.client_id not in options.tandem_workers:
        logger.warning("this worker came after the schedule was shared out: it sends nothing of it")
        return None
    index = options.tandem_workers.index(runner.client_id)
    return Share(index, len(options.tandem_workers), options.tandem_begin_at_s)


def _watch_shares(environment: Any, shares: Shares) -> None:
    while environment.shares is shares and not shares.is_over:
        _look_for_workers(environment)
        gevent.sleep(HEARTBEAT_INTERVAL)


def _look_for_workers(environment: Any) -> None:
    shares = environment.shares
    if shares.is_over:
        return
    gone, back = shares.look(workers_present(environment.runner))
    for worker, size in gone.items():
        logger.error("worker %s is gone, and its share of %d arrivals is lost", worker, size)
    for worker, size in back.items():
        logger.warning("worker %s is back, with its share of %d arrivals", worker, size)
    if shares.is_over:
        _end_shares(environment)


def _say_done(environment: Any, num_requests: int) -> None:
    """The share is sent and answered: tell the master, or end the test."""
    logger.info("schedule done: %d requests", num_requests)
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message(SHARE_DONE)
    else:
        _end_test(environment)


def _count_share(environment: Any, msg: Any, **_: Any) -> None:
    if not environment.shares.is_over:
        environment.shares.done(msg.node_id)
        if environment.shares.is_over:
            _end_shares(environment)


def _end_shares(environment: Any) -> None:
    shares = environment.shares
    if shares.lost:
        logger.error(
            "the load was not offered as asked: the shares of %s, %d of %d arrivals, are lost; "
            "figures hold what had been told until then",
            count(len(shares.lost), "worker"),
            sum(shares.lost.values()),
            shares.total,
        )
        environment.process_exit_code = LOAD_FAILED
    _end_test(environment)


def _hear_failure(environment: Any, msg: Any, **_: Any) -> None:
    _fail(environment, f"worker {msg.node_id}: {msg.data}")


def _fail(environment: Any, error: str) -> None:
    """End the test with an error. Locust's page, where there is one, and the workers stay for the next."""
    logger.error("%s", error)
    environment.process_exit_code = LOAD_FAILED
    if isinstance(environment.runner, WorkerRunner):
        environment.runner.send_message(FAILED, error)
    else:
        gevent.spawn(_end, environment)


def _end_test(environment: Any) -> None:
    # Workers report at intervals only: what came last must not be missing.
    settle_s = 2 * WORKER_REPORT_INTERVAL if isinstance(environment.runner, MasterRunner) else 0
    environment.ending = gevent.spawn_later(settle_s, _end, environment)


def _end(environment: Any) -> None:
    if environment.web_ui is None:
        environment.runner.quit()
    else:
        # Locust would go on with a ramp, whose next users begin the test again. Edit on the page makes its own.
        edited = environment.web_ui._swarm_greenlet  # noqa: SLF001 - Locust's page ends it on Stop, and so must we
        gevent.killall([ramp for ramp in (environment.starter, edited) if ramp])
        environment.runner.stop()


class ChatUser(User):  # type: ignore[misc]
    """Asks, reads the answer to its end, and asks again; under an open loop it only stands by."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.client = self.environment.traffic.connect()

    def on_stop(self) -> None:
        self.client.close()

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        run = self.environment.traffic.run
        if run is None:  # the start failed and has said why
            raise StopUser
        if run.is_open_loop:
            gevent.sleep(1)
        elif not run.ask_next(self.client):
            raise StopUser
