"""Records the engine steps of a running lab's replicas: what the lesson and `tandem bench --trace` share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from serving.core.http_get import GetError, post
from serving.tracing.events import StepEvent, TracedReplica

START_TIMEOUT_S = 10.0
FETCH_TIMEOUT_S = 120.0


class RecordingError(Exception):
    """A replica does not record, or its steps did not come; the text says why."""


@dataclass(frozen=True, slots=True)
class StepRecording:
    """One that goes on, on one replica."""

    url: str
    number: int

    def fetch(self) -> tuple[TracedReplica, list[StepEvent]]:
        """End it and get its events, with their tokens, once.

        Raises:
            RecordingError: the replica does not answer, or not with all of them.
        """
        first, *lines = _post(f"{self.url}/tandem/trace/stop?recording={self.number}", FETCH_TIMEOUT_S)
        replica = msgspec.json.decode(first, type=TracedReplica)
        if len(lines) != replica.events:
            raise RecordingError(
                f"replica {replica.replica_id}: {len(lines)} of {replica.events} step events came"
            )
        decode = msgspec.json.Decoder(StepEvent).decode
        return replica, [decode(line) for line in lines]


@contextmanager
def recording(urls: Sequence[str], *, limit_s: float, max_events: int) -> Iterator[list[StepRecording]]:
    """Recordings on these replicas; the block fetches them. Those of a block that fails are ended.

    Args:
        limit_s: a recording ends by itself then, should this process die.
        max_events: of each replica.

    Raises:
        RecordingError: a replica refuses; nothing goes on recording then.
    """
    query = f"seconds={limit_s:g}&max_events={max_events}&token_ids=1"
    started: list[StepRecording] = []
    try:
        for url in urls:
            (answer,) = _post(f"{url}/tandem/trace/start?{query}", START_TIMEOUT_S)
            started.append(StepRecording(url, json.loads(answer)["recording"]))
        yield started
    except BaseException:
        for one in started:
            # One that cannot be told ends by itself; one that was fetched is over.
            with contextlib.suppress(RecordingError):
                one.fetch()
        raise


def to_last_token(steps: Sequence[StepEvent]) -> tuple[StepEvent, ...]:
    """A request's steps up to the one that gave its last token.

    An engine that schedules ahead computes one more for an answer whose end it does not know yet.
    """
    end = max((place for place, event in enumerate(steps, start=1) if event.emitted_tokens), default=0)
    return tuple(steps[:end])


def _post(url: str, timeout_s: float) -> list[bytes]:
    """The lines of an answer."""
    try:
        return post(url, timeout_s=timeout_s).splitlines()
    except GetError as error:
        raise RecordingError(str(error)) from None
