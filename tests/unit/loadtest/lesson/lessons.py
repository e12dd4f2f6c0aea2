"""A lesson made by hand: round numbers that its sentences can be checked against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loadtest.client.traced_lab import TracedLab
from loadtest.lesson.envelope import PLACEMENT, Curve, Envelope, LoadPoint, Reckoned, ReckonedPoint
from loadtest.lesson.measure import OperatingPoint, Queue, Scoring, StepSize, Timeline, TimelineStep, Wait
from loadtest.lesson.teach import LeftOut, Lesson
from serving.core.lane import Strategy
from serving.roofline import Roofline
from serving.tracing.events import Phase

MACHINE: dict[str, Any] = {
    "cpu_model": "Abacus 9000",
    "usable_cores": 2,
    "memory_bytes": 24 * 2**30,
    "gpus": [],
}
LANES = {strategy: str(strategy) for strategy in Strategy}


def lab(engine: str = "vllm") -> TracedLab:
    replicas = [
        {
            "replica": f"{lane}-1",
            "lane": lane,
            "strategy": lane,
            "url": "http://127.0.0.1:9",
            "engine": engine,
            "engine_version": "0.32.0",
            "dtype": "float32",
            "device": "cpu",
        }
        for lane in LANES.values()
    ]
    model = {"name": "smollm2-135m", "path": "auto", "max_model_len": 2048}
    lanes = [{"name": lane, "strategy": lane, "max_num_seqs": 16} for lane in LANES.values()]
    description = {"model": model, "config": {"model": model, "lanes": lanes}, "replicas": replicas}
    return TracedLab("http://127.0.0.1:9", description, dict(LANES))


def queue(lane: str, *, room: int, serve_s: float, point: OperatingPoint) -> Queue:
    """Twelve requests, `room` at a time, each served for `serve_s`."""
    waits = []
    for number in range(1, 13):
        started_s = (number - 1) // room * serve_s + 0.05 * number
        first_s = started_s + 0.2 * serve_s
        waits.append(Wait(number, 0.05 * (number - 1), started_s, first_s, started_s + serve_s))
    return Queue(lane, tuple(waits), point)


def timeline(lane: str, *, drafts: int) -> Timeline:
    """A prompt, then steps of one token, or of one token and `drafts` drafts of which one is rejected."""
    steps = [TimelineStep(0.0, 0.25, Phase.PREFILL, 0, 0, 1, "", "The", "")]
    at_s, accepted = 0.25, max(0, drafts - 1)
    for _ in range(24 // (1 + accepted)):
        ended_s = at_s + (0.08 if drafts else 0.05)
        kept, dropped = " tall" * accepted, " wave" * (drafts - accepted)
        emitted = 1 + accepted
        steps.append(
            TimelineStep(at_s, ended_s, Phase.DECODE, drafts, accepted, emitted, kept, " <b>", dropped)
        )
        at_s = ended_s
    return Timeline(lane, tuple(steps))


def curve(text: str, name: str, *each_tokens_per_s: float, lane: str | None = None) -> Curve:
    """Measured at 1, 4 and 16 at once."""
    points = tuple(
        LoadPoint(load, load * each) for load, each in zip((1, 4, 16), each_tokens_per_s, strict=True)
    )
    return Curve(text, name, lane, lane is not None, points)


def fixed() -> tuple[Curve, ...]:
    """Drafts pay while copying until 16 at once, and for a story when it is alone, a little."""
    plain, drafting = "batched, k = 0", "speculative, k = 4"
    return (
        curve("copying a text", plain, 20, 18, 10, lane="batched"),
        curve("copying a text", drafting, 40, 30, 8, lane="speculative"),
        curve("a story", plain, 20, 18, 10, lane="batched"),
        curve("a story", drafting, 20.4, 15, 5, lane="speculative"),
    )


def reckoned() -> Envelope:
    copying = tuple(
        ReckonedPoint(load, k, load * each) for load, k, each in ((1, 4, 41), (4, 4, 31), (16, 0, 10))
    )
    story = tuple(
        ReckonedPoint(load, k, load * each) for load, k, each in ((1, 1, 22), (4, 0, 18), (16, 0, 10))
    )
    return Envelope(
        fixed(),
        Reckoned({"copying a text": copying, "a story": story}, median_error=0.042, largest_error=0.11),
    )


def placed() -> Envelope:
    """A lab whose placement is adaptive: it was measured, and is a tenth below the best at the worst."""
    ran_on = {1: {"speculative": 4}, 4: {"speculative": 3, "batched": 1}, 16: {"batched": 16}}
    curves = []
    for made in (curve("copying a text", PLACEMENT, 40, 27, 10), curve("a story", PLACEMENT, 20, 18, 10)):
        points = tuple(replace(point, ran_on=ran_on[point.requests]) for point in made.points)
        curves.append(replace(made, points=points))
    return Envelope((*fixed(), *curves), None)


def whole() -> Lesson:
    sizes = [StepSize(Phase.DECODE, 2**power, 0.05 + 0.004 * 2**power, 15) for power in range(5)]
    sizes += [StepSize(Phase.PREFILL, 2**power, 0.04 + 0.003 * 2**power, 3) for power in range(5, 10)]
    return Lesson(
        lab(),
        scoring=Scoring(tuple(0.05 * n for n in range(1, 97)), 112, 0.28, 1, 0.00002, 0.0003),
        sizes=tuple(sizes),
        roofline=Roofline(135_000_000, "float32", 90e9, 18e9),
        queues={
            Strategy.SEQUENTIAL: queue(
                "sequential", room=1, serve_s=1.5, point=OperatingPoint("sequential", 1, 1, 0.05)
            ),
            Strategy.BATCHED: queue(
                "batched", room=12, serve_s=4.0, point=OperatingPoint("batched", 9.5, 9.5, 0.09)
            ),
            Strategy.SPECULATIVE: queue(
                "speculative", room=12, serve_s=3.0, point=OperatingPoint("speculative", 40, 22, 0.2)
            ),
        },
        timelines=(timeline("batched", drafts=0), timeline("speculative", drafts=4)),
        envelope=reckoned(),
        started_at="2026-01-02T03:04:05+00:00",
        took_s=95.0,
        machine=MACHINE,
    )


def simulated() -> Lesson:
    """What a lab of simulated engines gives: no scoring, no roof, no texts."""
    lesson = whole()
    assert not isinstance(lesson.timelines, LeftOut)
    batched, speculative = (
        Timeline(
            each.lane,
            tuple(replace(step, kept_text=None, own_text=None, dropped_text=None) for step in each.steps),
        )
        for each in lesson.timelines
    )
    return replace(
        lesson,
        lab=lab("simulated"),
        scoring=LeftOut("Nothing to score."),
        roofline=LeftOut("No weights."),
        timelines=(batched, speculative),
    )
