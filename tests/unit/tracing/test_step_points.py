from __future__ import annotations

import random

import pytest

from serving.calibration.fit import StepPoint, fit_draft_cost, fit_linear
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.tracing.events import Phase, StepEvent
from serving.tracing.step_points import draft_outcome, draft_share, step_points

STEP = LinearStepTime(0.020, 0.001, 2e-6)
DRAFT = DraftCost(pass_s=0.001, pass_sequence_s=0.0002)


def event(
    step: int,
    request_id: str,
    scheduled: int,
    *,
    drafted: int = 0,
    accepted: int = 0,
    phase: Phase = Phase.DECODE,
    replica: str = "r1",
    emitted: int | None = None,
    took_ms: int = 30,
) -> StepEvent:
    began_ns = step * 1_000_000_000
    made = (1 + accepted if phase is Phase.DECODE else 0) if emitted is None else emitted
    ended_ns = began_ns + took_ms * 1_000_000
    return StepEvent(replica, step, began_ns, ended_ns, request_id, phase, scheduled, drafted, accepted, made)


def test_a_step_is_all_that_its_requests_compute_and_hold() -> None:
    events = [
        event(1, "a", 40, phase=Phase.PREFILL),
        event(2, "a", 10, phase=Phase.PREFILL, emitted=1),
        event(3, "a", 4, drafted=3, accepted=1),
        event(3, "b", 20, phase=Phase.PREFILL, emitted=1, took_ms=30),
        event(4, "a", 1),
        event(4, "b", 3, drafted=2, accepted=2),
        event(1, "z", 7, phase=Phase.PREFILL, replica="r2", took_ms=50),
    ]
    assert step_points(events) == [
        StepPoint(40, 0, 0.030, prompt_tokens=40),
        StepPoint(10, 40, 0.030, prompt_tokens=10),
        StepPoint(24, 50, 0.030, 3, 1, prompt_tokens=20),
        # Of the four positions two were refused.
        StepPoint(4, 52 + 20, 0.030, 2, 1),
        StepPoint(7, 0, 0.050, prompt_tokens=7),
    ]


def test_one_that_was_preempted_begins_anew() -> None:
    events = [
        event(1, "a", 40, phase=Phase.PREFILL, emitted=1),
        event(2, "a", 1),
        event(4, "a", 30, phase=Phase.PREFILL),
        event(5, "a", 12, phase=Phase.PREFILL, emitted=1),
        event(6, "a", 1),
    ]
    assert [point.kv_tokens for point in step_points(events)] == [0, 40, 0, 30, 42]


def test_steps_of_one_phase_alone() -> None:
    events = [
        event(1, "a", 40, phase=Phase.PREFILL, emitted=1),
        event(2, "a", 1),
        event(2, "b", 20, phase=Phase.PREFILL, emitted=1),
        event(3, "a", 1),
        event(3, "b", 1),
    ]
    assert step_points(events, Phase.DECODE) == [StepPoint(2, 41 + 20, 0.030)]
    assert step_points(events, Phase.PREFILL) == [StepPoint(40, 0, 0.030, prompt_tokens=40)]


def test_steps_with_a_request_from_before_the_recording_are_left_out() -> None:
    events = [event(5, "old", 1), event(5, "new", 30, phase=Phase.PREFILL), event(6, "new", 1)]
    assert step_points(events) == [StepPoint(1, 30, 0.030)]


def test_drafts_by_position_and_how_often_there_are_some() -> None:
    events = [
        event(1, "a", 30, phase=Phase.PREFILL, emitted=1),
        event(2, "a", 5, drafted=4, accepted=4),
        event(3, "a", 5, drafted=4, accepted=1),
        event(4, "a", 1),
        event(5, "a", 3, drafted=2, accepted=0),
        event(6, "a", 1, emitted=0),  # scheduled ahead, beyond the end
    ]
    outcome = draft_outcome(events, 4)
    assert outcome.num_drafts == 4
    assert outcome.accepted == (2, 1, 1, 1)
    assert draft_share(events, 4) == pytest.approx(10 / 16)
    assert draft_share(events[:1], 4) is None
    assert draft_outcome(events[:1], 4).num_drafts == 0


def test_what_a_speculation_engine_does_is_fitted_from_its_steps() -> None:
    """An engine that decodes by known times, with and without drafts, as a recording has it."""
    rng = random.Random(3)
    events: list[StepEvent] = []
    held: dict[str, int] = {}
    for step in range(1, 400):
        k = 3 if step > 150 else 0
        batch = rng.randint(1, 12)
        names = [f"{step // 40}-{number}" for number in range(batch)]
        rows = []
        for name in names:
            if name not in held:
                rows.append((name, rng.choice([20, 200, 600]), Phase.PREFILL, 0, 0))
            else:
                rows.append((name, 1 + k, Phase.DECODE, k, rng.randint(0, k)))
        tokens = sum(row[1] for row in rows)
        drafting = sum(bool(row[3]) for row in rows)
        seconds = STEP.step_s(tokens, sum(held.get(name, 0) for name in names)) + DRAFT.draft_s(k, drafting)
        for name, scheduled, phase, drafted, accepted in rows:
            events.append(
                StepEvent(
                    "r1",
                    step,
                    0,
                    round(seconds * 1e9),
                    name,
                    phase,
                    scheduled,
                    drafted,
                    accepted,
                    1 + accepted,
                )
            )
            held[name] = held.get(name, 0) + scheduled - (drafted - accepted)
    points = step_points(events)
    assert len(points) == 399
    linear = fit_linear(points).form
    assert linear.fixed_s == pytest.approx(STEP.fixed_s, rel=1e-3)
    assert linear.token_s == pytest.approx(STEP.token_s, rel=1e-3)
    assert linear.kv_token_s == pytest.approx(STEP.kv_token_s, rel=1e-3)
    drafts = fit_draft_cost(points, linear).form
    assert drafts.draft_s(3, 8) == pytest.approx(DRAFT.draft_s(3, 8), rel=1e-2)
