from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from prometheus_client import generate_latest
from pydantic import TypeAdapter

from loadtest.client.lab import (
    GatewayScrape,
    LabError,
    LaneCounts,
    PrefixCounts,
    Scrape,
    describe_lab,
    parse_gateway,
    parse_replica,
    scrape,
    scrape_at_rest,
)
from serving.core.errors import Reason
from serving.core.latency import RequestTimeline
from serving.core.request import Outcome
from serving.core.speculation import SpeculationCounts
from serving.gateway.metrics import GatewayMetrics
from tests.unit.loadtest.fake_server import Conversation, fake_lab, scripted_server
from tests.unit.loadtest.runs import scrape as made_scrape

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 60.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
# TYPE tandem_replica_memory_bytes gauge
tandem_replica_memory_bytes{lane="speculative",replica="s-1"} 1.5e9
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
"""


def test_counters_are_summed_over_engines() -> None:
    found = parse_replica(METRICS, "speculative", "s-1")
    assert found.speculation == SpeculationCounts(15, 60, 30)
    assert found.memory_bytes == 1.5e9


def test_what_a_replica_does_not_export_is_none() -> None:
    found = parse_replica("# nothing\n", "batched", "b-1")
    assert (found.speculation, found.memory_bytes) == (None, None)


def test_scrape_reads_replicas_and_gateways() -> None:
    with fake_lab() as (url, _):
        found = scrape(url)
    assert found.errors == ()
    assert [replica.lane for replica in found.replicas] == ["sequential", "batched", "speculative"]
    assert found.memory_bytes("batched") == 1100 << 20
    assert found.speculation("batched") == {}
    assert found.speculation("speculative") == {"speculative-1": SpeculationCounts(0, 0, 0)}
    assert [gateway.lanes for gateway in found.gateways] == [()]


def test_a_gateways_page_is_counted_by_lane_and_outcome() -> None:
    metrics = GatewayMetrics(["batched"])
    metrics.refused(Reason.UNKNOWN_MODEL)
    for reason in (Reason.UPSTREAM_BROKE, Reason.UPSTREAM_TIMEOUT):
        metrics.ended("batched", Outcome.FAILED, reason)
    for ttft_s in (0.04, 0.045, 0.255):
        metrics.ended("batched", Outcome.COMPLETED, None)
        metrics.completed("batched", RequestTimeline(1.0, 1.0, (1.0 + ttft_s,), 2.0, 7), 100, is_stream=True)
    found = parse_gateway(generate_latest(metrics.registry).decode(), "g-1")
    batched = found.lane("batched")
    assert batched.ended == {"failed": 2, "completed": 3}
    assert (batched.num_ended, batched.output_tokens, batched.ttft_count) == (5, 21, 3)
    assert batched.ttft_sum_s == pytest.approx(0.34)
    at_most = dict(batched.ttft_buckets)
    assert (at_most[0.03], at_most[0.05], at_most[0.2], at_most[0.3], at_most[600.0]) == (0, 2, 2, 3, 3)
    assert found.lane("").ended == {"rejected": 1}
    assert found.lane("other").num_ended == 0
    both = Scrape(gateways=(found, GatewayScrape("g-2", (LaneCounts("batched", {"completed": 4}),))))
    assert both.num_ended("batched") == 5 + 1 + 4
    assert both.num_ended("any") == sum(lane.num_ended for each in both.gateways for lane in each.lanes)


def test_a_page_that_is_no_gateways_is_refused() -> None:
    with pytest.raises(ValueError, match="tandem_requests_total: not a gateway's page"):
        parse_gateway("# nothing\n", "g-1")


def test_prefix_cache_counters_are_read() -> None:
    text = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 200.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} 64.0
"""
    assert parse_replica(text, "batched", "b-1").prefix == PrefixCounts(200, 64)
    assert parse_replica("# nothing\n", "batched", "b-1").prefix is None


def test_a_scrape_survives_json() -> None:
    adapter = TypeAdapter(Scrape)
    counts = LaneCounts("batched", {"completed": 2}, 10, 2, 0.5, ((0.1, 1), (0.2, 2)))
    made = Scrape((), (), (GatewayScrape("g-1", (counts,)),))
    assert adapter.validate_json(adapter.dump_json(made)) == made


class Watch:
    """Time that passes only by sleeping; what happens meanwhile is up to the test."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.now_s = 0.0
        self._meanwhile = meanwhile

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self._meanwhile()


def test_the_scrape_after_a_stage_waits_for_the_gateways_count() -> None:
    with fake_lab() as (url, lab):
        before = scrape(url)
        watch = Watch(lambda: lab.gateway.ended("batched", Outcome.COMPLETED, None))
        after = scrape_at_rest(url, "batched", before, 3, clock=watch.clock, sleep=watch.sleep)
    assert after.num_ended("batched") == 3
    assert watch.now_s == pytest.approx(0.15)


def test_it_does_not_wait_for_ever() -> None:
    with fake_lab() as (url, _):
        before = scrape(url)
        watch = Watch(lambda: None)
        after = scrape_at_rest(url, "batched", before, 1, clock=watch.clock, sleep=watch.sleep)
    assert after.num_ended("batched") == 0
    assert watch.now_s == pytest.approx(2.0, abs=0.06)


def test_the_model_is_told_as_the_replicas_resolved_it() -> None:
    with fake_lab() as (url, _):
        model = describe_lab(url)["model"]
    assert (model["name"], model["dtype"], model["device"]) == ("smollm2-135m", "bfloat16", "cpu")


def test_a_lab_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        LabError, match=rf"http://127.0.0.1:{port}/lab: cannot be reached: Connection refused"
    ):
        describe_lab(f"http://127.0.0.1:{port}")
    found = scrape(f"http://127.0.0.1:{port}")
    assert found.replicas == ()
    assert "cannot be reached" in found.errors[0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "this is not the description of a lab"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", "the answer is not JSON"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "answered 503 Busy"),
    ],
)
def test_something_else_at_the_address(answer: bytes, message: str) -> None:
    def script(talk: Conversation) -> None:
        talk.receive()
        talk.send(answer)

    with scripted_server(script) as (url, _), pytest.raises(LabError, match=message):
        describe_lab(url)


def test_memory_of_a_lane_is_unknown_when_one_replica_is_silent() -> None:
    known, silent = made_scrape("batched", memory_bytes=5.0), made_scrape("batched", memory_bytes=None)
    assert Scrape(known.replicas + known.replicas).memory_bytes("batched") == 10
    assert Scrape(known.replicas + silent.replicas).memory_bytes("batched") is None
    assert known.memory_bytes("other") is None
