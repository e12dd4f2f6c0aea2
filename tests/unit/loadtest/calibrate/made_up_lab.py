"""A lab whose steps take exactly what a step time says, so that a calibration must find it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from loadtest.client.traced_lab import Question, Traced, TracedAnswer, TracedLab
from serving.core.lane import DRAFTING, Strategy
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.tracing.events import Phase, StepEvent

STEP_TIME = LinearStepTime(fixed_s=0.02, token_s=0.0005, kv_token_s=1e-6)
DRAFT_COST = DraftCost(pass_s=0.001)
NUM_DRAFTS = 3
ACCEPTED = (3, 1, 0, 2)  # of the drafts of each sequence, in turn
RATES = (0.75, 0.5, 0.25)
MAX_RUNNING = 16
BEFORE_S, AFTER_S = 0.012, 0.003  # of each request, outside of its steps
_REQUESTS, _STEPS = count(), count(1)  # of all that is ever asked


@dataclass(frozen=True, slots=True)
class MadeUpLab(TracedLab):
    """All requests of a question are in each step until they end: prompts first, in one step."""

    def ask(self, questions: Sequence[Question]) -> Traced:
        events: list[StepEvent] = []
        held = {f"r{next(_REQUESTS)}": 0 for _ in questions}
        made = dict.fromkeys(held, 0)
        turn = dict.fromkeys(held, 0)
        now_ns = round(1e9 * BEFORE_S)
        (lane,) = {each.lane for each in questions}
        drafts = NUM_DRAFTS if lane in DRAFTING else 0
        for step in _STEPS:
            going = {
                name: each
                for name, each in zip(held, questions, strict=True)
                if made[name] < each.output_tokens
            }
            if not going:
                return Traced(tuple(_answer(name, events) for name in held), tuple(events))
            sizes = {name: 1 + drafts if held[name] else _prompt_tokens(each) for name, each in going.items()}
            decoding = sum(bool(held[name]) for name in going)
            step_s = STEP_TIME.step_s(sum(sizes.values()), sum(held[name] for name in going))
            if drafts and decoding:
                step_s += DRAFT_COST.draft_s(drafts, decoding)
            ended_ns = now_ns + round(1e9 * step_s)
            for name, each in going.items():
                is_decode = held[name] > 0
                accepted = ACCEPTED[turn[name] % len(ACCEPTED)] if is_decode and drafts else 0
                turn[name] += is_decode
                emitted = min(1 + accepted, each.output_tokens - made[name])
                events.append(
                    StepEvent(
                        f"{lane}-1",
                        step,
                        now_ns,
                        ended_ns,
                        name,
                        Phase.DECODE if is_decode else Phase.PREFILL,
                        sizes[name],
                        drafts if is_decode else 0,
                        accepted,
                        emitted,
                    )
                )
                held[name] += 1 + accepted if is_decode else sizes[name]
                made[name] += emitted
            now_ns = ended_ns
        raise AssertionError("count() does not end")


def _answer(name: str, events: Sequence[StepEvent]) -> TracedAnswer:
    own = tuple(event for event in events if event.request_id == name)
    return TracedAnswer(0, own[-1].ended_ns + round(1e9 * AFTER_S), {}, own)


def _prompt_tokens(question: Question) -> int:
    text = question.body.get("prompt") or question.body["messages"][0]["content"]
    return len(str(text).split())


def made_up_lab(*, replicas: int = 1, lanes: Sequence[str] = ("batched", "speculative")) -> MadeUpLab:
    configs: list[dict[str, Any]] = [
        {"name": lane, "strategy": lane, "max_num_seqs": MAX_RUNNING} for lane in lanes
    ]
    for config in configs:
        if config["strategy"] == Strategy.SPECULATIVE:
            config["speculation"] = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
        if config["strategy"] == Strategy.ITERATIVE:
            config["refinement"] = {"num_speculative_tokens": NUM_DRAFTS}
    description = {
        "model": {"name": "tiny", "max_model_len": 2048},
        "config": {"model": {"name": "tiny", "path": "/tiny"}, "lanes": configs},
        "replicas": [
            {"lane": lane, "engine": "vllm", "replica": f"{lane}-{n}"}
            for lane in lanes
            for n in range(replicas)
        ],
    }
    return MadeUpLab("http://127.0.0.1:1", description, {Strategy(lane): lane for lane in lanes})
