from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from loadtest.analysis.server_view import agreements, largest_distance, view
from loadtest.analysis.summary import Agreement
from loadtest.client.lab import GatewayScrape, PrefixCounts, ReplicaScrape, Scrape, parse_gateway
from loadtest.client.record import RequestRecord
from serving.core.errors import Reason
from serving.core.latency import RequestTimeline
from serving.core.request import Outcome
from serving.gateway.metrics import GatewayMetrics
from tests.unit.loadtest.runs import record


class Gateway:
    """A gateway's real metrics, told of requests by hand."""

    def __init__(self, name: str = "g-1") -> None:
        self.name = name
        self.metrics = GatewayMetrics()

    def complete(self, ttft_s: float, tokens: int = 11, lane: str = "batched") -> None:
        timeline = RequestTimeline(0.0, 0.0, (ttft_s, ttft_s + 0.2), ttft_s + 0.2, tokens)
        self.metrics.ended(lane, Outcome.COMPLETED, None)
        self.metrics.completed(lane, timeline, 100, is_stream=True)

    def scrape(self) -> GatewayScrape:
        return parse_gateway(generate_latest(self.metrics.registry).decode(), self.name)


def compared(
    gateways: Sequence[Gateway], before: Sequence[GatewayScrape], records: Sequence[RequestRecord]
) -> dict[str, Agreement]:
    after = Scrape(gateways=tuple(gateway.scrape() for gateway in gateways))
    seen = view(Scrape(gateways=tuple(before)), after, "batched")
    assert seen.notes == ()
    return {each.quantity: each for each in agreements(seen, records)}


def test_two_gateways_are_summed_and_earlier_requests_are_not_counted() -> None:
    gateways = [Gateway("g-1"), Gateway("g-2")]
    gateways[0].complete(5.0)  # before the stage
    before = [gateway.scrape() for gateway in gateways]
    for gateway in (*gateways, gateways[1]):
        gateway.complete(0.098)
    gateways[0].complete(9.0, lane="sequential")  # somebody else, on another lane
    found = compared(gateways, before, [record("batched", number=n) for n in range(3)])
    assert [(each.client, each.server) for each in found.values()][:3] == [(3, 3), (3, 3), (33, 33)]
    assert found["mean TTFT from sent (s)"].server == pytest.approx(0.098)
    assert found["mean TTFT from sent (s)"].client == pytest.approx(0.1)
    assert all(each.agrees for each in found.values())
    assert len(found) == 5


def test_an_empty_answer_is_no_reason_not_to_compare_the_others() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    gateway.complete(0.098)
    gateway.metrics.ended("batched", Outcome.COMPLETED, None)
    gateway.metrics.completed("batched", RequestTimeline(0.0, 0.0, (), 0.2, 1), 100, is_stream=True)
    records = [record("batched"), record("batched", number=1, chunks=0, tokens=1)]
    found = compared([gateway], before, records)
    assert found["mean TTFT from sent (s)"].client == pytest.approx(0.1)
    assert all(each.agrees for each in found.values())
    assert len(found) == 5


def test_a_token_too_few_is_found() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    gateway.complete(0.1, tokens=12)
    found = compared([gateway], before, [record("batched")])
    assert not found["output tokens"].agrees
    assert (found["output tokens"].client, found["output tokens"].server) == (11, 12)


def test_a_request_of_someone_else_on_the_lane_is_found() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    for _ in range(2):
        gateway.complete(0.1)
    found = compared([gateway], before, [record("batched")])
    assert not found["requests"].agrees
    assert "mean TTFT from sent (s)" not in found  # of other requests


