"""The lesson's measurements: what is asked of the lab, and what its steps say.

Times are those of engine steps: HTTP, gateway and this process are in none of them but in waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import Any

from loadtest.client.traced_lab import Question, TracedLab
from loadtest.lesson.text import TokenText
from loadtest.offer.prompt_tokens import BYTE_ESTIMATE
from loadtest.offer.prompts import Slot, copy
from loadtest.offer.request_body import Message
from serving.core.lane import Strategy
from serving.progress import Say
from serving.tracing.events import Phase, StepEvent

NS_PER_S = 1e9

OPENING = "The lighthouse keeper counted the ships that passed in the night, and"
SERIAL_TOKENS = 96
NUM_PASSES = 5

BATCHES = (1, 2, 4, 8, 16)
BATCH_TOKENS = 16
PREFILLS = (32, 64, 128, 256, 512)
PREFILL_REPEATS = 3
MIN_STEPS = 3  # of a size: the median of fewer says nothing

NUM_QUEUED = 12
QUEUE_LENGTHS = (12, 32, 20)  # tokens of their answers, in turn
QUEUE_GAP_S = 0.05  # so that they arrive in order

DRAFT_TOKENS = 48


class LeftOutError(Exception):
    """This lab cannot show a picture; the text is a whole sentence."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The same text generated token by token and scored in one pass.

    Attributes:
        generated_at_s: when each token was there, from the beginning of the first step behind the prompt.
        scored_tokens: positions of the pass: the opening and all generated tokens.
        pass_s: median of `NUM_PASSES` passes, each of `pass_steps` engine steps.
        median_difference, largest_difference: between the log-probabilities that both gave the generated tokens.
    """

    generated_at_s: tuple[float, ...]
    scored_tokens: int
    pass_s: float
    pass_steps: int
    median_difference: float
    largest_difference: float

    @property
    def serial_tokens_per_s(self) -> float:
        return len(self.generated_at_s) / self.generated_at_s[-1]

    @property
    def pass_tokens_per_s(self) -> float:
        return self.scored_tokens / self.pass_s


@dataclass(frozen=True, slots=True)
class StepSize:
    """Steps that computed the same number of positions, `tokens`; `step_s` is their median."""

    phase: Phase
    tokens: int
    step_s: float
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Means over the steps in which a lane only went on with the answers of the third picture.

    Attributes:
        tokens: positions computed in a step, rejected drafts among them.
        emitted: tokens that the answers grew by in a step.
    """

    lane: str
    tokens: float
    emitted: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.emitted / self.step_s


@dataclass(frozen=True, slots=True)
class Wait:
    """One request of the third picture, in seconds from the sending of the first.

    Attributes:
        started_s: its first engine step began.
        ended_s: its last token was there.
    """

    number: int
    sent_s: float
    started_s: float
    first_token_s: float
    ended_s: float

    @property
    def waited_s(self) -> float:
        return self.started_s - self.sent_s

    @property
    def served_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class Queue:
    """The same requests on one lane, by number; `point` as in `operating_point`."""

    lane: str
    waits: tuple[Wait, ...]
    point: OperatingPoint | None

    @property
    def done_s(self) -> float:
        return max(wait.ended_s for wait in self.waits)


