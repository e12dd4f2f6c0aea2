"""The lesson's pictures, fed from the traces of a run: what `tandem bench --trace` adds to its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.drawing.style import Look, lane_looks
from loadtest.lesson import pictures, sentences
from loadtest.lesson.measure import Queue, Timeline, by_size, operating_point, timeline_steps, wait_of
from loadtest.lesson.teach import LeftOut
from loadtest.lesson.text import TokenText
from loadtest.offer.prompt_tokens import tokenizer_of
from loadtest.report.charts import DrawnChart
from loadtest.run.directory import STEP_TRACES_DIR, RunFile, StageRun
from serving.core.lane import Strategy
from serving.roofline import Roofline
from serving.tracing.events import Phase, StepEvent, to_last_token
from serving.tracing.sampling import unique_part
from serving.tracing.trace_file import Trace, TraceFileError, read_trace

MAX_REQUESTS = 12
MAX_TOKENS = 48  # of an answer that is drawn step by step

NOT_TRACED = (
    "`tandem bench --trace` records what the engines did and draws it here: who waits for whom, the memory wall, "
    "draft and verify."
)
ELSEWHERE = "A fourth picture, parallel against serial, takes requests of its own: `tandem lesson` draws it."


@dataclass(frozen=True, slots=True)
class StepPictures:
    """What a run can show of its engines' steps.

    Attributes:
        timelines: of the picture of drafts, where their text is known.
        notes: what is not shown, and how to get it.
    """

    charts: tuple[DrawnChart, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    notes: tuple[str, ...] = ()


NO_PICTURES = StepPictures(notes=(NOT_TRACED,))


@dataclass(frozen=True, slots=True)
class Answer:
    """A request and all its steps.

    Attributes:
        number: of its prompt; the same in every lane of a load.
        arrived_ns: at the gateway.
    """

    number: int
    arrived_ns: int
    steps: tuple[StepEvent, ...]


def draw_steps(run: RunFile, directory: Path) -> StepPictures:
    """Every picture that the run's traces can feed.

    Raises:
        ValueError: a trace is missing or damaged; the text names it.
    """
    if not any(stage.trace for stage in run.stages):
        return NO_PICTURES
    return _Drawing(run, directory).draw()


def answers(step_trace: Trace, lane: str, run_id: str) -> list[Answer]:
    """Completed requests of a run, by arrival. Left out: those that were rerouted, or not recorded whole."""
    by_request = defaultdict(list)
    for event in step_trace.steps:
        by_request[unique_part(event.request_id)].append(event)
    recorded_whole = []
    for span in step_trace.spans:
        number = span.client_request_id.rpartition("-")[2]
        steps = to_last_token(by_request[unique_part(span.request_id)])
        if (
            span.client_request_id.startswith(run_id)
            and number.isdecimal()
            and [attempt.lane for attempt in span.attempts] == [lane]
            and steps
            and steps[0].phase is Phase.PREFILL
            and sum(event.emitted_tokens for event in steps) == span.output_tokens
        ):
            recorded_whole.append(Answer(int(number), span.arrived_ns, steps))
    return recorded_whole


class _Drawing:
    def __init__(self, run: RunFile, directory: Path) -> None:
        self._run = run.run
        self._directory = directory / STEP_TRACES_DIR
        self._looks = lane_looks(run.run.config, ())
        self._strategies = {lane["name"]: lane["strategy"] for lane in run.run.config["lanes"]}
        # The lanes of a load, which did the same work, in the order in which they ran.
        groups = defaultdict(list)
        for stage in run.stages:
            if stage.trace is not None and stage.trace.file is not None:
                plan = stage.plan
                groups[plan.workload, plan.load.label, plan.repeat].append(stage)
        self._groups = list(groups.values())

    def draw(self) -> StepPictures:
        """The pictures; first the requests under whose load the others show the lanes."""
        charts, notes = [], []
        # The last of the largest: levels of concurrency rise.
        crowd = max(reversed(self._groups), key=len, default=[])
        queues = self._queues(crowd)
        if queues:
            charts.append(_waits(crowd[0], queues, self._looks))
        else:
            notes.append("Who waits for whom is left out: no request was recorded whole.")
        wall = self._wall(crowd[0], queues) if queues else None
        if wall is not None:
            charts.append(wall)
        else:
            notes.append(
                "The memory wall is left out: it is that of a batched lane, whose steps were not recorded."
            )
        drawn = next(self._drafts(), None)
        timelines: tuple[Timeline, ...] = ()
        if drawn is not None:
            chart, both = drawn
            charts.append(chart)
            timelines = tuple(timeline for timeline in both if timeline.text is not None)
        else:
            notes.append(
                "Draft and verify is left out: no request with drafts was recorded whole on a speculative lane "
                "and on a batched one."
            )
        return StepPictures(tuple(charts), timelines, (*notes, ELSEWHERE))

    def _step_trace(self, stage: StageRun) -> Trace:
        assert stage.trace is not None
        assert stage.trace.file is not None
        path = self._directory / stage.trace.file
        try:
            return read_trace(path)
        except TraceFileError as error:
            raise ValueError(str(error)) from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror}") from None

    def _queues(self, stages: Sequence[StageRun]) -> list[Queue]:
        """The first requests of each lane, equally many."""
        recorded = []
        for stage in stages:
            step_trace = self._step_trace(stage)
            if own := answers(step_trace, stage.plan.lane, self._run.id):
                recorded.append((stage.plan.lane, own, step_trace.steps))
        most = min([MAX_REQUESTS, *(len(own) for _, own, _ in recorded)])
        return [
            Queue(
                lane,
                tuple(
                    wait_of(place, answer.arrived_ns, answer.steps, own[0].arrived_ns)
                    for place, answer in enumerate(own[:most], start=1)
                ),
                operating_point(lane, steps),
            )
            for lane, own, steps in recorded
        ]

    def _wall(self, crowd: StageRun, queues: Sequence[Queue]) -> DrawnChart | None:
        steps = [
            event
            for stages in self._groups
            for stage in stages
            if self._strategies.get(stage.plan.lane) == Strategy.BATCHED
            for event in self._step_trace(stage).steps
        ]
        # Prompts of a workload differ in length: hardly two of their steps are of one size.
        sizes = [size for size in by_size(steps) if size.phase is Phase.DECODE]
        if not sizes:
            return None
        lanes = [queue.point for queue in queues if queue.point is not None]
        roofline = self._run.roofline
        roof = roofline if isinstance(roofline, Roofline) else LeftOut(roofline or "No roof is drawn.")
        drawn_roof = roofline if isinstance(roofline, Roofline) else None
        chart = pictures.memory_wall(sizes, lanes, drawn_roof, self._looks)
        said = [
            "A step of the batched lane by the positions it computed, medians over all stages.",
            *sentences.of_wall(sizes, lanes, roof, load=_load(crowd)),
        ]
        return DrawnChart("memory-wall", "The memory wall", " ".join(said), chart.to_dict())

    def _drafts(self) -> Iterator[tuple[DrawnChart, tuple[Timeline, Timeline]]]:
        """Of each load, the first request that had drafts, next to itself on the batched lane."""
        for stages in self._groups:
            by_strategy = {self._strategies.get(stage.plan.lane): stage for stage in reversed(stages)}
            if not {Strategy.BATCHED, Strategy.SPECULATIVE} <= by_strategy.keys():
                continue
            plain, speculative = by_strategy[Strategy.BATCHED], by_strategy[Strategy.SPECULATIVE]
            by_number = {answer.number: answer for answer in self._answers(plain)}
            for answer in self._answers(speculative):
                if answer.number in by_number and any(event.drafted_tokens for event in answer.steps):
                    both = (
                        self._timeline(plain, by_number[answer.number]),
                        self._timeline(speculative, answer),
                    )
                    if all(timeline.decode_steps for timeline in both):
                        yield _draft_and_verify(speculative, answer, both), both
                        break

    def _answers(self, stage: StageRun) -> list[Answer]:
        return answers(self._step_trace(stage), stage.plan.lane, self._run.id)

    def _timeline(self, stage: StageRun, answer: Answer) -> Timeline:
        file = tokenizer_of(self._run.model["path"]) if "path" in self._run.model else None
        text = None if file is None else TokenText(file)
        return Timeline(stage.plan.lane, tuple(timeline_steps(_beginning(answer.steps), text)))


def _waits(stage: StageRun, queues: Sequence[Queue], looks: Mapping[str, Look]) -> DrawnChart:
    said = [
        f"The first {len(queues[0].waits)} requests of each lane under {_load(stage)}, by arrival at the gateway.",
        *sentences.of_each_queue(queues),
    ]
    chart = pictures.who_waits(queues, looks)
    return DrawnChart("waits", "Who waits for whom", " ".join(said), chart.to_dict())


def _draft_and_verify(stage: StageRun, answer: Answer, both: tuple[Timeline, Timeline]) -> DrawnChart:
    is_cut = sum(event.emitted_tokens for event in answer.steps) > MAX_TOKENS
    what = f"The first {MAX_TOKENS} tokens of one answer" if is_cut else "One answer"
    said = [f"{what} under {_load(stage)}, on both lanes.", *sentences.of_drafts(*both)]
    return DrawnChart("drafts", "Draft and verify", " ".join(said), pictures.draft_and_verify(both).to_dict())


def _beginning(steps: Sequence[StepEvent]) -> list[StepEvent]:
    """Steps until there are `MAX_TOKENS` tokens, or all."""
    taken, tokens = [], 0
    for event in steps:
        if tokens >= MAX_TOKENS:
            break
        taken.append(event)
        tokens += event.emitted_tokens
    return taken


def _load(stage: StageRun) -> str:
    return f"{stage.plan.load.label} of {stage.plan.workload}"