def test_failures_and_refusals_are_requests_too() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    gateway.metrics.ended("batched", Outcome.FAILED, Reason.UPSTREAM_BROKE)
    gateway.metrics.refused(Reason.QUEUE_FULL)  # before it had a lane
    records = [record("batched", reason="upstream_broke"), record("batched", number=1, reason="queue_full")]
    found = compared([gateway], before, records)
    assert (found["requests"].server, found["requests"].agrees) == (2, True)
    assert (found["completed requests"].server, found["completed requests"].agrees) == (0, True)


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.COMPLETED])
def test_what_the_client_broke_off_is_no_alarm_however_it_ended(outcome: Outcome) -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    gateway.complete(0.1)
    if outcome is Outcome.COMPLETED:
        gateway.complete(0.1)
    else:
        gateway.metrics.ended("batched", Outcome.CANCELLED, Reason.CLIENT_CLOSED)
    cut = replace(record("batched", number=1, reason="stage_time_up"), first_byte_at_s=0.05)
    found = compared([gateway], before, [record("batched"), cut])
    assert all(each.agrees for each in found.values())
    # And it excuses no more than itself.
    gateway.complete(0.1)
    assert not compared([gateway], before, [record("batched"), cut])["requests"].agrees


def test_a_ttft_that_the_client_saw_late_is_found() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    for _ in range(4):
        gateway.complete(0.045)
    found = compared([gateway], before, [record("batched", number=n) for n in range(4)])
    assert not found["mean TTFT from sent (s)"].agrees  # 55 ms apart, 50 allowed


def test_ttft_is_compared_from_the_instant_of_sending() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    gateway.complete(0.1)
    waited = replace(record("batched", scheduled_at_s=1.0, ttft_s=2.1), sent_at_s=3.0)
    assert all(each.agrees for each in compared([gateway], before, [waited]).values())


def test_equal_means_of_unlike_distributions_are_found() -> None:
    gateway = Gateway()
    before = [gateway.scrape()]
    for ttft_s in (0.05, 0.45, 0.05, 0.45):
        gateway.complete(ttft_s)
    found = compared([gateway], before, [record("batched", number=n, ttft_s=0.25) for n in range(4)])
    assert found["mean TTFT from sent (s)"].agrees
    assert found["distance of TTFT distributions"].client == pytest.approx(0.5)
    assert not found["distance of TTFT distributions"].agrees


def test_values_beside_a_bucket_edge_are_no_distance() -> None:
    gateway = Gateway()
    for _ in range(10):
        gateway.complete(0.199)
    assert largest_distance([0.204] * 10, gateway.scrape().lane("batched")) == 0
    assert largest_distance([0.35] * 10, gateway.scrape().lane("batched")) == 1


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (["g-1"], ["g-1", "g-2"], "gateways changed during the stage"),
        (["g-1"], [], "gateways changed during the stage"),
    ],
)
def test_gateways_that_come_or_go_leave_nothing_to_compare(
    before: list[str], after: list[str], note: str
) -> None:
    seen = view(
        Scrape(gateways=tuple(GatewayScrape(name, ()) for name in before)),
        Scrape(gateways=tuple(GatewayScrape(name, ()) for name in after)),
        "batched",
    )
    assert agreements(seen, [record("batched")]) == ()
    assert any(note in each for each in seen.notes)


def test_a_gateway_that_began_anew_leaves_nothing_to_compare() -> None:
    old = Gateway()
    old.complete(0.1)
    seen = view(Scrape(gateways=(old.scrape(),)), Scrape(gateways=(Gateway().scrape(),)), "batched")
    assert agreements(seen, [record("batched")]) == ()
    assert any("counters of gateway g-1 went back" in each for each in seen.notes)


def test_prefix_hits_are_those_of_the_stage() -> None:
    def scrape(queries: int, hits: int) -> Scrape:
        return Scrape((ReplicaScrape("batched", "b-1", None, None, PrefixCounts(queries, hits)),))

    assert view(scrape(100, 90), scrape(300, 140), "batched").prefix == PrefixCounts(200, 50)
    seen = view(scrape(100, 90), scrape(10, 0), "batched")
    assert seen.prefix is None
    assert any("prefix cache hits unknown" in note for note in seen.notes)
    without = view(Scrape(), Scrape(), "batched")
    assert (without.prefix, without.notes) == (None, ())


def test_a_stage_whose_requests_the_scheduler_spread_is_not_compared_with_any_lane() -> None:
    seen = view(Scrape(), Scrape(), "any")
    assert (seen.lane, seen.no_lane) == (None, None)
    assert seen.notes == ("not compared with the server: lane any is all of them",)
