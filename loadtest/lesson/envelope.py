"""The fifth picture's measurements: lanes of fixed k against load, which is best where, and where adaptive runs.

k is the number of draft tokens of a step. A load is so many requests at once, all of one text and equally long. The
envelope is the best fixed k at each load: what a choice by load and text could reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from loadtest.client.lane_drafts import chooses_drafts, drafts_by, num_drafts_of
from loadtest.client.lane_models import lanes_of_own_model
from loadtest.client.traced_lab import Question, TracedAnswer, TracedLab
from loadtest.lesson.measure import BATCHES, NS_PER_S, LeftOutError, chat_of, need
from loadtest.offer.prompts import Slot, copy, story
from loadtest.offer.request_body import Message
from serving.calibration.fit import fit_draft_cost, fit_linear
from serving.config import METHODS_WITH_DRAFT
from serving.core.lane import Strategy
from serving.core.speculation.acceptance import Rates
from serving.core.speculation.cost_model import CostModel
from serving.progress import Say
from serving.tracing.events import Phase, StepEvent
from serving.tracing.step_points import draft_outcome, draft_share, step_points

TEXTS: Mapping[str, Callable[[Slot], tuple[Message, ...]]] = {"copying a text": copy, "a story": story}
ANSWER_TOKENS = 24
MIN_REQUESTS = 4  # of a load: acceptance differs from request to request
PLACEMENT = "adaptive placement"  # whose requests name no lane


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """What `requests` at once got.

    Attributes:
        tokens_per_s: of all of them together.
        ran_on: requests by the lane that computed them; empty where that is known anyway.
    """

    requests: int
    tokens_per_s: float
    ran_on: Mapping[str, int] = field(default_factory=dict)

    @property
    def each_tokens_per_s(self) -> float:
        """One over the time per output token."""
        return self.tokens_per_s / self.requests


@dataclass(frozen=True, slots=True)
class Curve:
    """A lane, or adaptive placement, measured at every load with one text.

    Attributes:
        name: in the legend; the same for each text.
        lane: None for adaptive placement.
        is_fixed: it drafts as many tokens whatever the load: it is part of the envelope.
        points: by load, rising.
    """

    text: str
    name: str
    lane: str | None
    is_fixed: bool
    points: tuple[LoadPoint, ...]

    def at(self, requests: int) -> LoadPoint | None:
        """None where it was not measured."""
        return next((point for point in self.points if point.requests == requests), None)


@dataclass(frozen=True, slots=True)
class ReckonedPoint:
    """What the best k gives at a load, by the cost model."""

    requests: int
    num_drafts: int
    tokens_per_s: float

    @property
    def each_tokens_per_s(self) -> float:
        return self.tokens_per_s / self.requests


@dataclass(frozen=True, slots=True)
class Reckoned:
    """Where an adaptive k would run: from the cost model, not measured.

    Attributes:
        points: by text, by load.
        median_error, largest_error: of the model's tokens/s against those measured of the lanes it was fitted to,
            without their sign, as shares.
    """

    points: Mapping[str, tuple[ReckonedPoint, ...]]
    median_error: float
    largest_error: float


@dataclass(frozen=True, slots=True)
class Envelope:
    """The whole picture.

    Attributes:
        reckoned: None where adaptive was measured; a sentence where it cannot be reckoned either.
    """

    curves: tuple[Curve, ...]
    reckoned: Reckoned | str | None

    @property
    def adaptive(self) -> tuple[Curve, ...]:
        """Measured."""
        return tuple(curve for curve in self.curves if not curve.is_fixed)


@dataclass(frozen=True, slots=True)
class Best:
    """Who gives most at a load with a text, of what is fixed.

    Attributes:
        next_share: of the next best, 0 to 1 of it; None where it is alone.
    """

    requests: int
    name: str
    each_tokens_per_s: float
    next_share: float | None


def best_fixed(curves: Iterable[Curve], text: str) -> tuple[Best, ...]:
    """At each load that a fixed curve of that text was measured at; of equals the first."""
    fixed = [curve for curve in curves if curve.is_fixed and curve.text == text]
    found = []
    for requests in sorted({point.requests for curve in fixed for point in curve.points}):
        here = [(point.each_tokens_per_s, curve) for curve in fixed if (point := curve.at(requests))]
        (most, winner), *others = sorted(here, key=lambda each: each[0], reverse=True)
        found.append(Best(requests, winner.name, most, others[0][0] / most if others else None))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Loss:
    """Where a choice is furthest below the envelope; `share` of the envelope, below 0 where it is always above."""

    share: float
    text: str
    requests: int


def largest_loss(curves: Sequence[Curve], name: str) -> Loss:
    """Over all texts and loads at which the choice of that name was measured, once at least."""
    losses = []
    for curve in curves:
        if curve.name == name:
            for best in best_fixed(curves, curve.text):
                if point := curve.at(best.requests):
                    share = 1 - point.each_tokens_per_s / best.each_tokens_per_s
                    losses.append(Loss(share, curve.text, best.requests))
    return max(losses, key=lambda loss: loss.share)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A lane, or none where the lab places; `num_drafts` is the most it drafts."""

    name: str
    lane: str | None
    num_drafts: int
    is_fixed: bool
    is_learned: bool = False


