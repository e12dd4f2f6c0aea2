"""What a lane gives over what its profile says, learnt from requests that ended."""

from __future__ import annotations

import math
import random

import pytest

from serving.core.speculation.estimator import FADE_S
from serving.scheduler.corrections import (
    MEMORY_REQUESTS,
    MIN_STEPS,
    Correction,
    Corrections,
    Promise,
    Stay,
)


def learnt(slowness: float, requests: int, batch: float = 4, now_s: float = 0.0) -> Corrections:
    made = Corrections()
    for _ in range(requests):
        made.learn("a", batch, slowness, now_s)
    return made


def test_nothing_known_is_what_the_profile_says() -> None:
    assert Corrections().factor("a", 4) == 1
    assert list(Corrections().all()) == []


def test_a_few_requests_say_little_and_many_all() -> None:
    factors = [learnt(1.25, requests).factor("a", 4) for requests in (1, 3, 10, 400)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx((3 + 1) / (3 + 1.25))
    assert factors[-1] == pytest.approx(0.8, abs=0.01)


def test_it_is_of_a_lane_and_of_batches_of_about_that_size() -> None:
    made = learnt(2.0, 100, batch=5)
    # What is known of a batch of 4 counts a quarter for twice and half as many, and little for one far away.
    found = [made.factor("a", batch) for batch in (4, 4.4, 6, 8, 16, 64)]
    assert found == sorted(found)
    assert found[0] < 0.55
    assert made.factor("a", 2) == found[3] < 0.65
    assert found[-1] > 0.9
    assert made.factor("b", 64) > 0.9
    assert list(made.all()) == [Correction("a", 4, found[0])]


@pytest.mark.parametrize("slowness", [0.8, 1.25])
def test_half_of_what_others_fall_short_by_is_expected_of_a_lane_that_was_not_asked(slowness: float) -> None:
    made = learnt(slowness, 400)
    assert made.factor("b", 4) == pytest.approx(slowness**-0.5, abs=0.01)
    assert made.factor("b", 1024) == pytest.approx(1, abs=0.01)
    made.learn("a", 4, slowness, 10 * FADE_S)
    assert made.factor("b", 4) == pytest.approx(1, abs=0.01)  # for a long time
    # Once it was, that is no more than its few requests' worth.
    for _ in range(400):
        made.learn("b", 4, 1.0, 10 * FADE_S)
    assert made.factor("b", 4) == pytest.approx(1, abs=0.01)


def test_what_lasts_counts_by_its_mean_time_however_uneven() -> None:
    rng = random.Random(3)
    made = Corrections()
    for _ in range(5_000):
        made.learn("a", 1, rng.choice((0.6, 1.4)), 0.0)
    # As many tokens in the sum of their times; the mean of their rates would say 1.19.
    assert made.factor("a", 1) == pytest.approx(1, abs=0.15)


def test_the_newest_count_most() -> None:
    made = learnt(1.5, 500)
    for _ in range(2 * MEMORY_REQUESTS):
        made.learn("a", 4, 1.0, 0.0)
    assert made.factor("a", 4) > 0.93


def test_one_request_cannot_say_more_than_four_times() -> None:
    assert learnt(1e9, 1).factor("a", 4) == learnt(4.0, 1).factor("a", 4)
    assert learnt(0.0, 1).factor("a", 4) == learnt(0.25, 1).factor("a", 4)


def test_a_lane_that_is_not_asked_has_its_promise_back_in_time() -> None:
    made = learnt(1.5, 500)
    before = made.factor("a", 4)
    found = []
    for parts in (1, 2, 5, 10):
        made.learn("b", 4, 1.0, parts * FADE_S)
        found.append(made.factor("a", 4))
    assert before < found[0] < found[1] < found[2] < found[3]
    assert found[-1] == pytest.approx(1, abs=0.01)
    # And what it says after that is of now.
    made.learn("a", 4, 0.5, 20 * FADE_S)
    assert made.factor("a", 4) == pytest.approx((3 + 1) / (3 + 0.5), abs=0.01)


def at(promise: Promise, now_s: float, step_s: float, batch: float, is_alone: bool = True) -> None:
    promise.add(promise.since(now_s), step_s, batch, is_alone)


def test_a_stay_is_measured_against_what_was_promised_while_it_lasted() -> None:
    promise = Promise()
    at(promise, 10.0, 1.0, 0)
    at(promise, 12.0, 0.02, 1)
    stay = Stay(promise)
    at(promise, 14.0, 0.025, 2)
    at(promise, 15.0, 0.05, 5)
    said = stay.slowness(promise, 50)
    assert said is not None
    batch, slowness = said
    assert batch == pytest.approx((2 * 2 + 1 * 5) / 3)
    assert slowness == pytest.approx((2 * 40 + 1 * 20) / 50)


@pytest.mark.parametrize(
    ("steps", "shared_s", "another", "says"),
    [
        (50, 0.0, False, True),
        (MIN_STEPS - 1, 0.0, False, False),  # mostly its prompt
        (50, 0.15, False, True),
        (50, 0.5, False, False),  # it had half of the machine for a while
        (50, 0.0, True, False),  # the replica has come anew
    ],
)
def test_which_stays_say_something(steps: int, shared_s: float, another: bool, says: bool) -> None:
    promise = Promise()
    at(promise, 0.0, 1.0, 0)
    stay = Stay(promise)
    at(promise, 2.0 - shared_s, 0.04, 1)
    at(promise, 2.0, 0.04, 1, is_alone=False)
    now = promise
    if another:
        now = Promise()
        at(now, 0.0, 1.0, 0)
        at(now, 2.0, 0.04, 1)
    assert (stay.slowness(now, steps) is not None) == says


def test_a_promise_begins_when_the_replica_is_first_looked_at() -> None:
    promise = Promise()
    assert promise.since(5.0) == 0
    assert promise.since(7.0) == 2
    assert promise.since(6.0) == 0  # a clock that steps back promises nothing
    assert math.isfinite(promise.at_s)
