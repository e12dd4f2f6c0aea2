"""What becomes of a recording when replicas refuse, die or lose events, and when it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serving.core.errors import NotRunningError
from serving.http_server import serve_app
from serving.tracing import recording
from serving.tracing.events import Phase, RequestSpan, StepEvent, TracedReplica
from serving.tracing.recording import Recording, RecordingError
from serving.tracing.sampling import is_sampled
from serving.tracing.span_log import SpanLog

pytestmark = pytest.mark.anyio


@dataclass
class PlayedReplica:
    """Answers as a replica does, or as a broken one."""

    name: str
    events: int = 1
    lost_events: int = 0
    refusal: str = ""
    fails_at_stop: bool = False
    cuts_off: bool = False
    starts: int = 0
    stops: int = 0
    asked: str = ""
    url: str = ""

    async def start(self, request: Request) -> Response:
        self.asked = request.url.query
        if self.refusal:
            return JSONResponse({"error": self.refusal}, status_code=409)
        self.starts += 1
        return JSONResponse({"recording": 7})

    async def stop(self, request: Request) -> Response:
        assert request.query_params["recording"] == "7"
        self.stops += 1
        if self.fails_at_stop:
            return JSONResponse({"error": "the disk is full"}, status_code=507)
        head = TracedReplica(self.name, "b", "batched", "vllm", self.events, self.lost_events)
        event = StepEvent(self.name, 1, 5, 6, "x", Phase.DECODE, 1, 0, 0, 1)
        rows: list[Any] = [event] * (self.events - self.cuts_off)
        return Response(msgspec.json.Encoder().encode_lines([head, *rows]))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/tandem/trace/start", self.start, methods=["POST"]),
                Route("/tandem/trace/stop", self.stop, methods=["POST"]),
            ]
        )


@contextlib.asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    server, task, address = await serve_app(app, "127.0.0.1")
    try:
        yield f"http://{address}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def lab(*replicas: PlayedReplica, spans: SpanLog | None = None) -> AsyncIterator[str]:
    """The URL of a gateway that names these replicas, and itself as the only gateway."""
    log = spans or SpanLog("g")

    async def describe(_: Request) -> Response:
        shown = [{"replica": one.name, "url": one.url} for one in replicas]
        return JSONResponse({"config": {"model": {"name": "sim"}}, "replicas": shown})

    async def targets(request: Request) -> Response:
        address = request.headers["host"]
        return JSONResponse(
            [
                {"targets": [address], "labels": {"role": "gateway"}},
                {"targets": ["127.0.0.1:1"], "labels": {"role": "scheduler"}},
            ]
        )

    async def requests(request: Request) -> Response:
        found, is_complete = log.since(int(request.query_params["since_ns"]))
        body = {"gateway_id": "g", "is_complete": is_complete, "spans": found}
        return Response(msgspec.json.encode(body))

    routes = [Route("/lab", describe), Route("/targets", targets), Route("/tandem/spans", requests)]
    async with contextlib.AsyncExitStack() as stack:
        for one in replicas:
            one.url = await stack.enter_async_context(serving(one.app()))
        yield await stack.enter_async_context(serving(Starlette(routes=routes)))


async def record(
    url: str,
    seconds: float,
    *,
    with_token_ids: bool = True,
    say: Callable[[str], None] = lambda _: None,
    share: float = 1.0,
) -> Recording:
    """In a thread: what answers runs on this one's event loop."""
    return await asyncio.to_thread(
        recording.record, url, seconds, with_token_ids=with_token_ids, say=say, share=share
    )


async def recorded(url: str, seconds: float = 0.01) -> Recording:
    said: list[str] = []
    found = await record(url, seconds, with_token_ids=True, say=said.append)
    assert said[0] == "recording, 0 s to go"
    assert said[-1] == "fetching what was recorded"
    return found


