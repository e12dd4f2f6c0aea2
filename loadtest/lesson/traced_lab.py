"""Asks a running lab, and records the engine steps that answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.lab import describe_lab
from serving.core.lane import Strategy
from serving.core.step_event import StepEvent, TracedReplica

RECORD_LIMIT_S = 240  # a recording ends by itself if this process dies
ANSWER_TIMEOUT_S = 180.0
MAX_EVENTS = 200_000

# Reached directly: the lab listens on the loopback, which no proxy serves.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class LessonError(Exception):
    """The lab cannot be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request pinned to a lane. Its answer is greedy and exactly as long as asked; no prefix of it is cached.

    Attributes:
        body: the prompt or the messages, and what else is asked for; messages make it a chat request.
        sent_after_s: after the first of those that are asked together.
    """

    lane: str
    body: dict[str, Any]
    output_tokens: int
    sent_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """What came back, and the engine's steps for it, in order; instants as in `StepEvent`."""

    sent_ns: int
    ended_ns: int
    body: dict[str, Any]
    steps: tuple[StepEvent, ...]


@dataclass(frozen=True, slots=True)
class Traced:
    """Answers in the order of their questions, and every step that was recorded meanwhile."""

    answers: tuple[TracedAnswer, ...]
    steps: tuple[StepEvent, ...]


@dataclass(frozen=True, slots=True)
class _Sent:
    request_id: str
    sent_ns: int
    ended_ns: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TracedLab:
    """A lab that nothing else uses.

    Attributes:
        description: the lab's `/lab`.
        lanes: the first lane of each strategy that has a replica.
    """

    base_url: str
    description: dict[str, Any]
    lanes: dict[Strategy, str]

    @property
    def model(self) -> str:
        return str(self.description["model"]["name"])

    @property
    def max_model_len(self) -> int:
        return int(self.description["model"]["max_model_len"])

    @property
    def is_simulated(self) -> bool:
        return any(replica["engine"] == "simulated" for replica in self.description["replicas"])

    def replicas(self, lane: str) -> list[dict[str, Any]]:
        """What the replicas of a lane said of themselves."""
        return [one for one in self.description["replicas"] if one["lane"] == lane]

    def max_running(self, lane: str) -> int:
        """Requests that the lane's engines decode at once."""
        (found,) = [one for one in self.description["config"]["lanes"] if one["name"] == lane]
        return int(found["max_num_seqs"]) * len(self.replicas(lane))

    def ask(self, questions: Sequence[Question]) -> Traced:
        """Ask them together, and wait for all answers.

        Raises:
            LessonError: a request failed, or steps are missing.
        """
        lanes = dict.fromkeys(each.lane for each in questions)
        urls = [one["url"] for lane in lanes for one in self.replicas(lane)]
        with _recording(urls) as recordings:
            with ThreadPoolExecutor(len(questions)) as pool:
                due_s = time.monotonic()
                sent = list(pool.map(lambda question: self._send(question, due_s), questions))
            steps = tuple(event for one in recordings for event in one.fetch())
        return Traced(tuple(_with_steps(one, steps) for one in sent), steps)

    def _send(self, question: Question, due_s: float) -> _Sent:
        request_id = f"lesson-{secrets.token_hex(8)}"
        path = "/v1/chat/completions" if "messages" in question.body else "/v1/completions"
        body = question.body | {
            "model": f"{self.model}:{question.lane}",
            "max_tokens": question.output_tokens,
            "min_tokens": question.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": secrets.token_hex(8),
        }
        time.sleep(max(0.0, due_s + question.sent_after_s - time.monotonic()))
        sent_ns = time.monotonic_ns()
        answer = _read(self.base_url + path, body, request_id)
        return _Sent(request_id, sent_ns, time.monotonic_ns(), json.loads(answer))


def find_lab(base_url: str) -> TracedLab:
    """The lab at an address.

    Raises:
        LabError: it cannot be reached, or is none.
        LessonError: it serves others, whose steps would be among the measured ones.
    """
    base_url = base_url.rstrip("/")
    description = describe_lab(base_url)
    status = json.loads(_read(f"{base_url}/scheduler"))
    if busy := status["leases"] + status["waiting"]:
        raise LessonError(
            f"{base_url} has {busy} requests running or waiting; the lesson needs the lab alone"
        )
    lanes: dict[Strategy, str] = {}
    for lane in description["config"]["lanes"]:
        if any(one["lane"] == lane["name"] for one in description["replicas"]):
            lanes.setdefault(Strategy(lane["strategy"]), lane["name"])
    return TracedLab(base_url, description, lanes)


@dataclass(frozen=True, slots=True)
class _Recording:
    url: str
    number: int

    def fetch(self) -> list[StepEvent]:
        """End the recording and get its events, once."""
        first, *lines = _read(f"{self.url}/tandem/trace/stop?recording={self.number}", {}).splitlines()
        replica = msgspec.json.decode(first, type=TracedReplica)
        if replica.lost_events or len(lines) != replica.events:
            recorded = replica.events + replica.lost_events
            raise LessonError(f"replica {replica.replica_id}: {len(lines)} of {recorded} step events came")
        decode = msgspec.json.Decoder(StepEvent).decode
        return [decode(line) for line in lines]


@contextmanager
def _recording(urls: Sequence[str]) -> Iterator[list[_Recording]]:
    """Recordings on these replicas; the block fetches them, and what it does not fetch when it fails is ended."""
    query = f"seconds={RECORD_LIMIT_S}&max_events={MAX_EVENTS}&token_ids=1"
    started: list[_Recording] = []
    try:
        for url in urls:
            answer = json.loads(_read(f"{url}/tandem/trace/start?{query}", {}))
            started.append(_Recording(url, answer["recording"]))
        yield started
    except BaseException:
        for one in started:
            # One that cannot be told ends by itself; one that was fetched is over.
            with contextlib.suppress(LessonError):
                one.fetch()
        raise


def _with_steps(sent: _Sent, steps: Sequence[StepEvent]) -> TracedAnswer:
    own = tuple(event for event in steps if sent.request_id in event.request_id)
    if not own:
        raise LessonError(f"no step of request {sent.request_id} was recorded")
    if not sent.sent_ns <= own[0].started_ns <= own[-1].ended_ns <= sent.ended_ns:
        raise LessonError("the lab's clock is not this one's: the lesson must run on the lab's machine")
    return TracedAnswer(sent.sent_ns, sent.ended_ns, sent.body, own)


def _read(url: str, body: dict[str, Any] | None = None, request_id: str = "") -> bytes:
    """GET, or POST where there is a body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with _OPENER.open(request, timeout=ANSWER_TIMEOUT_S) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(500).decode(errors="replace")
        raise LessonError(f"{url}: answered {error.code}: {said}") from None
    except (OSError, http.client.HTTPException) as error:
        raise LessonError(f"{url}: {getattr(error, 'reason', None) or repr(error)}") from None
