"""A request's id, its instants, its line in the log, and the spans that a collector gets of it."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from serving.gateway.metrics_page import build_own_app
from serving.tracing.events import RequestSpan
from serving.tracing.otlp import Tracing, is_wanted, with_engine_span
from tests.unit.gateway.fake_engine import (
    DONE,
    USAGE,
    Exchange,
    dies_at_once,
    in_turn,
    plays,
    stays_silent,
    text,
)
from tests.unit.gateway.gateway_lab import Caller, GatewayLab, gateway_lab
from tests.unit.scheduler.control_plane import until
from tests.unit.tracing.collector import attributes, collector

pytestmark = pytest.mark.anyio
BODY = {"model": "smollm2-135m:batched", "messages": [], "stream": True}
SECRET = "the secret words"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def streamed(lab: GatewayLab, **headers: str) -> tuple[Caller, Exchange]:
    """One request with one chunk of text, and the engine's side of it."""
    lab.engine.script = plays(text(SECRET), USAGE, DONE)
    caller = await lab.post(BODY, headers=headers)
    assert caller.status == 200
    return caller, lab.engine.requests[-1]


async def spans_page(lab: GatewayLab, query: str = "") -> Caller:
    caller = Caller(f"/tandem/spans{query}", b"", "GET")
    await caller.call(build_own_app(lab.metrics.registry, lab.spans))
    return caller


async def spans_of(lab: GatewayLab) -> list[RequestSpan]:
    answer = await spans_page(lab)
    return msgspec.convert(answer.json["spans"], list[RequestSpan], strict=True)


async def test_the_clients_id_reaches_the_engine_and_the_span() -> None:
    async with gateway_lab() as lab:
        _, first = await streamed(lab, **{"x-request-id": "mine"})
        _, second = await streamed(lab, **{"x-request-id": "mine"})
        spans = await spans_of(lab)
    sent = [exchange.headers["x-request-id"] for exchange in (first, second)]
    assert sent[0] != sent[1]
    assert all(name.startswith("mine-") for name in sent)
    assert [(span.client_request_id, span.request_id) for span in spans] == [("mine", name) for name in sent]


async def test_a_spans_instants_follow_one_another() -> None:
    async with gateway_lab() as lab:
        await streamed(lab)
        (span,) = await spans_of(lab)
    (attempt,) = span.attempts
    instants = [
        span.arrived_ns, attempt.submitted_ns, attempt.granted_ns, attempt.first_byte_ns, span.first_token_ns,
        attempt.ended_ns, span.ended_ns,
    ]  # fmt: skip
    known = [instant for instant in instants if instant is not None]
    assert len(known) == len(instants)
    assert known == sorted(known)
    assert (attempt.lane, attempt.replica_id, span.outcome) == ("batched", "b", "completed")
    assert (span.prompt_tokens, span.output_tokens) == (3, 5)


async def test_a_request_that_runs_is_seen_without_an_end() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = stays_silent
        async with lab.calling(BODY) as caller:
            await until(lambda: lab.engine.num_open == 1)
            (span,) = await spans_of(lab)
            assert (span.outcome, span.ended_ns, span.attempts[0].ended_ns) == (None, None, None)
            caller.gone.set()
        (span,) = await spans_of(lab)
        assert (span.outcome, span.reason, span.attempts[0].ended_ns is None) == (
            "cancelled",
            "client_closed",
            False,
        )


async def test_a_rerouted_request_has_two_attempts() -> None:
    async with gateway_lab() as lab:
        lab.engine.script = in_turn(dies_at_once, plays(text(SECRET), USAGE, DONE))
        await lab.post(BODY, headers={"x-request-id": "mine"})
        (span,) = await spans_of(lab)
    first, second = span.attempts
    assert second.request_id == f"{first.request_id}-again"
    assert first.first_byte_ns is None
    assert first.ended_ns is not None
    assert first.ended_ns <= second.submitted_ns
    assert span.outcome == "completed"


async def test_the_page_refuses_what_is_no_instant() -> None:
    async with gateway_lab() as lab:
        answer = await spans_page(lab, "?since_ns=-1")
        assert (answer.status, "since_ns='-1'" in answer.json["error"]) == (400, True)
        assert (await spans_page(lab, "?since_ns=9" + "9" * 18)).json["spans"] == []
        assert (await lab.get("/tandem/spans")).status == 404, "not on the lab's own port"


