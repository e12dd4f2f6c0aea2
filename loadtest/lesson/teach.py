"""The whole lesson: every measurement, or why this lab cannot show it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from loadtest.client.traced_lab import TracedLab, TracedLabError
from loadtest.lesson import envelope, measure
from loadtest.lesson.envelope import Envelope
from loadtest.lesson.measure import LeftOutError, Queue, Scoring, StepSize, Timeline
from loadtest.lesson.text import TokenText
from loadtest.offer.prompt_tokens import tokenizer_of
from serving import ceilings, machine
from serving.ceilings import Ceilings
from serving.core.lane import Strategy
from serving.progress import Say
from serving.roofline import Roofline, roofline_of

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why something is not shown: a whole sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lesson:
    """One run.

    Attributes:
        sizes, roofline: of the second picture, whose points are those of `queues`.
        queues: of the lanes that this lab has; the third picture is two of them.
        timelines: the batched lane's, and the speculative one's.
        envelope: of the fifth picture.
        started_at: ISO 8601, UTC.
        machine: as `serving.machine.describe` gives it.
    """

    lab: TracedLab
    scoring: Scoring | LeftOut
    sizes: tuple[StepSize, ...] | LeftOut
    roofline: Roofline | LeftOut
    queues: Mapping[Strategy, Queue]
    timelines: tuple[Timeline, Timeline] | LeftOut
    envelope: Envelope | LeftOut
    started_at: str
    took_s: float
    machine: dict[str, Any]


def teach(lab: TracedLab, say: Say) -> Lesson:
    """Measure everything, one thing after the other.

    Raises:
        TracedLabError: a request failed, or the lab's steps could not be recorded.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    began_s = time.monotonic()
    say("this machine's copy bandwidth and matrix rate")  # first, while the engines rest
    roofline = _try(lambda: find_roofline(lab))
    say("parallel against serial")
    scoring = _try(lambda: measure.scoring(lab))
    sizes = _try(lambda: measure.step_sizes(lab, say))
    queues = {}
    for strategy, lane in lab.lanes.items():
        say(f"who waits for whom: {measure.NUM_QUEUED} requests on {lane}")
        queues[strategy] = measure.queue(lab, strategy)
    say("draft and verify")
    timelines = _try(lambda: _timelines(lab))
    found = _try(lambda: envelope.envelope(lab, say))
    took_s = time.monotonic() - began_s
    return Lesson(
        lab, scoring, sizes, roofline, queues, timelines, found, started_at, took_s, machine.describe()
    )


def _try(work: Callable[[], Found]) -> Found | LeftOut:
    try:
        return work()
    except LeftOutError as error:
        return LeftOut(str(error))


def _timelines(lab: TracedLab) -> tuple[Timeline, Timeline]:
    measure.need(lab, Strategy.SPECULATIVE)
    file = tokenizer_of(lab.description["model"]["path"]) if lab.has_model else None
    text = None if file is None else TokenText(file)
    return measure.timeline(lab, Strategy.BATCHED, text), measure.timeline(lab, Strategy.SPECULATIVE, text)


def find_roofline(lab: TracedLab) -> Roofline:
    """The batched lane's model on this machine, whose ceilings are measured now and kept for other readers.

    Raises:
        LeftOutError: nothing computes, or it is not this machine's processor that does.
        TracedLabError: they cannot be kept.
    """
    replica = lab.replicas(measure.need(lab, Strategy.BATCHED))[0]
    try:
        return roofline_of(replica, lab.description["model"]["path"], _measured_ceilings)
    except ValueError as error:
        raise LeftOutError(str(error)) from None


def _measured_ceilings(dtype: str) -> Ceilings:
    measured = ceilings.measure(dtype)
    try:
        ceilings.keep(measured)
    except OSError as error:
        raise TracedLabError(f"{ceilings.ceilings_path()}: cannot be written: {error.strerror}") from None
    return measured
