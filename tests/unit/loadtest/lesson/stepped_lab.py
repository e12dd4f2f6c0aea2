"""A lab in virtual time whose steps last as long as a cost model says, and whose drafts fare as they are told to.

So what a lesson measures of it is known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadtest.client.traced_lab import Question, Traced, TracedAnswer, TracedLab
from serving.core.lane import Strategy
from serving.core.speculation.cost_model import CostModel
from serving.tracing.events import Phase, StepEvent

NS_PER_S = 1_000_000_000
LANES = {"batched": 0, "speculative": 4}  # and how much they draft


@dataclass
class SteppedEngine:
    """One engine.

    Attributes:
        accepted: drafts of each step that are accepted, by whether the request asks to copy.
        asked: every question.
    """

    model: CostModel
    accepted: dict[bool, int]
    placed: str = "batched"  # where what names no lane goes
    finds_drafts: bool = True
    asked: list[Question] = field(default_factory=list)
    now_ns: int = 0
    step: int = 0

    def ask(self, questions: Sequence[Question]) -> Traced:
        self.asked += questions
        answers: dict[int, list[StepEvent]] = {number: [] for number in range(len(questions))}
        begun_ns = self.now_ns
        lane = questions[0].lane or self.placed
        lengths = [_prompt_tokens(question) for question in questions]
        left = {number: question.output_tokens for number, question in enumerate(questions)}
        events: list[StepEvent] = []
        while left:
            is_first = not events
            given = {number: questions[number].output_tokens - left[number] for number in left}
            kv_tokens = 0 if is_first else sum(lengths[number] + given[number] - 1 for number in left)
            drafts = LANES[lane] if self.finds_drafts and not is_first else 0
            tokens = sum(lengths) if is_first else len(left) * (1 + drafts)
            lasted_s = self.model.step_time.step_s(tokens, kv_tokens)
            lasted_s += self.model.draft_cost.draft_s(drafts, len(left))
            started_ns, self.step = self.now_ns, self.step + 1
            self.now_ns += round(lasted_s * NS_PER_S)
            for number in list(left):
                kept = min(self.accepted["copy" in _label(questions[number])], drafts) if drafts else 0
                emitted = min(1 + kept, left[number])
                event = StepEvent(
                    f"{lane}-1", self.step, started_ns, self.now_ns, f"{begun_ns}-{number}",
                    Phase.PREFILL if is_first else Phase.DECODE,
                    lengths[number] if is_first else 1 + drafts, drafts, kept, emitted,
                )  # fmt: skip
                answers[number].append(event)
                events.append(event)
                left[number] -= emitted
                if not left[number]:
                    del left[number]
        return Traced(
            tuple(TracedAnswer(begun_ns, self.now_ns, {}, tuple(steps)) for steps in answers.values()),
            tuple(events),
        )


@dataclass(frozen=True, slots=True)
class SteppedLab(TracedLab):
    engine: SteppedEngine

    def ask(self, questions: Sequence[Question]) -> Traced:
        return self.engine.ask(questions)


def stepped_lab(
    engine: SteppedEngine, placement: str = "least_outstanding", max_num_seqs: int = 16
) -> SteppedLab:
    lanes: list[dict[str, Any]] = [
        {
            "name": lane,
            "strategy": lane,
            "max_num_seqs": max_num_seqs,
            "speculation": {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None,
        }
        for lane, drafts in LANES.items()
    ]
    model = {"name": "tiny", "path": "/nowhere", "max_model_len": 2048}
    replicas = [{"replica": f"{lane}-1", "lane": lane, "engine": "vllm", "url": ""} for lane in LANES]
    config = {"model": model, "lanes": lanes, "scheduler": {"placement": placement}}
    description = {"model": model, "config": config, "replicas": replicas}
    by_strategy = {Strategy(lane): lane for lane in LANES}
    return SteppedLab("http://127.0.0.1:9", description, by_strategy, engine)


def _label(question: Question) -> str:
    """`copy` where the request asks for a copy."""
    text = str(question.body["messages"])
    return "copy" if len(text) > 300 else "story"


def _prompt_tokens(question: Question) -> int:
    return len(str(question.body["messages"])) // 4