@dataclass(slots=True)
class _Seen:
    """Of one choice and text: tokens and seconds by load, and all steps."""

    tokens: Counter[int] = field(default_factory=Counter)
    seconds: dict[int, float] = field(default_factory=dict)
    ran_on: dict[int, Counter[str]] = field(default_factory=dict)
    steps: list[StepEvent] = field(default_factory=list)


def envelope(lab: TracedLab, say: Say) -> Envelope:
    """Measure every lane that batches, and adaptive placement where the lab has it, in turns at each load.

    Raises:
        LeftOutError: a batched or a speculative lane is missing, or they take one request at a time.
        TracedLabError: a request failed.
    """
    need(lab, Strategy.BATCHED)
    need(lab, Strategy.SPECULATIVE)
    choices = _choices(lab)
    most = min(lab.max_running(choice.lane) for choice in choices if choice.lane is not None)
    loads = [load for load in BATCHES if load <= most]
    if len(loads) < 2:
        raise LeftOutError("It needs lanes that run 2 requests at once or more.")
    seen = {(choice.name, text): _Seen() for choice in choices for text in TEXTS}
    for text in TEXTS:
        for load in loads:
            for choice in choices:
                say(f"the envelope: {text}, {load} at once, {choice.name}")
                _ask(lab, choice, text, load, seen[choice.name, text])
    curves = tuple(
        Curve(text, choice.name, choice.lane, choice.is_fixed, _points(seen[choice.name, text]))
        for text in TEXTS
        for choice in choices
    )
    if not all(choice.is_fixed for choice in choices):
        return Envelope(curves, None)
    return Envelope(curves, _reckon_or_say_why(choices, seen, curves))


def curve_name(lane: Mapping[str, Any]) -> str:
    """What the legend calls the lane of that config."""
    if chooses_drafts(lane):
        return f"{lane['name']}, adaptive k"
    return f"{lane['name']}, k = {num_drafts_of(lane)}"


def _choices(lab: TracedLab) -> list[_Choice]:
    config = lab.description["config"]
    own = lanes_of_own_model(config)
    found = [
        _Choice(
            curve_name(lane),
            lane["name"],
            num_drafts_of(lane),
            not chooses_drafts(lane),
            drafts_by(lane) in METHODS_WITH_DRAFT,
        )
        for lane in config["lanes"]
        if lane["name"] in own and lane["strategy"] != Strategy.SEQUENTIAL and lab.replicas(lane["name"])
    ]
    if config.get("scheduler", {}).get("placement") == "adaptive":
        found.append(_Choice(PLACEMENT, None, 0, is_fixed=False))
    return found


def _ask(lab: TracedLab, choice: _Choice, text: str, load: int, seen: _Seen) -> None:
    """The same requests for every choice."""
    for first in range(0, max(MIN_REQUESTS, load), load):
        traced = lab.ask(
            [
                Question(choice.lane, chat_of(TEXTS[text], first + place), ANSWER_TOKENS)
                for place in range(load)
            ]
        )
        tokens, lasted_s = together(traced.answers)
        seen.tokens[load] += tokens
        seen.seconds[load] = seen.seconds.get(load, 0.0) + lasted_s
        seen.steps += traced.steps
        if choice.lane is None:
            lane_of = {replica["replica"]: replica["lane"] for replica in lab.description["replicas"]}
            ran_on = seen.ran_on.setdefault(load, Counter())
            ran_on.update(lane_of[answer.steps[0].replica_id] for answer in traced.answers)


