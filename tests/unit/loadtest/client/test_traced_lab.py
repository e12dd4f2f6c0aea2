from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from loadtest.client.lab import LabError
from loadtest.client.traced_lab import Question, TracedLabError, find_lab
from serving.core.lane import Strategy
from tests.unit.loadtest.lesson.scripted_lab import ScriptedLab, scripted_lab


@pytest.fixture
def lab() -> Iterator[ScriptedLab]:
    with scripted_lab(ScriptedLab()) as served:
        yield served


def questions(count: int, lane: str = "batched-lane") -> list[Question]:
    return [Question(lane, {"prompt": f"number {number}"}, 2 + number) for number in range(count)]


def test_a_lane_for_each_strategy_that_has_a_replica(lab: ScriptedLab) -> None:
    lab.strategies = tuple(Strategy)
    assert find_lab(f"{lab.url}/").lanes == {strategy: f"{strategy}-lane" for strategy in Strategy}
    lab.strategies = ("batched",)
    assert find_lab(lab.url).lanes == {Strategy.BATCHED: "batched-lane"}


def test_a_lane_of_another_model_is_none_of_them_and_is_asked_by_its_own_name(lab: ScriptedLab) -> None:
    lab.models = {"speculative": {"name": "tuned", "path": "/tuned"}}
    found = find_lab(lab.url)
    assert set(found.lanes) == {Strategy.SEQUENTIAL, Strategy.BATCHED}
    found.ask(questions(1, "speculative-lane"))
    assert {body["model"] for body in lab.asked} == {"tuned:speculative-lane"}


def test_a_busy_lab_is_refused(lab: ScriptedLab) -> None:
    lab.leases = 2
    with pytest.raises(TracedLabError, match="2 requests running or waiting"):
        find_lab(lab.url)


def test_a_lab_that_others_use_meanwhile_is_refused(
    lab: ScriptedLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadtest.client.traced_lab.FREED_WITHIN_S", 0.0)
    found = find_lab(lab.url)
    lab.leases = 3
    with pytest.raises(TracedLabError, match="3 requests running or waiting; measuring needs the lab alone"):
        found.ask(questions(1))
    assert not lab.asked


def test_steps_of_others_among_the_recorded_ones_are_refused(lab: ScriptedLab) -> None:
    lab.others = 2
    with pytest.raises(
        TracedLabError, match="steps of 2 requests of others were recorded, such as other-0; measuring"
    ):
        find_lab(lab.url).ask(questions(3))


def test_a_step_that_was_scheduled_ahead_before_the_recording_is_nobody_s(lab: ScriptedLab) -> None:
    lab.others, lab.others_emit = 1, 0
    assert len(find_lab(lab.url).ask(questions(2)).answers) == 2


def test_no_lab_there() -> None:
    with pytest.raises(LabError, match=r"127\.0\.0\.1:1/lab"):
        find_lab("http://127.0.0.1:1")


def test_answers_come_in_the_order_of_their_questions_with_their_own_steps(lab: ScriptedLab) -> None:
    traced = find_lab(lab.url).ask(questions(8))
    made = [sum(event.emitted_tokens for event in answer.steps) for answer in traced.answers]
    assert made == [2, 3, 4, 5, 6, 7, 8, 9]
    assert len(traced.steps) == sum(made)
    ids = [{event.request_id for event in answer.steps} for answer in traced.answers]
    assert all(len(each) == 1 for each in ids)
    assert len(set.union(*ids)) == 8


def test_an_answer_ends_with_its_last_token_whatever_was_scheduled_ahead(lab: ScriptedLab) -> None:
    lab.schedules_ahead = True
    traced = find_lab(lab.url).ask(questions(2))
    assert [len(answer.steps) for answer in traced.answers] == [2, 3]
    assert len(traced.steps) == 7


def test_requests_are_pinned_exact_in_length_and_share_no_cached_prefix(lab: ScriptedLab) -> None:
    find_lab(lab.url).ask([*questions(2), Question("batched-lane", {"messages": []}, 5)])
    assert {body["model"] for body in lab.asked} == {"tiny:batched-lane"}
    assert all(body["min_tokens"] == body["max_tokens"] for body in lab.asked)
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in lab.asked)
    assert len({body["cache_salt"] for body in lab.asked}) == 3
    assert sorted(body["path"] for body in lab.asked) == [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/completions",
    ]


def test_a_streamed_answer_must_be_whole(lab: ScriptedLab) -> None:
    streamed = [replace(question, is_streamed=True) for question in questions(2)]
    assert [len(answer.steps) for answer in find_lab(lab.url).ask(streamed).answers] == [2, 3]
    assert all(body["stream"] is True for body in lab.asked)
    lab.cuts_streams = True
    with pytest.raises(TracedLabError, match=r"ends in .* and not in b'data: \[DONE\]'"):
        find_lab(lab.url).ask(streamed)


def test_only_the_lanes_asked_are_recorded_and_every_recording_ends(lab: ScriptedLab) -> None:
    find_lab(lab.url).ask(questions(1))
    assert lab.started == lab.stopped == ["batched"]


def test_a_refused_request_ends_the_recording_and_says_what_the_lab_said(lab: ScriptedLab) -> None:
    lab.refuses = 503
    with pytest.raises(TracedLabError, match=r'answered 503: \{"error": "no"\}'):
        find_lab(lab.url).ask(questions(2))
    assert lab.started == lab.stopped == ["batched"]


def test_lost_steps_are_no_result(lab: ScriptedLab) -> None:
    lab.lost_events = 3
    with pytest.raises(TracedLabError, match="replica batched-1: 3 step events did not fit"):
        find_lab(lab.url).ask(questions(1))


@pytest.mark.parametrize("offset_ns", [-60 * 10**9, 60 * 10**9])
def test_the_clock_of_another_machine_is_noticed(lab: ScriptedLab, offset_ns: int) -> None:
    lab.clock_offset_ns = offset_ns
    with pytest.raises(TracedLabError, match="on the lab's machine"):
        find_lab(lab.url).ask(questions(1))
