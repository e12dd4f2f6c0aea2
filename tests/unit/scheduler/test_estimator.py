"""What is learnt from requests that ended."""

from __future__ import annotations

import pytest

from serving.scheduler import estimator
from serving.scheduler.estimator import DrainRate, LaneEstimator, OutputPredictor


def test_a_lane_expects_nothing_before_it_has_served() -> None:
    lane = LaneEstimator()
    assert (lane.first_token_s, lane.wait_s(0, 4)) == (None, None)


def test_the_wait_is_one_release_for_each_ahead_and_one_more() -> None:
    lane = LaneEstimator()
    lane.ended(held_s=8, first_token_s=None)
    assert lane.wait_s(num_ahead=0, num_slots=4) == 2
    assert lane.wait_s(num_ahead=9, num_slots=4) == 20
    assert lane.wait_s(num_ahead=0, num_slots=0) is None


def test_a_lane_forgets_slowly() -> None:
    lane = LaneEstimator()
    lane.ended(10, 1)
    lane.ended(20, None)
    assert lane.wait_s(0, 1) == pytest.approx(11)
    assert lane.first_token_s == 1, "an end without a first token says nothing of it"
    for _ in range(100):
        lane.ended(20, 3)
    assert lane.wait_s(0, 1) == pytest.approx(20, rel=1e-3)
    assert lane.first_token_s == pytest.approx(3, rel=1e-3)


def test_an_answer_is_predicted_as_its_tenants_mean_within_what_is_allowed() -> None:
    predictor = OutputPredictor()
    assert predictor.predict("a", 50) == 50
    predictor.learn("a", 20)
    predictor.learn("a", 40)
    assert predictor.predict("a", 50) == 22
    assert predictor.predict("a", 5) == 5
    assert predictor.predict("b", 50) == 50, "tenants are not alike"


def test_a_prediction_is_at_least_one_token() -> None:
    predictor = OutputPredictor()
    predictor.learn("a", 0)
    assert predictor.predict("a", 50) == 1


def test_invented_tenants_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "MAX_TENANTS", 2)
    predictor = OutputPredictor()
    for tenant in ("a", "b", "c"):
        predictor.learn(tenant, 7)
    assert [predictor.predict(tenant, 50) for tenant in ("a", "b", "c")] == [50, 7, 7]


def test_drain_rate_is_unknown_until_two_have_ended() -> None:
    rate = DrainRate()
    assert rate.rps(100) is None
    rate.record(100)
    assert rate.rps(101) is None
    rate.record(100)
    assert rate.rps(100) is None, "two ends in one instant say nothing yet"
    assert rate.rps(101) == 2
    rate.record(102)
    assert rate.rps(102) == 1.5, "the last may have ended now"


def test_drain_rate_falls_while_nothing_ends() -> None:
    rate = DrainRate()
    for second in range(10):
        rate.record(second)
    assert rate.rps(10) == 1
    assert rate.rps(20) == 0.5


def test_drain_rate_forgets_what_is_out_of_its_window() -> None:
    rate = DrainRate(window_s=30)
    for tenth in range(10):
        rate.record(tenth / 10)
    for second in (100, 102, 104):
        rate.record(second)
    assert rate.rps(106) == 0.5
    assert rate.rps(130) == 0.1, "the oldest is just within it"
    assert rate.rps(200) is None


def test_drain_rate_holds_a_bounded_number_of_ends() -> None:
    rate = DrainRate(max_ends=4)
    rate.record(0)
    for tenth in range(1, 5):
        rate.record(10 + tenth / 10)
    assert rate.rps(10.5) == pytest.approx(10)
