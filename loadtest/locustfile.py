"""Locust users for a running lab, for looking around by hand:

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000

Locust's page then shows two lines for each lane and workload, TTFT and E2E. `loadtest.bench` measures
stages of a fixed size and writes a report.
"""

# Locust patches the interpreter: it must come before whatever imports ssl or socket.
# isort: off
from locust import User, constant, events, task
from locust.env import Environment
# isort: on

import itertools
import time
import uuid
from typing import Any

from loadtest.lab import describe_lab
from loadtest.record import RequestLabel, RequestRecord
from loadtest.sse_client import ClientSettings, StreamingClient
from loadtest.workload import DEFAULT_OUTPUT_TOKENS, WORKLOAD_NAMES, load_workload
from serving.core.latency import e2e_latency_s, ttft_s


class RequestNotCompletedError(Exception):
    """How Locust is told that a request failed; the text is its reason."""


def report_to_locust(environment: Any, key: str, record: RequestRecord) -> None:
    """Give Locust's statistics one finished request: `E2E` always, `TTFT` when a first token came. In ms."""
    failure = None if record.is_completed else RequestNotCompletedError(record.reason)
    timeline = record.timeline
    if timeline.first_token_at_s is not None:
        _fire(environment, key, "TTFT", ttft_s(timeline), len(record.text), None)
    _fire(environment, key, "E2E", e2e_latency_s(timeline), len(record.text), failure)


def _fire(
    environment: Any, key: str, name: str, seconds: float, length: int, failure: Exception | None
) -> None:
    environment.events.request.fire(
        request_type=key,
        name=name,
        response_time=seconds * 1000,
        response_length=length,
        exception=failure,
        context={},
    )


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_arguments(parser: Any) -> None:
    parser.add_argument("--lane", default="", help="Lane to pin; empty lets the lab choose.")
    parser.add_argument("--workload", choices=WORKLOAD_NAMES, default="copy", help="What is asked.")
    parser.add_argument(
        "--output-tokens", type=int, default=DEFAULT_OUTPUT_TOKENS, help="Length of an answer."
    )
    parser.add_argument("--seed", type=int, default=0, help="Order of the prompts.")


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _find_model(environment: Environment, **_: Any) -> None:
    if environment.host and environment.parsed_options is not None:
        environment.model_name = describe_lab(environment.host)["model"]["name"]
        environment.prompt_numbers = itertools.count()


class ChatUser(User):  # type: ignore[misc]
    """Asks, reads the answer to its end, and asks again."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.client = StreamingClient(ClientSettings(self.host))

    def on_stop(self) -> None:
        self.client.close()

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        options = self.environment.parsed_options
        number = next(self.environment.prompt_numbers)
        model = self.environment.model_name
        body = load_workload(options.workload).body(
            model=f"{model}:{options.lane}" if options.lane else model,
            seed=options.seed,
            number=number,
            output_tokens=options.output_tokens,
        )
        label = RequestLabel(f"locust-{uuid.uuid4().hex}", options.lane, options.workload, "locust", number)
        record = self.client.send(label, body, scheduled_at_s=time.perf_counter())
        report_to_locust(self.environment, f"{record.served_by_lane or 'none'}/{options.workload}", record)
