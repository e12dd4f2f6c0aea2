"""The lesson as one page that needs no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loadtest.drawing.page import render_page
from loadtest.drawing.style import Chart, lane_looks
from loadtest.judge.wording import number
from loadtest.lesson import pictures, sentences
from loadtest.lesson.envelope import Reckoned
from loadtest.lesson.measure import Queue, Timeline
from loadtest.lesson.teach import LeftOut, Lesson
from serving import __version__
from serving.core.lane import Strategy

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Picture:
    """One of the five.

    Attributes:
        name: its anchor, and of its definitions in the template.
        spec: Vega-Lite; None where the picture is left out, and `sentences` says why.
    """

    name: str
    title: str
    sentences: list[str]
    spec: dict[str, Any] | None


def render(lesson: Lesson) -> str:
    """The page, with its pictures and all they need inside it."""
    all_pictures = five_pictures(lesson)
    return render_page(
        Path(__file__).with_name("lesson.html.j2"),
        {picture.name: picture.spec for picture in all_pictures if picture.spec is not None},
        lesson=lesson,
        version=__version__,
        all_pictures=all_pictures,
        number=number,
        timelines=_spoken(lesson.timelines),
        engines=[
            (lane, lesson.lab.replicas(lane)[0], len(lesson.lab.replicas(lane)))
            for lane in lesson.lab.lanes.values()
        ],
    )


def five_pictures(lesson: Lesson) -> tuple[Picture, ...]:
    """Each drawn, or left out with its reason."""
    lanes = tuple(queue.point for queue in lesson.queues.values() if queue.point is not None)
    roofline = lesson.roofline
    config = lesson.lab.description["config"]
    looks = lane_looks(config, lesson.lab.lanes.values())
    return (
        _picture(
            "parallel",
            "Parallel against serial",
            lesson.scoring,
            sentences.of_scoring,
            lambda scoring: pictures.parallel_and_serial(scoring, looks[lesson.lab.lanes[Strategy.BATCHED]]),
        ),
        _picture(
            "wall",
            "The memory wall",
            lesson.sizes,
            lambda sizes: sentences.of_wall(sizes, lanes, roofline),
            lambda sizes: pictures.memory_wall(
                sizes, lanes, None if isinstance(roofline, LeftOut) else roofline, looks
            ),
        ),
        _picture(
            "waits",
            "Who waits for whom",
            _both(lesson),
            lambda both: sentences.of_queues(*both),
            lambda both: pictures.who_waits(both, looks),
        ),
        _picture(
            "drafts",
            "Draft and verify",
            lesson.timelines,
            lambda both: sentences.of_drafts(*both),
            pictures.draft_and_verify,
        ),
        _picture(
            "envelope",
            "The envelope",
            lesson.envelope,
            sentences.of_envelope,
            lambda envelope: pictures.envelope(
                envelope.curves,
                envelope.reckoned if isinstance(envelope.reckoned, Reckoned) else None,
                pictures.looks_of_curves(config, envelope.curves),
                "requests at once (log scale)",
                "tokens/s of each request",
            ),
        ),
    )


def _picture(
    name: str,
    title: str,
    measured: Measured | LeftOut,
    say: Callable[[Measured], list[str]],
    draw: Callable[[Measured], Chart],
) -> Picture:
    if isinstance(measured, LeftOut):
        return Picture(name, title, [f"This picture is left out. {measured.reason}"], None)
    return Picture(name, title, say(measured), draw(measured).to_dict())


def _both(lesson: Lesson) -> tuple[Queue, Queue] | LeftOut:
    for strategy in (Strategy.SEQUENTIAL, Strategy.BATCHED):
        if strategy not in lesson.queues:
            return LeftOut(f"It needs a {strategy} lane, and this lab has none that is ready.")
    return lesson.queues[Strategy.SEQUENTIAL], lesson.queues[Strategy.BATCHED]


def _spoken(timelines: tuple[Timeline, Timeline] | LeftOut) -> list[Timeline]:
    """Those whose tokens can be shown as text."""
    both = () if isinstance(timelines, LeftOut) else timelines
    return [timeline for timeline in both if timeline.text is not None]
