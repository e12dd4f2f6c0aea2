"""Asks a running lab, and records the engine steps that answer."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from loadtest.client.lab import describe_lab
from loadtest.client.lane_models import lanes_of_own_model, other_names
from serving.core.addresses import server_root
from serving.core.client_key import key_headers
from serving.core.http_get import GetError, get, post
from serving.core.lane import Strategy, has_model
from serving.tracing.events import StepEvent, to_last_token
from serving.tracing.recording import RecordingError, recording

RECORD_LIMIT_S = 240  # a recording ends by itself if this process dies
ANSWER_TIMEOUT_S = 180.0
MAX_EVENTS = 200_000
FREED_WITHIN_S = 2.0  # a request's room, after the end of its answer
DONE = b"data: [DONE]"


class TracedLabError(Exception):
    """The lab cannot be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request. Its answer is greedy and exactly as long as asked; no prefix of it is cached.

    Attributes:
        lane: that it is pinned to; None leaves the choice to the lab.
        body: the prompt or the messages, and what else is asked for; messages make it a chat request.
        sent_after_s: after the first of those that are asked together.
        is_streamed: token by token, which takes processor time that engines on the same cores do not have. The body
            of the answer is then empty.
    """

    lane: str | None
    body: dict[str, Any]
    output_tokens: int
    sent_after_s: float = 0.0
    is_streamed: bool = False


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
        lanes: the first lane of each strategy that serves the lab's model and has a replica.
    """

    base_url: str
    description: dict[str, Any]
    lanes: dict[Strategy, str]

    @property
    def model(self) -> str:
        return str(self.description["model"]["name"])

    def model_of(self, lane: str) -> str:
        """What clients call the lane's model."""
        return other_names(self.description["config"]).get(lane, self.model)

    @property
    def max_model_len(self) -> int:
        return int(self.description["model"]["max_model_len"])

    @property
    def has_model(self) -> bool:
        """Whether all of its engines compute with the model."""
        return all(map(has_model, self.description["replicas"]))

    def replicas(self, lane: str) -> list[dict[str, Any]]:
        """What the replicas of a lane said of themselves."""
        return [replica for replica in self.description["replicas"] if replica["lane"] == lane]

    def max_running(self, lane: str) -> int:
        """Requests that the lane's engines decode at once."""
        (config,) = [config for config in self.description["config"]["lanes"] if config["name"] == lane]
        return int(config["max_num_seqs"]) * len(self.replicas(lane))

    def ask(self, questions: Sequence[Question]) -> Traced:
        """Ask them together, and wait for all answers.

        Raises:
            TracedLabError: a request failed, steps are missing, or others use the lab.
        """
        self._see_alone()
        pinned = {each.lane for each in questions}
        lanes = lanes_of_own_model(self.description["config"]) if None in pinned else pinned
        urls = [replica["url"] for replica in self.description["replicas"] if replica["lane"] in lanes]
        try:
            with recording(urls, limit_s=RECORD_LIMIT_S, max_events=MAX_EVENTS) as recordings:
                with ThreadPoolExecutor(len(questions)) as pool:
                    due_s = time.monotonic()
                    sent = list(pool.map(lambda question: self._send(question, due_s), questions))
                fetched = [step_recording.fetch() for step_recording in recordings]
        except (RecordingError, GetError) as error:
            raise TracedLabError(str(error)) from None
        for replica, _ in fetched:
            if replica.lost_events:
                raise TracedLabError(
                    f"replica {replica.replica_id}: {replica.lost_events} step events did not fit"
                )
        steps = tuple(event for _, events in fetched for event in events)
        # A step without a token may be one that was scheduled ahead of an answer's end, before this recording.
        ids = {event.request_id for event in steps if event.emitted_tokens}
        _refuse_others(ids, [each.request_id for each in sent])
        return Traced(tuple(_with_steps(answered, steps) for answered in sent), steps)

    def _see_alone(self) -> None:
        """Raises: TracedLabError: others have requests in the lab."""
        give_up_at_s = time.monotonic() + FREED_WITHIN_S
        while busy := _num_in_lab(self.base_url):
            if time.monotonic() > give_up_at_s:
                raise TracedLabError(_not_alone(self.base_url, busy))
            time.sleep(0.05)

    def _asked_of(self, lane: str | None) -> str:
        return self.model if lane is None else f"{self.model_of(lane)}:{lane}"

    def _send(self, question: Question, due_s: float) -> _Sent:
        request_id = f"traced-{secrets.token_hex(8)}"
        path = "/v1/chat/completions" if "messages" in question.body else "/v1/completions"
        body = question.body | {
            "model": self._asked_of(question.lane),
            "max_tokens": question.output_tokens,
            "min_tokens": question.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_salt": secrets.token_hex(8),
            "stream": question.is_streamed,
        }
        time.sleep(max(0.0, due_s + question.sent_after_s - time.monotonic()))
        sent_ns = time.monotonic_ns()
        headers = {"x-request-id": request_id} | key_headers()
        answer = post(self.base_url + path, body, headers, timeout_s=ANSWER_TIMEOUT_S)
        if not question.is_streamed:
            return _Sent(request_id, sent_ns, time.monotonic_ns(), json.loads(answer))
        if not answer.rstrip().endswith(DONE):
            raise TracedLabError(
                f"the stream of request {request_id} ends in {answer[-200:]!r} and not in {DONE!r}"
            )
        return _Sent(request_id, sent_ns, time.monotonic_ns(), {})


def find_lab(base_url: str) -> TracedLab:
    """The lab at an address.

    Raises:
        LabError: it cannot be reached, or is none.
        TracedLabError: it serves others, whose steps would be among the measured ones.
    """
    base_url = server_root(base_url)
    description = describe_lab(base_url)
    if busy := _num_in_lab(base_url):
        raise TracedLabError(_not_alone(base_url, busy))
    lanes: dict[Strategy, str] = {}
    own = lanes_of_own_model(description["config"])
    for lane in description["config"]["lanes"]:
        if lane["name"] in own and any(
            replica["lane"] == lane["name"] for replica in description["replicas"]
        ):
            lanes.setdefault(Strategy(lane["strategy"]), lane["name"])
    return TracedLab(base_url, description, lanes)


def _num_in_lab(base_url: str) -> int:
    """Requests that run or wait."""
    try:
        status = json.loads(get(f"{base_url}/scheduler", key_headers()))
    except GetError as error:
        raise TracedLabError(str(error)) from None
    return int(status["leases"] + status["waiting"])


def _not_alone(base_url: str, busy: int) -> str:
    return f"{base_url} has {busy} requests running or waiting; measuring needs the lab alone"


def _refuse_others(recorded: Set[str], sent: Sequence[str]) -> None:
    """Raises: TracedLabError: there are steps of requests that were not sent from here."""
    others = sorted(name for name in recorded if not any(own in name for own in sent))
    if others:
        raise TracedLabError(
            f"steps of {len(others)} requests of others were recorded, such as {others[0]:.100}; measuring needs "
            "the lab alone"
        )


def _with_steps(sent: _Sent, steps: Sequence[StepEvent]) -> TracedAnswer:
    own = tuple(event for event in steps if sent.request_id in event.request_id)
    own = to_last_token(own)
    if not own:
        raise TracedLabError(f"no step of request {sent.request_id} was recorded")
    if not sent.sent_ns <= own[0].started_ns <= own[-1].ended_ns <= sent.ended_ns:
        raise TracedLabError("the lab's clock is not this one's: measuring must be done on the lab's machine")
    return TracedAnswer(sent.sent_ns, sent.ended_ns, sent.body, own)
