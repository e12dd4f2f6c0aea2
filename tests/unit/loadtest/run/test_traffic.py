"""A stage with a client that answers when the test says so. Nothing here waits for time to pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import gevent
import pytest
from gevent.event import Event

from loadtest.client.record import ClientReason, RequestLabel, RequestRecord
from loadtest.judge.slo import parse_slo
from loadtest.offer.load import Arrival, ClosedLoop, constant_rate
from loadtest.run import traffic as traffic_module
from loadtest.run.dispatch import keep_schedule
from loadtest.run.plan import Plan, StagePlan
from loadtest.run.sender import MadeRequest, Sender, slug
from loadtest.run.traffic import ClosedTraffic, OpenTraffic, Traffic
from serving.core.request import Outcome


class FakeClient:
    """Answers once the switch is on, or is cancelled. `fails` makes each answer a failure."""

    def __init__(self, switch: Event, fails: bool) -> None:
        self.switch, self.fails = switch, fails
        self.bodies: list[dict[str, object]] = []
        self.is_closed = False
        self._cancelled: ClientReason | None = None
        self.withdrawn: ClientReason | None = None

    def send(self, label: RequestLabel, body: dict[str, object], scheduled_at_s: float) -> RequestRecord:
        self.bodies.append(body)
        self.switch.wait()
        is_good = not self.fails and self._cancelled is None
        outcome = Outcome.COMPLETED if is_good else Outcome.CANCELLED if self._cancelled else Outcome.FAILED
        reason = None if is_good else str(self._cancelled or ClientReason.CUT_OFF)
        return RequestRecord(
            label, outcome, scheduled_at_s, finished_at_s=scheduled_at_s + 9, chunk_at_s=(scheduled_at_s + 5,),
            reason=reason, output_tokens=2,
        )  # fmt: skip

    def cancel(self, reason: ClientReason) -> None:
        self._cancelled = reason
        self.switch.set()

    def withdraw(self, reason: ClientReason) -> None:
        self.withdrawn = reason
        self.cancel(reason)

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A sender whose clients are fakes, and a clock that never moves: all that is due is due at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.switch = Event()
        self.clients: list[FakeClient] = []
        self.fails = fails
        self.one_by_one = False  # each client has a switch of its own
        monkeypatch.setattr(Sender, "connect", lambda _: self._connect())
        self.sender = Sender(Plan("http://h:1", "m", (), seed=3), "run.2", "run", lambda: 100.0)
        self.kept: list[RequestRecord] = []

    def _connect(self) -> FakeClient:
        self.clients.append(FakeClient(Event() if self.one_by_one else self.switch, self.fails))
        return self.clients[-1]

    def open(
        self, requests: int, max_in_flight: int = 9, first_prompt: int = 0, warmup_requests: int = 0
    ) -> OpenTraffic:
        load = constant_rate(1, 60)
        stage = StagePlan("batched", "copy", load, requests, first_prompt, warmup_requests=warmup_requests)
        return OpenTraffic(self.sender, stage, self.kept.append, max_in_flight)

    def start(self, stage: Traffic) -> list[gevent.Greenlet]:
        """Run it until nothing more can happen without an answer."""
        users = [gevent.spawn(stage.run_user) for _ in range(stage.num_users)]
        for _ in range(50):
            gevent.sleep(0)
        return users


@pytest.fixture(autouse=True)
def _due_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrivals_of(plan: StagePlan, seed: int) -> tuple[Arrival, ...]:
        return tuple(Arrival(0.0, 20 + n, 30 + n) for n in range(plan.warmup_requests + plan.requests))

    monkeypatch.setattr(traffic_module, "arrivals_of", arrivals_of)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    one = Bench(monkeypatch)
    yield one
    one.switch.set()


def test_an_open_loop_has_a_connection_for_each_request_and_uses_it_again(bench: Bench) -> None:
    stage = bench.open(5)
    users = bench.start(stage)
    assert (len(bench.clients), stage.num_dispatched, len(stage.in_flight)) == (5, 5, 5)
    assert set(stage.in_flight.values()) == {100.0}
    bench.switch.set()
    gevent.joinall(users, raise_error=True)
    assert stage.done.is_set()
    assert (stage.num_finished, stage.in_flight) == (5, {})
    assert all(client.is_closed for client in bench.clients)


def test_answers_at_once_need_one_connection(bench: Bench) -> None:
    bench.switch.set()
    gevent.joinall(bench.start(bench.open(5)), raise_error=True)
    assert len(bench.clients) == 1
    assert len(bench.clients[0].bodies) == 5


def test_warm_up_is_marked_and_a_trace_says_how_long_answers_are(bench: Bench) -> None:
    bench.switch.set()
    gevent.joinall(bench.start(bench.open(3, warmup_requests=2, first_prompt=40)), raise_error=True)
    labels = [record.label for record in bench.kept]
    assert [(label.number, label.is_warmup) for label in labels] == [
        (40, True), (41, True), (42, False), (43, False), (44, False),
    ]  # fmt: skip
    assert [body["max_tokens"] for body in bench.clients[0].bodies] == [30, 31, 32, 33, 34]
    assert labels[0].request_id == "run.2-batched-copy-poisson-1-req-s-40"
    assert labels[0].stage == "batched/copy/poisson 1 req/s"


def test_too_many_in_flight_stop_the_stage_with_the_bound(bench: Bench) -> None:
    stage = bench.open(12, max_in_flight=4)
    gevent.joinall(bench.start(stage), raise_error=True)
    assert stage.stop_reason is ClientReason.STAGE_HOPELESS
    assert stage.stop_detail == "4 requests in flight (max_in_flight=4)"
    assert [record.reason for record in bench.kept] == ["stage_hopeless"] * 4
    assert stage.done.is_set()


@pytest.mark.parametrize(("requests", "is_stopped"), [(19, False), (20, True)])
def test_errors_are_judged_from_twenty_requests_on(
    requests: int, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch, fails=True)
    bench.switch.set()
    stage = bench.open(requests, max_in_flight=99)
    gevent.joinall(bench.start(stage), raise_error=True)
    assert stage.num_failed == requests
    assert (stage.stop_reason is ClientReason.STAGE_HOPELESS) is is_stopped


def test_the_first_reason_to_stop_stays(bench: Bench) -> None:
    stage = bench.open(2)
    users = bench.start(stage)
    stage.stop(ClientReason.STAGE_TIME_UP, "too long")
    stage.stop(ClientReason.INTERRUPTED)
    gevent.joinall(users, raise_error=True)
    assert (stage.stop_reason, stage.stop_detail) == (ClientReason.STAGE_TIME_UP, "too long")
    assert {record.reason for record in bench.kept} == {"stage_time_up"}


@pytest.mark.parametrize(("slo", "is_lost"), [("ttft_p95<6s", False), ("ttft_p95<4s", True)])
def test_an_objective_is_judged_without_warm_up(bench: Bench, slo: str, is_lost: bool) -> None:
    # Every fake answer has its first token after 5 s and ends after 9.
    bench.switch.set()
    stage = bench.open(2, warmup_requests=3)
    gevent.joinall(bench.start(stage), raise_error=True)
    for _ in range(2):  # as the run goes on; no request counts twice
        stage.judge(parse_slo(slo))
    assert stage.stop_reason is (ClientReason.STAGE_HOPELESS if is_lost else None)
    if is_lost:
        assert stage.stop_detail == "2 of 2 requests missed ttft_p95<4s: it cannot hold any more (stop_early)"


@pytest.mark.parametrize(("slo", "is_lost"), [("e2e_p95<60s", False), ("e2e_p95<40s", True)])
def test_unfinished_requests_lose_an_objective_by_their_age(bench: Bench, slo: str, is_lost: bool) -> None:
    stage = bench.open(2)
    users = bench.start(stage)
    stage.in_flight = dict.fromkeys(stage.in_flight, 50.0)  # due 50 s ago
    stage.judge(parse_slo(slo))
    assert stage.stop_reason is (ClientReason.STAGE_HOPELESS if is_lost else None)
    bench.switch.set()
    gevent.joinall(users, raise_error=True)


def test_users_share_the_prompts_and_keep_their_connections(bench: Bench) -> None:
    stage = ClosedTraffic(bench.sender, StagePlan("batched", "copy", ClosedLoop(2), 5), bench.kept.append)
    users = bench.start(stage)
    bench.switch.set()
    gevent.joinall(users, raise_error=True)
    assert sorted(record.label.number for record in bench.kept if record.label.counts) == [2, 3, 4, 5, 6]
    assert len(bench.clients) == 2
    assert all(client.is_closed for client in bench.clients)


def kinds(records: list[RequestRecord]) -> list[str]:
    return [
        "before" if record.label.is_warmup else "after" if record.label.is_tail else "counts"
        for record in records
    ]


def test_all_go_on_until_the_last_request_that_counts_has_ended(bench: Bench) -> None:
    """One of four is slow: the other user sends more meanwhile, and none of that counts."""
    plan = StagePlan("batched", "copy", ClosedLoop(2), 4)
    stage = ClosedTraffic(bench.sender, plan, bench.kept.append)
    users = bench.start(stage)
    slow = bench.clients[0]
    slow.switch = Event()  # of its second request, which counts
    bench.switch.set()
    while "after" not in kinds(bench.kept):
        gevent.sleep(0)
    assert (kinds(bench.kept).count("counts"), stage.done.is_set()) == (3, False)
    slow.switch.set()
    gevent.joinall(users, raise_error=True)
    assert kinds(bench.kept).count("before") == 2
    assert kinds(bench.kept).count("counts") == 4
    # However many there are, they share the few prompts that the plan keeps for them.
    assert {record.label.number for record in bench.kept} <= set(range(plan.prompts_end))
    assert len({record.label.request_id for record in bench.kept}) == len(bench.kept)


def test_what_has_no_answer_when_the_last_that_counts_ends_is_withdrawn(bench: Bench) -> None:
    bench.one_by_one = True
    stage = ClosedTraffic(bench.sender, StagePlan("batched", "copy", ClosedLoop(2), 2), bench.kept.append)
    users = bench.start(stage)
    answered, waits = bench.clients
    answered.switch.set()  # it sends all that counts while the other waits
    gevent.joinall(users, raise_error=True)
    assert waits.withdrawn is ClientReason.STAGE_DONE
    assert kinds(bench.kept) == ["before", "counts", "counts", "before"]
    assert stage.stop_reason is None, "a stage that has what counts is not cut"


def test_a_user_that_thinks_is_woken_by_the_end_of_the_stage(bench: Bench) -> None:
    bench.switch.set()
    plan = StagePlan("batched", "copy", ClosedLoop(1, think_time_s=3600), 5)
    stage = ClosedTraffic(bench.sender, plan, bench.kept.append)
    users = bench.start(stage)
    assert (stage.num_finished, stage.done.is_set()) == (1, False)
    stage.stop(ClientReason.INTERRUPTED)
    gevent.joinall(users, raise_error=True)
    assert stage.num_finished == 1


def test_lanes_are_asked_the_same_and_salted_by_the_run(bench: Bench) -> None:
    bench.switch.set()
    for lane in ("batched", "speculative"):
        stage = ClosedTraffic(bench.sender, StagePlan(lane, "copy", ClosedLoop(1), 3), bench.kept.append)
        gevent.joinall(bench.start(stage), raise_error=True)
    ours, theirs = (client.bodies for client in bench.clients)
    assert [body["model"] for body in (ours[0], theirs[0])] == ["m:batched", "m:speculative"]
    assert [body["messages"] for body in ours] == [body["messages"] for body in theirs]
    # The user's first request, the three that count, and those that follow until the last of them has ended.
    assert len({str(body["messages"]) for body in ours}) == 4
    assert all(a["cache_salt"] == b["cache_salt"] for a, b in pairwise([*ours, *theirs]))
    other = Sender(bench.sender.plan, "other", "other", bench.sender.clock)
    body = other.request(StagePlan("batched", "copy", ClosedLoop(1), 3), 0).body
    assert body["messages"] == ours[0]["messages"]
    assert body["cache_salt"] != ours[0]["cache_salt"]


class HandClock:
    """A clock that goes on by waiting alone, and stands in for the event that ends a schedule."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def is_set(self) -> bool:
        return False

    def wait(self, duration_s: float) -> None:
        gevent.sleep(0)
        self.now_s += duration_s


