from __future__ import annotations

from typing import Any

import pytest

from loadtest.client.lane_drafts import chooses_drafts
from loadtest.client.traced_lab import TracedAnswer
from loadtest.lesson.envelope import (
    ANSWER_TOKENS,
    MIN_REQUESTS,
    PLACEMENT,
    TEXTS,
    Curve,
    LoadPoint,
    Reckoned,
    best_fixed,
    curve_name,
    envelope,
    largest_loss,
    together,
)
from loadtest.lesson.measure import LeftOutError
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.tracing.events import Phase, StepEvent
from tests.unit.loadtest.lesson.stepped_lab import SteppedEngine, stepped_lab

# A step of 20 ms, and 5 ms a position: drafts that are accepted pay until about 4 positions are there.
MODEL = CostModel(LinearStepTime(0.020, 0.005, 0.000_001), DraftCost(pass_s=0.001, pass_sequence_s=0.000_1))
COPYING, STORY = TEXTS


def quiet(_: str) -> None:
    pass


def engine(**accepted: int) -> SteppedEngine:
    return SteppedEngine(MODEL, {True: accepted.get("copying", 4), False: accepted.get("story", 1)})


def answer(*ended_and_emitted: tuple[int, int], request: str = "a") -> TracedAnswer:
    steps = tuple(
        StepEvent(
            "one", ended_s, (ended_s - 1) * 10**9, ended_s * 10**9, request, Phase.DECODE, 1, 0, 0, emitted
        )
        for ended_s, emitted in ended_and_emitted
    )
    return TracedAnswer(0, 10**12, {}, steps)


def test_only_what_came_while_all_decoded_counts() -> None:
    early = answer((1, 1), (2, 1), (3, 5), (4, 2), (5, 1))
    late = answer((2, 0), (3, 1), (4, 7), (5, 9), (6, 1), (7, 1), request="b")
    # From the first token of the late one, at 3 s, to before the last step of the early one, which ended at 5 s.
    assert together([early, late]) == (9, 1.0)
    assert together([early]) == (8, 3.0)


def test_answers_that_were_never_under_way_together_say_nothing() -> None:
    assert together([answer((1, 1), (2, 1), (3, 1)), answer((2, 1), (3, 1))]) == (0, 0.0)
    assert together([answer((1, 1))]) == (0, 0.0)


def test_what_is_measured_of_an_engine_is_what_it_does() -> None:
    found = envelope(stepped_lab(engine()), quiet)
    by_name = {(curve.text, curve.name): curve for curve in found.curves}
    assert set(by_name) == {
        (text, name) for text in TEXTS for name in ("batched, k = 0", "speculative, k = 4")
    }
    for (text, name), curve in by_name.items():
        assert [point.requests for point in curve.points] == [1, 2, 4, 8, 16]
        drafts, kept = (0, 0) if name.startswith("batched") else (4, 4 if text == COPYING else 1)
        for point in curve.points:
            # Without what context costs, which differs from text to text.
            step_s = MODEL.decode_step_s(point.requests, 0, drafts)
            assert point.tokens_per_s <= point.requests * (1 + kept) / step_s
            assert point.tokens_per_s == pytest.approx(point.requests * (1 + kept) / step_s, rel=0.04)
            assert point.each_tokens_per_s == pytest.approx(point.tokens_per_s / point.requests)


def test_the_reckoned_k_is_the_best_of_the_engine_s_own_cost_model() -> None:
    found = envelope(stepped_lab(engine(copying=4, story=0)), quiet)
    assert isinstance(found.reckoned, Reckoned)
    assert found.reckoned.largest_error < 0.05
    by_text = {
        text: {p.requests: p.num_drafts for p in points} for text, points in found.reckoned.points.items()
    }
    # Every draft is right, so one more always brings more than it costs at few requests; of none is, never.
    assert by_text[COPYING][1] == 4
    assert set(by_text[STORY].values()) == {0}
    for text, points in found.reckoned.points.items():
        edge = {best.requests: best.each_tokens_per_s for best in best_fixed(found.curves, text)}
        for point in points:
            assert point.each_tokens_per_s >= 0.9 * edge[point.requests]


