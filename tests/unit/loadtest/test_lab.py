from __future__ import annotations

import socket

import pytest

from loadtest.lab import LabError, Scrape, describe_lab, parse_replica, scrape
from serving.core.speculation import SpeculationCounts

from .fake_server import Conversation, fake_lab, scripted_server
from .runs import scrape as made_scrape

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


def test_scrape_reads_replicas_and_no_gateway() -> None:
    with fake_lab() as (url, _):
        found = scrape(url)
    assert found.errors == ()
    assert [replica.lane for replica in found.replicas] == ["sequential", "batched", "speculative"]
    assert found.memory_bytes("batched") == 1100 << 20
    assert found.speculation("batched") == {}
    assert found.speculation("speculative") == {"speculative-1": SpeculationCounts(0, 0, 0)}


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
