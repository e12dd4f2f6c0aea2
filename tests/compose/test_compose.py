"""The lab in containers: served, loaded, watched, broken and healed."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam

from dashboards.load_test import LOAD_TEST
from dashboards.spec import filled
from dashboards.tension import TENSION
from tests.chaos.crowd import at_rest
from tests.compose.stack import (
    ENGINES_PER_WORKER,
    NUM_WORKERS,
    Stack,
    Worker,
    docker,
    running_stack,
    why_no_engine,
)
from tests.observability.prometheus_process import Prometheus
from tests.running_lab import wait_until

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_no_engine() is not None, reason=f"no containers here: {why_no_engine()}"),
]

LANES = ("sequential", "batched", "speculative")
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
EVERY_TARGET = {"scheduler": 1, "gateway": 1, "replica": len(LANES), "ray": 1 + NUM_WORKERS}
LOCUST_RUN_S = 60
PARTITION_S = 20
HEAL_LIMIT_S = 420
STREAM_TOKENS = 300
STREAMS_PER_LANE = 2
WHOLE = "whole"
CLEAN_ERRORS = {"upstream_broke", "engine_died", "upstream_timeout", "no_replica_ready", "queue_timeout"}


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    failed_before = request.session.testsfailed
    with running_stack(sys.stderr.write) as running:
        yield running
        if request.session.testsfailed > failed_before:
            sys.stderr.write(running.logs())


@pytest.mark.parametrize("lane", LANES)
def test_the_gateway_answers_the_openai_client(stack: Stack, lane: str) -> None:
    answer = stack.lab.client().chat.completions.with_raw_response.create(
        model=f"smollm2-135m:{lane}", messages=QUESTION, max_tokens=24, temperature=0
    )
    assert answer.headers["x-tandem-lane"] == lane
    assert "Paris" in (answer.parse().choices[0].message.content or "")


def test_engines_are_on_the_workers_and_nowhere_else(stack: Stack) -> None:
    workers = stack.workers()
    assert len(workers) == NUM_WORKERS
    placed = [stack.lanes_on(worker) for worker in workers]
    assert sorted(lane for lanes in placed for lane in lanes) == sorted(LANES)
    assert all(0 < len(lanes) <= ENGINES_PER_WORKER for lanes in placed)


def test_a_run_from_locust_s_page_is_seen_by_prometheus_and_the_dashboards(stack: Stack) -> None:
    form = {"user_count": 4, "spawn_rate": 4, "host": "http://head:8000"}
    started = httpx.post(f"{stack.locust_url}/swarm", data=form, timeout=30).json()
    assert started["success"], started
    start_s = time.time()
    wait_until(lambda: time.time() >= start_s + LOCUST_RUN_S, "the run is over", limit_s=LOCUST_RUN_S + 5)
    statistics = httpx.get(f"{stack.locust_url}/stats/requests", timeout=30).json()
    httpx.post(f"{stack.locust_url}/stop", timeout=30).raise_for_status()
    assert statistics["state"] == "running"
    assert statistics["errors"] == []
    # Locust's row E2E of each lane is a whole request, as seen by the client.
    whole = [row for row in statistics["stats"] if row["name"] == "E2E"]
    assert sum(row["num_requests"] for row in whole) >= 4
    assert sum(row["num_failures"] for row in whole) == 0
    prometheus = Prometheus(stack.prometheus_url)
    assert up_by_role(prometheus) == EVERY_TARGET
    assert [target["health"] for target in prometheus.targets("load")] == ["up"]
    for panel in (*TENSION.panels, *LOAD_TEST.panels):
        for query in panel.queries:
            result = prometheus.series(filled(query.expr, {}), start_s, time.time())
            values = [float(value) for series in result for _, value in series["values"]]
            assert query.may_be_empty or any(map(math.isfinite, values)), f"{panel.title}: {query.expr}"


def up_by_role(prometheus: Prometheus) -> Counter[str]:
    """Targets that answer, by role; one that does not counts under its role and the fault."""
    return Counter(
        target["labels"]["role"] + (f": {target['lastError']}" if target["health"] != "up" else "")
        for target in prometheus.targets("tandem")
    )


def test_a_worker_killed_under_load_comes_back(stack: Stack) -> None:
    victim = worker_without(stack, "batched")
    lost = stack.lanes_on(victim)
    before = replica_ids(stack)
    with streams_everywhere(stack) as ends:
        docker("kill", victim.container)
    assert_clean(ends, lost)
    # Another worker may have room for them at once.
    wait_until(lambda: not any_left(stack, before, lost), "its loss is seen", limit_s=60)
    # The other worker serves on meanwhile.
    assert stream(stack, "batched", max_tokens=8) == WHOLE
    docker("start", victim.container)
    assert_healed(stack)
    assert_others_untouched(stack, before, lost)


def test_a_worker_cut_off_for_a_while_comes_back(stack: Stack) -> None:
    victim = worker_without(stack, "batched")
    lost = stack.lanes_on(victim)
    before = replica_ids(stack)
    with streams_everywhere(stack) as ends:
        docker("network", "disconnect", stack.network, victim.container)
        cut_at_s = time.monotonic()
        wait_until(lambda: time.monotonic() > cut_at_s + PARTITION_S, "the cut is over", PARTITION_S + 5)
        assert not any_left(stack, before, lost), "its loss is seen"
        docker("network", "connect", stack.network, victim.container)
    assert_clean(ends, lost)
    assert_healed(stack)
    assert_others_untouched(stack, before, lost)


def replica_ids(stack: Stack) -> dict[str, set[str]]:
    """Of the ready replicas, by lane."""
    lanes = stack.lab.get("/scheduler")["lanes"]
    return {one["lane"]: {replica["replica"] for replica in one["replicas"]} for one in lanes}


def any_left(stack: Stack, before: dict[str, set[str]], lost: list[str]) -> bool:
    """Whether any of these lanes' replicas is the one that it was."""
    now = replica_ids(stack)
    return any(before[lane] & now[lane] for lane in lost)