def test_every_choice_gets_the_same_requests_in_turn() -> None:
    own = engine()
    envelope(stepped_lab(own, placement="adaptive"), quiet)
    lanes = ("batched", "speculative", None)
    asked: dict[Any, list[str]] = {lane: [str(q.body) for q in own.asked if q.lane == lane] for lane in lanes}
    assert asked["batched"] == asked["speculative"] == asked[None]
    # 1, 2 and 4 at once until there were four, then 8 and 16 at once.
    assert len(asked["batched"]) == len(TEXTS) * (3 * MIN_REQUESTS + 8 + 16)
    assert len(set(asked["batched"][:MIN_REQUESTS])) == MIN_REQUESTS, "one at once, and another one each time"
    assert {question.output_tokens for question in own.asked} == {ANSWER_TOKENS}
    order = list(dict.fromkeys(question.lane for question in own.asked[: 3 * MIN_REQUESTS]))
    assert order == list(lanes)


def test_adaptive_placement_is_measured_where_the_lab_has_it_and_nothing_is_reckoned() -> None:
    found = envelope(stepped_lab(engine(), placement="adaptive"), quiet)
    assert found.reckoned is None
    assert {curve.name for curve in found.adaptive} == {PLACEMENT}
    assert all(
        point.ran_on == {"batched": max(4, point.requests)} for c in found.adaptive for point in c.points
    )
    plain = [curve.points for curve in found.curves if curve.lane == "batched"]
    assert [[p.tokens_per_s for p in curve.points] for curve in found.adaptive] == [
        pytest.approx([p.tokens_per_s for p in points]) for points in plain
    ]
    # It is compared with the envelope and no part of it.
    assert all(best.name != PLACEMENT for text in TEXTS for best in best_fixed(found.curves, text))


def test_a_lane_that_chooses_k_is_no_fixed_one() -> None:
    table = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]}
    for speculation in ({"method": "adaptive", "num_speculative_tokens": 4}, table):
        lane = {"name": "own", "speculation": speculation}
        assert chooses_drafts(lane)
        assert curve_name(lane) == "own, adaptive k"
        lab = stepped_lab(engine())
        lab.description["config"]["lanes"][1]["speculation"] = speculation
        found = envelope(lab, quiet)
        assert [curve.lane for curve in found.adaptive] == ["speculative"] * len(TEXTS)
        assert found.reckoned is None
    assert curve_name({"name": "plain", "speculation": None}) == "plain, k = 0"


def test_steps_that_say_too_little_leave_the_reckoning_out_and_not_the_picture() -> None:
    found = envelope(stepped_lab(SteppedEngine(MODEL, {True: 4, False: 1}, finds_drafts=False)), quiet)
    assert found.reckoned == (
        "Where an adaptive k would run is not reckoned: no step with drafts was measured, so what drafts cost is "
        "not known."
    )
    assert len(found.curves) == 4


def test_loads_keep_to_what_every_lane_runs_at_once() -> None:
    found = envelope(stepped_lab(engine(), max_num_seqs=5), quiet)
    assert {point.requests for curve in found.curves for point in curve.points} == {1, 2, 4}
    with pytest.raises(LeftOutError, match="2 requests at once"):
        envelope(stepped_lab(engine(), max_num_seqs=1), quiet)


def test_without_a_lane_that_drafts_there_is_no_picture() -> None:
    lab = stepped_lab(engine())
    del lab.lanes[next(strategy for strategy in lab.lanes if strategy == "speculative")]
    with pytest.raises(LeftOutError, match="needs a speculative lane"):
        envelope(lab, quiet)


def curve(name: str, values: dict[int, float], *, is_fixed: bool = True) -> Curve:
    points = tuple(LoadPoint(load, load * each) for load, each in values.items())
    return Curve("text", name, name, is_fixed, points)


def test_best_is_the_highest_of_what_was_measured_there() -> None:
    curves = [
        curve("a", {1: 10, 4: 8}),
        curve("b", {1: 5, 4: 10, 8: 4}),
        curve("c", {1: 99, 4: 99}, is_fixed=False),
    ]
    found = best_fixed(curves, "text")
    assert [(best.requests, best.name, best.each_tokens_per_s) for best in found] == [
        (1, "a", 10), (4, "b", 10), (8, "b", 4),
    ]  # fmt: skip
    assert [best.next_share for best in found] == [0.5, 0.8, None]


def test_a_loss_is_a_share_of_the_envelope_and_below_zero_above_it() -> None:
    curves = [
        curve("a", {1: 10, 4: 8}),
        curve("b", {1: 5, 4: 10}),
        curve("c", {1: 11, 4: 12}, is_fixed=False),
    ]
    worst = largest_loss(curves, "a")
    assert worst.share == pytest.approx(0.2)
    assert worst.requests == 4
    assert largest_loss(curves, "b").share == pytest.approx(0.5)
    assert largest_loss(curves, "c").share == pytest.approx(-0.1)