@dataclass(frozen=True, slots=True)
class TimelineStep:
    """One step of one request, in seconds from its first step.

    Attributes:
        drafted, accepted, emitted: tokens, as in `StepEvent`.
        kept_text, own_text, dropped_text: of accepted drafts, of what the model added, of rejected drafts;
            all None where the tokens are not known.
    """

    started_s: float
    ended_s: float
    phase: Phase
    drafted: int
    accepted: int
    emitted: int
    kept_text: str | None = None
    own_text: str | None = None
    dropped_text: str | None = None

    @property
    def kept(self) -> int:
        """Accepted drafts that are in the answer: its last step may cut some off."""
        return min(self.accepted, self.emitted)

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one request on one lane."""

    lane: str
    steps: tuple[TimelineStep, ...]

    @property
    def decode_steps(self) -> tuple[TimelineStep, ...]:
        return tuple(step for step in self.steps if step.phase is Phase.DECODE)

    @property
    def lasted_s(self) -> float:
        return self.steps[-1].ended_s

    @property
    def text(self) -> str | None:
        """The answer; None where the tokens of a step are not known."""
        if any(step.own_text is None for step in self.steps):
            return None
        return "".join((step.kept_text or "") + (step.own_text or "") for step in self.steps)


def scoring(lab: TracedLab) -> Scoring:
    """Generate a text alone on the batched lane, then score that very text.

    Raises:
        LeftOutError: no batched lane, or its engine scores nothing.
        TracedLabError: a request failed.
    """
    lane = need(lab, Strategy.BATCHED)
    if not lab.has_model:
        raise LeftOutError("A simulated engine computes no probabilities, so there is nothing to score.")
    # One more than is shown: the first token comes with the prompt's step.
    wanted = {"prompt": OPENING, "logprobs": 0, "return_token_ids": True}
    (answer,) = lab.ask([Question(lane, wanted, SERIAL_TOKENS + 1)]).answers
    (choice,) = answer.body["choices"]
    decode = [event for event in answer.steps if event.phase is Phase.DECODE]
    # Token ids, not text: cut into tokens again, the text could give others.
    text = {"prompt": choice["prompt_token_ids"] + choice["token_ids"], "prompt_logprobs": 0}
    passes = [lab.ask([Question(lane, text, 1)]).answers[0] for _ in range(NUM_PASSES)]
    apart = differences(choice, passes[0].body["choices"][0]["prompt_logprobs"])
    return Scoring(
        generated_at_s=tuple((event.ended_ns - decode[0].started_ns) / NS_PER_S for event in decode),
        scored_tokens=sum(event.scheduled_tokens for event in passes[0].steps),
        pass_s=median(busy_s(each.steps) for each in passes),
        pass_steps=len(passes[0].steps),
        median_difference=median(apart),
        largest_difference=max(apart),
    )


def differences(choice: dict[str, Any], by_position: Sequence[Any]) -> list[float]:
    """Between the log-probabilities of a generated choice and those of a prompt that ends with its tokens."""
    tokens: list[int] = choice["token_ids"]
    given: list[float] = choice["logprobs"]["token_logprobs"]
    scored = by_position[-len(tokens) :]
    return [
        abs(logprob - float(place[str(token)]["logprob"]))
        for token, logprob, place in zip(tokens, given, scored, strict=True)
    ]


def busy_s(steps: Iterable[StepEvent]) -> float:
    """The time of these steps together."""
    return sum(event.ended_ns - event.started_ns for event in steps) / NS_PER_S


def step_sizes(lab: TracedLab, say: Say) -> tuple[StepSize, ...]:
    """Step times of the batched lane from one position upwards: requests decoded together, then prompts alone.

    Raises:
        LeftOutError: no batched lane.
        TracedLabError: a request failed.
    """
    lane = need(lab, Strategy.BATCHED)
    steps: list[StepEvent] = []
    for batch in BATCHES:
        if batch <= lab.max_running(lane):
            say(f"the memory wall: {batch} requests at once")
            steps += lab.ask([Question(lane, {"prompt": OPENING}, BATCH_TOKENS)] * batch).steps
    for tokens in PREFILLS:
        if tokens < lab.max_model_len:
            say(f"the memory wall: prompts of {tokens} tokens")
            for _ in range(PREFILL_REPEATS):
                steps += lab.ask([Question(lane, {"prompt": "the" + " the" * (tokens - 1)}, 1)]).steps
    return by_size(steps)


def by_size(steps: Iterable[StepEvent]) -> tuple[StepSize, ...]:
    """Median times by phase and size, decode first. Left out: steps of both phases, and sizes seen too rarely."""
    times_s: dict[tuple[Phase, int], list[float]] = {}
    for events in engine_steps(steps):
        phases = {event.phase for event in events}
        if len(phases) == 1:
            size = sum(event.scheduled_tokens for event in events)
            times_s.setdefault((phases.pop(), size), []).append(busy_s(events[:1]))
    return tuple(
        StepSize(phase, size, median(own_times_s), len(own_times_s))
        for (phase, size), own_times_s in sorted(times_s.items())
        if len(own_times_s) >= MIN_STEPS
    )


def engine_steps(steps: Iterable[StepEvent]) -> list[list[StepEvent]]:
    """Events of the same engine step together."""

    def step(event: StepEvent) -> tuple[str, int]:
        return event.replica_id, event.step

    return [list(events) for _, events in groupby(sorted(steps, key=step), key=step)]


def queue(lab: TracedLab, strategy: Strategy) -> Queue:
    """The same `NUM_QUEUED` requests, arriving as good as at once.

    Raises:
        LeftOutError: no such lane.
        TracedLabError: a request failed.
    """
    lane = need(lab, strategy)
    traced = lab.ask(
        [
            Question(lane, copying(number), QUEUE_LENGTHS[number % len(QUEUE_LENGTHS)], number * QUEUE_GAP_S)
            for number in range(NUM_QUEUED)
        ]
    )
    zero_ns = traced.answers[0].sent_ns
    waits = tuple(
        wait_of(number, answer.sent_ns, answer.steps, zero_ns)
        for number, answer in enumerate(traced.answers, start=1)
    )
    return Queue(lane, waits, operating_point(lane, traced.steps))


def operating_point(lane: str, steps: Iterable[StepEvent]) -> OperatingPoint | None:
    """Means over the steps that computed no prompt; None when each of them did."""
    decode = [
        events for events in engine_steps(steps) if all(event.phase is Phase.DECODE for event in events)
    ]
    if not decode:
        return None
    return OperatingPoint(
        lane=lane,
        tokens=fmean(sum(event.scheduled_tokens for event in events) for events in decode),
        emitted=fmean(sum(event.emitted_tokens for event in events) for events in decode),
        step_s=fmean(busy_s(events[:1]) for events in decode),
    )


def wait_of(number: int, sent_ns: int, steps: Sequence[StepEvent], zero_ns: int) -> Wait:
    """A request that was answered, by its steps."""
    first_token = next(event for event in steps if event.emitted_tokens)
    return Wait(
        number,
        sent_s=(sent_ns - zero_ns) / NS_PER_S,
        started_s=(steps[0].started_ns - zero_ns) / NS_PER_S,
        first_token_s=(first_token.ended_ns - zero_ns) / NS_PER_S,
        ended_s=(steps[-1].ended_ns - zero_ns) / NS_PER_S,
    )


def timeline(lab: TracedLab, strategy: Strategy, text: TokenText | None) -> Timeline:
    """One request, alone, that asks to copy a text, which drafts guess well.

    Args:
        text: None where the model's tokenizer is not at hand.

    Raises:
        LeftOutError: no such lane.
        TracedLabError: the request failed.
    """
    lane = need(lab, strategy)
    (answer,) = lab.ask([Question(lane, copying(0), DRAFT_TOKENS)]).answers
    return Timeline(lane, tuple(timeline_steps(answer.steps, text)))


def timeline_steps(steps: Sequence[StepEvent], text: TokenText | None) -> Iterator[TimelineStep]:
    """A request's steps with their texts."""
    so_far: tuple[int, ...] = ()
    for event in steps:
        step = TimelineStep(
            (event.started_ns - steps[0].started_ns) / NS_PER_S,
            (event.ended_ns - steps[0].started_ns) / NS_PER_S,
            event.phase,
            event.drafted_tokens,
            event.accepted_tokens,
            event.emitted_tokens,
            *_texts(event, so_far, text),
        )
        so_far += event.emitted_ids or ()
        yield step