def assert_others_untouched(stack: Stack, before: dict[str, set[str]], lost: list[str]) -> None:
    """No engine of another worker was replaced."""
    after = replica_ids(stack)
    assert {lane: ids for lane, ids in after.items() if lane not in lost} == {
        lane: ids for lane, ids in before.items() if lane not in lost
    }


def worker_without(stack: Stack, lane: str) -> Worker:
    """A worker whose loss leaves the lane as it is, and which has something to lose."""
    found = [worker for worker in stack.workers() if lane not in stack.lanes_on(worker)]
    assert found, f"every worker has a replica of {lane}"
    assert stack.lanes_on(found[0]), f"{found[0]} has no engine"
    return found[0]


@contextmanager
def streams_everywhere(stack: Stack) -> Iterator[dict[str, list[str]]]:
    """Long answers on every lane, running when the block begins; how they ended, by lane, when it has ended."""
    ends: dict[str, list[str]] = {}
    with ThreadPoolExecutor(len(LANES) * STREAMS_PER_LANE) as threads:
        running: dict[str, list[Future[str]]] = {
            lane: [threads.submit(stream, stack, lane, STREAM_TOKENS) for _ in range(STREAMS_PER_LANE)]
            for lane in LANES
        }
        wait_until(lambda: all_lanes_run(stack), "every lane has a running request", limit_s=60)
        yield ends
        ends |= {lane: [one.result() for one in futures] for lane, futures in running.items()}


def all_lanes_run(stack: Stack) -> bool:
    lanes = stack.lab.get("/scheduler")["lanes"]
    return all(any(replica["running"] for replica in lane["replicas"]) for lane in lanes)


def stream(stack: Stack, lane: str, max_tokens: int) -> str:
    """How a streamed answer ended: `whole`, or the code of the lab's own error.

    Raises:
        httpx.TransportError: the connection was torn instead.
    """
    body: dict[str, Any] = {
        "model": f"smollm2-135m:{lane}",
        "messages": QUESTION,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    url = f"{stack.lab.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=HEAL_LIMIT_S) as answer:
        if answer.status_code != 200:
            return str(json.loads(answer.read())["error"]["code"])
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return WHOLE
            if line.startswith("data: ") and "error" in (event := json.loads(line.removeprefix("data: "))):
                return str(event["error"]["code"])
    return "cut without a word"


def assert_clean(ends: dict[str, list[str]], lost: list[str]) -> None:
    """Every stream ended whole, or said why; those of other workers' lanes ended whole."""
    for lane, how in ends.items():
        allowed = {WHOLE} | (CLEAN_ERRORS if lane in lost else set())
        assert set(how) <= allowed, ends
    assert len(ends) == len(LANES)


def assert_healed(stack: Stack) -> None:
    wait_until(stack.is_whole, "every lane is ready again", limit_s=HEAL_LIMIT_S)
    for lane in LANES:
        assert stream(stack, lane, max_tokens=8) == WHOLE, lane
    wait_until(lambda: at_rest(stack.lab), "nothing is booked any more", limit_s=60)
    prometheus = Prometheus(stack.prometheus_url)
    wait_until(
        lambda: up_by_role(prometheus) == EVERY_TARGET, "Prometheus sees every process again", limit_s=60
    )