def test_a_request_is_made_before_it_is_due_and_after_the_one_before_it_went_out() -> None:
    clock, happened = HandClock(), []

    def make(number: int, _: Arrival) -> str:
        happened.append(f"made {number} at {clock.now_s:g}")
        return f"request {number}"

    def serve(made: str, due_at_s: float) -> None:
        happened.append(f"{made} due at {due_at_s:g}")

    arrivals = enumerate([Arrival(1.0), Arrival(3.0)])
    keep_schedule(arrivals, 0.0, lambda: clock.now_s, clock, make, serve)
    assert happened == [
        "made 0 at 0.002",
        "request 0 due at 1",
        "made 1 at 1.002",
        "request 1 due at 3",
    ]


def test_arrivals_at_one_instant_do_not_wait_for_each_others_making() -> None:
    happened: list[str] = []

    def make(number: int, _: Arrival) -> int:
        happened.append(f"made {number}")
        return number

    def serve(made: int, _: float) -> None:
        happened.append(f"sent {made}")

    keep_schedule(enumerate([Arrival(0.0)] * 3), 0.0, lambda: 5.0, HandClock(), make, serve)
    assert happened == ["made 0", "sent 0", "made 1", "sent 1", "made 2", "sent 2"]


def test_a_schedule_that_is_behind_hears_that_it_is_stopped() -> None:
    stopped, sent = Event(), []

    def serve(made: int, _: float) -> None:
        sent.append(made)
        stopped.set()

    keep_schedule(enumerate([Arrival(0.0)] * 9), 0.0, lambda: 5.0, stopped, lambda number, _: number, serve)
    assert sent == [0]


def test_a_user_is_free_once_its_next_prompt_is_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, make = HandClock(), Sender.request

    def request_in_a_second(*arguments: Any) -> MadeRequest:
        clock.wait(1.0)
        return make(*arguments)

    monkeypatch.setattr(Sender, "request", request_in_a_second)
    bench.sender = replace(bench.sender, clock=lambda: clock.now_s)
    bench.switch.set()
    plan = StagePlan("batched", "copy", ClosedLoop(1), 1)
    gevent.joinall(bench.start(ClosedTraffic(bench.sender, plan, bench.kept.append)), raise_error=True)
    assert [record.scheduled_at_s for record in bench.kept] == [1.0, 2.0]


def test_the_ids_of_odd_workloads_are_short_ascii_and_distinct() -> None:
    keys = [f"batched/file:{'x' * 200}{end}.jsonl/8 users" for end in "ab"] + ["b/プ.jsonl", "b/ロ.jsonl"]
    slugs = [slug(key) for key in keys]
    assert len(set(slugs)) == len(keys)
    assert all(slug.isascii() and len(slug) < 72 for slug in slugs)
    assert slug(StagePlan("batched", "copy", ClosedLoop(8), 8).key) == "batched-copy-8-users"