@pytest.mark.parametrize("logs_requests", [True, False])
async def test_the_log_has_a_line_per_request_if_it_is_wanted(
    caplog: pytest.LogCaptureFixture, logs_requests: bool
) -> None:
    caplog.set_level(logging.INFO, "serving")
    async with gateway_lab(logs_requests=logs_requests) as lab:
        await streamed(lab, **{"x-request-id": "mine"})
    lines = [record.getMessage() for record in caplog.records if record.name == "serving.gateway.account"]
    assert len(lines) == logs_requests
    assert SECRET not in caplog.text
    for line in lines:
        assert line.startswith("request mine-")
        assert " outcome=completed replica=b attempts=1 queue_s=" in line
        assert line.endswith(" prompt_tokens=3 output_tokens=5")


async def test_a_failure_is_logged_under_the_engines_id(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway_lab() as lab:
        lab.engine.script = plays(text(SECRET))  # and no [DONE]
        await lab.post(BODY, headers={"x-request-id": "mine"})
        assert f"request {lab.engine.requests[0].headers['x-request-id']} on b: " in caplog.text
        assert SECRET not in caplog.text


async def test_the_collector_gets_the_whole_request_below_the_clients_trace() -> None:
    with collector() as found:
        tracing = Tracing(found.url, "gateway", {"tandem.gateway": "g"})
        async with gateway_lab(tracing=tracing) as lab:
            _, exchange = await streamed(lab, traceparent=PARENT)
        tracing.close()
    assert set(found.paths) == {"/v1/traces"}
    assert {service for service, _ in found.spans} == {"tandem-gateway"}
    ((gateway,), (queue,), (dispatch,)) = (
        found.by_name(name) for name in ("gateway", "queue wait", "dispatch")
    )
    trace_id, parent_id = bytes.fromhex(PARENT[3:35]), bytes.fromhex(PARENT[36:52])
    assert {span.trace_id for span in (gateway, queue, dispatch)} == {trace_id}
    assert gateway.parent_span_id == parent_id
    assert queue.parent_span_id == dispatch.parent_span_id == gateway.span_id
    assert exchange.headers["traceparent"] == f"00-{trace_id.hex()}-{gateway.span_id.hex()}-01"
    assert gateway.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == dispatch.start_time_unix_nano
    assert dispatch.end_time_unix_nano <= gateway.end_time_unix_nano
    said = attributes(gateway)
    assert said["tandem.request_id"] == exchange.headers["x-request-id"]
    assert (said["tandem.outcome"], said["tandem.output_tokens"]) == ("completed", 5)


async def test_a_replicas_span_is_below_the_gateways_and_tells_of_a_fault() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    with collector() as found:
        tracing = Tracing(found.url, "engine", {})
        traced = with_engine_span(app, tracing)
        await Caller("/v1/completions", b"", headers={"traceparent": PARENT, "x-request-id": "r"}).call(
            traced
        )
        await Caller("/metrics", b"", "GET").call(traced)
        tracing.close()
    ((service, span),) = found.spans
    assert (service, span.name, span.parent_span_id.hex()) == ("tandem-engine", "engine", PARENT[36:52])
    assert attributes(span) == {"tandem.request_id": "r", "http.response.status_code": 500}
    assert span.status.message == "status 500"


async def test_a_collector_that_is_away_costs_a_request_nothing() -> None:
    tracing = Tracing("http://127.0.0.1:9", "gateway", {})
    async with gateway_lab(tracing=tracing) as lab:
        caller, _ = await streamed(lab, traceparent="nonsense")
        assert caller.got.endswith(DONE)


def test_the_environment_counts_where_the_config_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert not is_wanted(None)
    assert is_wanted("http://there")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://there")
    assert is_wanted(None)


def test_nothing_of_opentelemetry_is_loaded_unless_it_is_wanted() -> None:
    look = (
        "import sys, serving.gateway.app, serving.gateway.metrics_page, serving.engines.replica\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert subprocess.check_output([sys.executable, "-c", look], text=True).strip() == "[]"
