"""Records a running lab: steps on every replica, requests at every gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from serving import __version__
from serving.core.client_key import KEY_HINT, key_headers
from serving.core.errors import NotRunningError, TandemError
from serving.tracing.events import GatewaySpans, StepEvent, TracedReplica, TraceHeader
from serving.tracing.sampling import is_sampled
from serving.tracing.trace_file import Trace

MAX_EVENTS = 1_000_000  # of all replicas together
ANSWER_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 120.0
MAX_LINE_BYTES = 1024 * 1024


class RecordingError(TandemError):
    """Nothing could be recorded."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded, and what of it is missing, in sentences."""

    trace: Trace
    faults: list[str]


@dataclass(frozen=True, slots=True)
class _Started:
    replica_id: str
    url: str
    number: int


async def record(
    gateway_url: str,
    seconds: float,
    *,
    with_token_ids: bool,
    say: Callable[[str], None],
    share: float = 1.0,
) -> Recording:
    """Record for `seconds`; every process must run on this machine, for they are compared by its clock.

    Args:
        share: of the requests, above 0 and at most 1; gateways and engines choose the same ones.

    Raises:
        NotRunningError: the lab does not answer, or refuses the API key.
        RecordingError: a replica refuses; nothing goes on recording then.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_LINE_BYTES) as session:
        lab = await _ask_gateway(session, f"{gateway_url}/lab")
        targets = await _ask_gateway(session, f"{gateway_url}/targets")
        asked = f"seconds={seconds:g}&token_ids={int(with_token_ids)}&share={share!r}"
        asked += f"&max_events={max(1, MAX_EVENTS // max(1, len(lab['replicas'])))}"
        started: list[_Started] = []
        try:
            for replica in lab["replicas"]:
                number = await _start(session, replica, asked)
                started.append(_Started(replica["replica"], replica["url"], number))
            started_ns = time.monotonic_ns()
            await _wait(seconds, say)
            ended_ns = time.monotonic_ns()
        except BaseException:
            await asyncio.gather(*(_discard(session, one) for one in started))
            raise
        say("fetching what was recorded")
        faults: list[str] = []
        replicas, steps = await _fetch_steps(session, started, faults)
        gateways = await _fetch_spans(session, targets, started_ns, faults)
    header = TraceHeader(
        tandem_version=__version__,
        model=lab["config"]["model"]["name"],
        started_ns=started_ns,
        ended_ns=ended_ns,
        realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
        replicas=tuple(replicas),
        gateways=tuple(gateway.gateway_id for gateway in gateways),
        spans_complete=all(gateway.is_complete for gateway in gateways),
        share=share,
    )
    faults += [
        f"replica {one.replica_id}: {one.lost_events} events did not fit, from the end" for one in replicas
        if one.lost_events
    ]  # fmt: skip
    if not header.spans_complete:
        faults.append("a gateway had more requests than it remembers: spans from the beginning are missing")
    spans = [
        span
        for gateway in gateways
        for span in gateway.spans
        if span.arrived_ns <= ended_ns and (share == 1 or is_sampled(span.request_id, share))
    ]
    spans.sort(key=lambda span: span.arrived_ns)
    return Recording(Trace(header, spans, steps), faults)


async def _wait(seconds: float, say: Callable[[str], None]) -> None:
    give_up_at_s = time.monotonic() + seconds
    while (left_s := give_up_at_s - time.monotonic()) > 0:
        say(f"recording, {left_s:.0f} s to go")
        await asyncio.sleep(min(1.0, left_s))


async def _ask_gateway(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url, headers=key_headers(), raise_for_status=True) as response:
            return await response.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        is_locked = isinstance(error, aiohttp.ClientResponseError) and error.status == HTTPStatus.UNAUTHORIZED
        raise NotRunningError(f"GET {url}: {KEY_HINT if is_locked else _said(error)}") from None


async def _start(session: aiohttp.ClientSession, replica: dict[str, Any], asked: str) -> int:
    try:
        async with session.post(f"{replica['url']}/tandem/trace/start?{asked}") as response:
            answer = await response.json()
            if response.status != 200:
                raise RecordingError(f"replica {replica['replica']}: {answer['error']}")
            return int(answer["recording"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RecordingError(f"replica {replica['replica']}: {_said(error)}") from None


async def _discard(session: aiohttp.ClientSession, one: _Started) -> None:
    # A replica that cannot be told ends its recording by itself.
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(_stop_url(one)) as response:
            await response.read()


async def _fetch_steps(
    session: aiohttp.ClientSession, started: list[_Started], faults: list[str]
) -> tuple[list[TracedReplica], list[StepEvent]]:
    replicas: list[TracedReplica] = []
    steps: list[StepEvent] = []
    for one in started:
        try:
            replica, events = await _fetch(session, one)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, RecordingError) as error:
            faults.append(f"replica {one.replica_id}: its steps are missing: {_said(error)}")
            continue
        replicas.append(replica)
        steps += events
    return replicas, steps


async def _fetch(session: aiohttp.ClientSession, one: _Started) -> tuple[TracedReplica, list[StepEvent]]:
    limit = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
    async with session.post(_stop_url(one), timeout=limit) as response:
        if response.status != 200:
            raise RecordingError((await response.json())["error"])
        lines = response.content
        replica = msgspec.json.decode(await lines.readline(), type=TracedReplica)
        decode = msgspec.json.Decoder(StepEvent).decode
        events = [decode(line) async for line in lines]
    if len(events) != replica.events:
        raise RecordingError(f"{len(events)} of {replica.events} events came")
    return replica, events


async def _fetch_spans(
    session: aiohttp.ClientSession, targets: list[dict[str, Any]], since_ns: int, faults: list[str]
) -> list[GatewaySpans]:
    found = []
    for target in targets:
        if target["labels"].get("role") != "gateway":
            continue
        for address in target["targets"]:
            url = f"http://{address}/tandem/spans?since_ns={since_ns}"
            try:
                async with session.get(url, raise_for_status=True) as response:
                    found.append(msgspec.json.decode(await response.read(), type=GatewaySpans))
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
                faults.append(f"gateway at {address}: its requests are missing: {_said(error)}")
    return found


def _stop_url(one: _Started) -> str:
    return f"{one.url}/tandem/trace/stop?recording={one.number}"


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