async def test_all_replicas_are_recorded_at_once_and_share_the_bound() -> None:
    one, two = PlayedReplica("b-1", events=3), PlayedReplica("b-2")
    async with lab(one, two) as url:
        found = await recorded(url)
    assert found.faults == []
    assert [(event.replica_id, event.step) for event in found.trace.steps] == [("b-1", 1)] * 3 + [("b-2", 1)]
    assert [replica.replica_id for replica in found.trace.header.replicas] == ["b-1", "b-2"]
    assert one.asked == two.asked == "seconds=0.01&token_ids=1&share=1.0&max_events=500000"
    assert found.trace.header.started_ns < found.trace.header.ended_ns


async def test_a_refusal_stops_those_that_had_begun() -> None:
    one, two = PlayedReplica("b-1"), PlayedReplica("b-2", refusal="recording 3 is not over")
    async with lab(one, two) as url:
        with pytest.raises(RecordingError, match="replica b-2: recording 3 is not over"):
            await recorded(url)
    assert (one.starts, one.stops, two.stops) == (1, 1, 0)


class Interruption(BaseException):
    """Stands for a KeyboardInterrupt, which would end the event loop."""


def interrupt(_: str) -> None:
    raise Interruption


async def test_being_interrupted_stops_all() -> None:
    one = PlayedReplica("b-1")
    async with lab(one) as url:
        with pytest.raises(Interruption):
            await record(url, 100, with_token_ids=False, say=interrupt)
    assert one.stops == 1


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (PlayedReplica("b-2", fails_at_stop=True), "replica b-2: its steps are missing: the disk is full"),
        (PlayedReplica("b-2", events=4, cuts_off=True), "steps are missing: 3 of 4 events came"),
        (PlayedReplica("b-2", lost_events=9), "replica b-2: 9 events did not fit"),
    ],
)
async def test_what_is_missing_is_said_and_the_rest_is_kept(broken: PlayedReplica, fault: str) -> None:
    async with lab(PlayedReplica("b-1"), broken) as url:
        found = await recorded(url)
    (said,) = found.faults
    assert fault in said
    assert found.trace.steps[0].replica_id == "b-1"


async def test_a_gateways_requests_of_before_and_its_forgetting() -> None:
    spans = SpanLog("g", capacity=1)
    for number in range(2):
        span = RequestSpan("g", f"r-{number}", "r", arrived_ns=1, ended_ns=2**62 + number)
        with spans.running(lambda span=span: span):  # type: ignore[misc]
            pass
    async with lab(PlayedReplica("b-1"), spans=spans) as url:
        found = await recorded(url)
    assert [span.request_id for span in found.trace.spans] == ["r-1"]
    assert not found.trace.header.spans_complete
    assert found.faults == [
        "a gateway had more requests than it remembers: spans from the beginning are missing"
    ]


async def test_a_share_is_of_the_same_requests_at_gateways_and_engines() -> None:
    spans, ids = SpanLog("g"), [f"r-{number:012x}" for number in range(40)]
    for one in ids:
        span = RequestSpan("g", one, "r", arrived_ns=1, ended_ns=2**62)
        with spans.running(lambda span=span: span):  # type: ignore[misc]
            pass
    replica = PlayedReplica("b-1")
    async with lab(replica, spans=spans) as url:
        found = await record(url, 0.01, with_token_ids=False, say=lambda _: None, share=0.3)
    kept = {span.request_id for span in found.trace.spans}
    assert kept == {one for one in ids if is_sampled(f"chatcmpl-{one}-0a1b2c3d", 0.3)}
    assert 0 < len(kept) < 40
    assert "share=0.3" in replica.asked
    assert found.trace.header.share == 0.3


async def test_no_lab_is_an_error_with_its_address() -> None:
    with pytest.raises(NotRunningError, match=r"GET http://127\.0\.0\.1:9/lab: "):
        await record("http://127.0.0.1:9", 1, with_token_ids=False, say=print)
