"""Records a running lab: steps on replicas, requests at gateways. `tandem trace`, a bench and the lesson share it.

It waits for one answer at a time, without an event loop, so that it works under gevent too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from serving import __version__
from serving.core.client_key import KEY_HINT, key_headers
from serving.core.errors import NotRunningError, TandemError
from serving.core.http_get import GetError, get, post, post_lines
from serving.tracing.events import GatewaySpans, StepEvent, TracedReplica, TraceHeader
from serving.tracing.sampling import is_sampled
from serving.tracing.trace_file import Trace

MAX_EVENTS = 1_000_000  # of all replicas together
ANSWER_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 120.0


class RecordingError(TandemError):
    """A replica does not record, or its steps did not come; the text says whose and why.

    Attributes:
        url: of the replica.
        why: the text without whose.
    """

    def __init__(self, text: str, url: str, why: str) -> None:
        super().__init__(text)
        self.url = url
        self.why = why


@dataclass(frozen=True, slots=True)
class StepRecording:
    """One that goes on, on the replica at `url`."""

    url: str
    number: int

    def fetch(self) -> tuple[TracedReplica, list[StepEvent]]:
        """End it and get its events, once.

        Raises:
            RecordingError: the replica does not answer, or not with all of them.
        """
        decode = msgspec.json.Decoder(StepEvent).decode
        with self._stopped(FETCH_TIMEOUT_S) as lines:
            replica = msgspec.json.decode(next(lines, b""), type=TracedReplica)
            events = [decode(line) for line in lines]
        if len(events) != replica.events:
            came = f"{len(events)} of {replica.events}"
            raise RecordingError(
                f"replica {replica.replica_id}: {came} step events came", self.url, f"{came} events came"
            )
        return replica, events

    def discard(self) -> None:
        """End it; its events are lost.

        Raises:
            RecordingError: the replica does not answer.
        """
        with self._stopped(ANSWER_TIMEOUT_S) as lines:
            for _ in lines:
                pass

    @contextmanager
    def _stopped(self, timeout_s: float) -> Iterator[Iterator[bytes]]:
        """The lines that the replica gives for it; faults of the block are those of what it gave."""
        page = f"{self.url}/tandem/trace/stop?recording={self.number}"
        try:
            yield post_lines(page, timeout_s=timeout_s)
        except GetError as error:
            raise _refused(error, self.url) from None
        except msgspec.DecodeError as error:
            raise RecordingError(f"{page}: {error}", self.url, str(error)) from None


@contextmanager
def recording(
    urls: Iterable[str],
    *,
    limit_s: float,
    max_events: int,
    with_token_ids: bool = True,
    share: float = 1.0,
) -> Iterator[list[StepRecording]]:
    """Recordings on the replicas at these addresses; the block fetches them. Those of a block that fails are ended.

    Args:
        limit_s: a recording ends by itself then, should this process die.
        max_events: of each replica.
        share: of the requests, above 0 and at most 1.

    Raises:
        RecordingError: a replica refuses; nothing goes on recording then.
    """
    asked = f"seconds={limit_s:g}&token_ids={int(with_token_ids)}&share={share!r}&max_events={max_events}"
    started: list[StepRecording] = []
    try:
        for url in urls:
            started.append(_start(url, asked))
        yield started
    except BaseException:
        for step_recording in started:
            # One that cannot be told ends by itself; one that was fetched is over.
            with contextlib.suppress(RecordingError):
                step_recording.discard()
        raise


def _start(url: str, asked: str) -> StepRecording:
    try:
        answer = post(f"{url}/tandem/trace/start?{asked}", timeout_s=ANSWER_TIMEOUT_S)
    except GetError as error:
        raise _refused(error, url) from None
    return StepRecording(url, int(json.loads(answer)["recording"]))


def _refused(error: GetError, url: str) -> RecordingError:
    """The replica's own words, where it gave any."""
    try:
        why = str(json.loads(error.said)["error"])
    except (ValueError, KeyError, TypeError):
        why = error.why
    return RecordingError(str(error), url, why)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A trace, and what of it did not come.

    Attributes:
        missing_steps: an error for each replica without its steps.
        missing_spans: a sentence for each gateway without its requests.
    """

    trace: Trace
    missing_steps: list[RecordingError]
    missing_spans: list[str]


def fetch_trace(
    recordings: Iterable[StepRecording],
    gateways: Iterable[str],
    *,
    model: str,
    started_ns: int,
    ended_ns: int,
    share: float = 1.0,
) -> Fetched:
    """End recordings, and get their steps and the requests of these gateways from `started_ns` to `ended_ns`.

    Args:
        gateways: their own addresses, host and port.
        share: of the requests, as the recordings have it.
    """
    replicas, steps, missing_steps = _fetch_steps(recordings)
    heard, missing_spans = _fetch_spans(gateways, started_ns)
    header = TraceHeader(
        tandem_version=__version__,
        model=model,
        started_ns=started_ns,
        ended_ns=ended_ns,
        realtime_offset_ns=time.time_ns() - time.monotonic_ns(),
        replicas=tuple(replicas),
        gateways=tuple(gateway.gateway_id for gateway in heard),
        spans_complete=all(gateway.is_complete for gateway in heard),
        share=share,
    )
    spans = [
        span
        for gateway in heard
        for span in gateway.spans
        if span.arrived_ns <= ended_ns and (share == 1 or is_sampled(span.request_id, share))
    ]
    spans.sort(key=lambda span: span.arrived_ns)
    return Fetched(Trace(header, spans, steps), missing_steps, missing_spans)


def _fetch_steps(
    recordings: Iterable[StepRecording],
) -> tuple[list[TracedReplica], list[StepEvent], list[RecordingError]]:
    replicas: list[TracedReplica] = []
    steps: list[StepEvent] = []
    missing: list[RecordingError] = []
    for step_recording in recordings:
        try:
            replica, events = step_recording.fetch()
        except RecordingError as error:
            missing.append(error)
            continue
        replicas.append(replica)
        steps += events
    return replicas, steps, missing


def _fetch_spans(gateways: Iterable[str], since_ns: int) -> tuple[list[GatewaySpans], list[str]]:
    spans: list[GatewaySpans] = []
    missing: list[str] = []
    for address in gateways:
        try:
            page = get(f"http://{address}/tandem/spans?since_ns={since_ns}")
            spans.append(msgspec.json.decode(page, type=GatewaySpans))
        except (GetError, msgspec.DecodeError) as error:
            missing.append(f"gateway at {address}: its requests are missing: {error}")
    return spans, missing


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded, and what of it is missing, in sentences."""

    trace: Trace
    faults: list[str]