def together(answers: Sequence[TracedAnswer]) -> tuple[int, float]:
    """Tokens and seconds from when the last of the answers has begun to when the first begins its last step.

    That step is left out: the answer's limit cuts it off, which would be held against drafts. Nothing at all where
    one ended before another began.
    """
    begins_ns = max(
        next(event.ended_ns for event in answer.steps if event.emitted_tokens) for answer in answers
    )
    ends_ns = min(answer.steps[-2:][0].ended_ns for answer in answers)
    if ends_ns <= begins_ns:
        return 0, 0.0
    tokens = sum(
        event.emitted_tokens
        for answer in answers
        for event in answer.steps
        if begins_ns < event.ended_ns <= ends_ns
    )
    return tokens, (ends_ns - begins_ns) / NS_PER_S


def _points(seen: _Seen) -> tuple[LoadPoint, ...]:
    return tuple(
        LoadPoint(load, seen.tokens[load] / lasted_s, seen.ran_on.get(load, {}))
        for load, lasted_s in sorted(seen.seconds.items())
        if lasted_s > 0
    )


def _reckon_or_say_why(
    choices: Sequence[_Choice], seen: Mapping[tuple[str, str], _Seen], curves: Sequence[Curve]
) -> Reckoned | str:
    try:
        return _reckon(choices, seen, curves)
    except ValueError as error:
        return f"Where an adaptive k would run is not reckoned: {error}."


def _reckon(
    choices: Sequence[_Choice], seen: Mapping[tuple[str, str], _Seen], curves: Sequence[Curve]
) -> Reckoned:
    """By a cost model fitted to the steps of the first lane without drafts and of the first with them.

    Raises:
        ValueError: the steps say too little.
    """
    plain = next(choice for choice in choices if not choice.num_drafts)
    drafting = next(choice for choice in choices if choice.num_drafts)
    model = _cost_model(
        [event for text in TEXTS for event in seen[plain.name, text].steps],
        [event for text in TEXTS for event in seen[drafting.name, text].steps],
        is_learned=drafting.is_learned,
    )
    points, errors = {}, []
    for text in TEXTS:
        rates, share = _acceptance(seen[drafting.name, text].steps, drafting.num_drafts)
        context_tokens = _mean_context(seen[plain.name, text].steps)
        of_text = []
        for curve in curves:
            if curve.text == text and curve.name in (plain.name, drafting.name):
                k = plain.num_drafts if curve.name == plain.name else drafting.num_drafts
                for point in curve.points:
                    expected = model.decode(point.requests, context_tokens, k, rates, share).tokens_per_s
                    errors.append(abs(expected / point.tokens_per_s - 1))
        for load in sorted(seen[plain.name, text].seconds):
            k = model.best_num_drafts(load, context_tokens, rates, drafting.num_drafts, share)
            best = model.decode(load, context_tokens, k, rates, share)
            of_text.append(ReckonedPoint(load, k, best.tokens_per_s))
        points[text] = tuple(of_text)
    return Reckoned(points, median(errors), max(errors))


def _cost_model(plain: Sequence[StepEvent], drafted: Sequence[StepEvent], *, is_learned: bool) -> CostModel:
    """Of steps without prompts, which cost another time for each position."""
    step_time = fit_linear(step_points(plain, Phase.DECODE)).form
    draft_cost = fit_draft_cost(step_points(drafted, Phase.DECODE), step_time).form
    return CostModel(step_time, replace(draft_cost, least_passes=int(is_learned)))


def _acceptance(steps: Sequence[StepEvent], num_drafts: int) -> tuple[Rates, float]:
    return draft_outcome(steps, num_drafts).rates, draft_share(steps, num_drafts) or 0.0


def _mean_context(steps: Sequence[StepEvent]) -> float:
    """Positions of a sequence in the KV cache half-way through its answer: its prompt, and half of what it gave."""
    held: Counter[str] = Counter()
    for event in steps:
        held[event.request_id] += event.scheduled_tokens if event.phase is Phase.PREFILL else 0
        held[event.request_id] += event.emitted_tokens
    return fmean(held.values()) - ANSWER_TOKENS / 2