def _texts(
    event: StepEvent, so_far: tuple[int, ...], text: TokenText | None
) -> tuple[str, str, str] | tuple[None, None, None]:
    """Of accepted drafts, of the model's own tokens, of rejected drafts."""
    drafted = event.drafted_ids if event.drafted_tokens else ()
    if text is None or event.emitted_ids is None or drafted is None:
        return None, None, None
    kept, own = event.emitted_ids[: event.accepted_tokens], event.emitted_ids[event.accepted_tokens :]
    return (
        text.of(kept, after=so_far),
        text.of(own, after=so_far + kept),
        text.of(drafted[event.accepted_tokens :], after=so_far + drafted[: event.accepted_tokens]),
    )


def need(lab: TracedLab, strategy: Strategy) -> str:
    """The lane of that strategy.

    Raises:
        LeftOutError: there is none with a replica.
    """
    if strategy not in lab.lanes:
        raise LeftOutError(f"It needs a {strategy} lane, and this lab has none that is ready.")
    return lab.lanes[strategy]


def copying(number: int) -> dict[str, Any]:
    """A chat that asks to copy a text, the same for the same number."""
    return chat_of(copy, number)


def chat_of(workload: Callable[[Slot], tuple[Message, ...]], number: int) -> dict[str, Any]:
    """A chat of a workload, the same for the same number."""
    return {"messages": list(workload(Slot(seed=0, number=number, counter=BYTE_ESTIMATE)))}