def record(
    gateway_url: str,
    seconds: float,
    *,
    with_token_ids: bool,
    say: Callable[[str], None],
    share: float = 1.0,
) -> Recording:
    """Record a lab for `seconds`; every process must run on this machine, for they are compared by its clock.

    Args:
        share: of the requests, above 0 and at most 1; gateways and engines choose the same ones.

    Raises:
        NotRunningError: the lab does not answer, or refuses the API key.
        RecordingError: a replica refuses; nothing goes on recording then.
    """
    lab = _ask_gateway(f"{gateway_url}/lab")
    targets = _ask_gateway(f"{gateway_url}/targets")
    gateways = [
        address
        for target in targets if target["labels"].get("role") == "gateway"
        for address in target["targets"]
    ]  # fmt: skip
    names = {replica["url"]: replica["replica"] for replica in lab["replicas"]}
    max_events = max(1, MAX_EVENTS // max(1, len(names)))
    try:
        with recording(
            names, limit_s=seconds, max_events=max_events, with_token_ids=with_token_ids, share=share
        ) as recordings:
            started_ns = time.monotonic_ns()
            _wait(seconds, say)
            ended_ns = time.monotonic_ns()
            say("fetching what was recorded")
            fetched = fetch_trace(
                recordings,
                gateways,
                model=lab["config"]["model"]["name"],
                started_ns=started_ns,
                ended_ns=ended_ns,
                share=share,
            )
    except RecordingError as error:
        raise RecordingError(f"replica {names[error.url]}: {error.why}", error.url, error.why) from None
    return Recording(fetched.trace, list(_faults(fetched, names)))


def _faults(fetched: Fetched, names: dict[str, str]) -> Iterator[str]:
    for error in fetched.missing_steps:
        yield f"replica {names[error.url]}: its steps are missing: {error.why}"
    yield from fetched.missing_spans
    for replica in fetched.trace.header.replicas:
        if replica.lost_events:
            yield f"replica {replica.replica_id}: {replica.lost_events} events did not fit, from the end"
    if not fetched.trace.header.spans_complete:
        yield "a gateway had more requests than it remembers: spans from the beginning are missing"


def _wait(seconds: float, say: Callable[[str], None]) -> None:
    give_up_at_s = time.monotonic() + seconds
    while (left_s := give_up_at_s - time.monotonic()) > 0:
        say(f"recording, {left_s:.0f} s to go")
        time.sleep(min(1.0, left_s))


def _ask_gateway(url: str) -> Any:
    try:
        return json.loads(get(url, key_headers()))
    except GetError as error:
        said = KEY_HINT if error.status == HTTPStatus.UNAUTHORIZED else error.why
        raise NotRunningError(f"GET {url}: {said}") from None
    except ValueError as error:
        raise NotRunningError(f"GET {url}: {error}") from None
