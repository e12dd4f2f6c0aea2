"""When a replica is left alone, and how it is tried again."""

from __future__ import annotations

from serving.scheduler.breaker import Breaker, BreakerState


def opened(at_s: float = 0.0) -> Breaker:
    """A breaker that three failures opened; it cools down in 5 s."""
    breaker = Breaker(max_failures=3, cooldown_s=5)
    for name in ("x", "y", "z"):
        breaker.failed(name, at_s)
    return breaker


def probing() -> Breaker:
    """Half open since 5 s, with its probe on the way."""
    breaker = opened()
    breaker.sent("probe")
    return breaker


def test_failures_in_a_row_open_it_and_not_one_before() -> None:
    breaker = Breaker(max_failures=3, cooldown_s=5)
    breaker.failed("a", 0)
    breaker.failed("b", 0)
    assert breaker.lets_through(0)
    breaker.failed("c", 0)
    assert breaker.state(0) is BreakerState.OPEN
    assert not breaker.lets_through(4.9)


def test_a_dead_replica_opens_it_at_once() -> None:
    breaker = Breaker(max_failures=3, cooldown_s=5)
    breaker.failed("a", 0, is_dead=True)
    assert not breaker.lets_through(4.9)


def test_a_success_between_failures_begins_the_row_anew() -> None:
    breaker = Breaker(max_failures=2, cooldown_s=5)
    breaker.failed("a", 0)
    breaker.succeeded("b")
    breaker.failed("c", 0)
    assert breaker.state(0) is BreakerState.CLOSED


def test_who_left_says_nothing_either_way() -> None:
    breaker = Breaker(max_failures=2, cooldown_s=5)
    breaker.failed("a", 0)
    breaker.untold("b")
    assert breaker.failures == 1
    breaker.failed("c", 0)
    assert breaker.state(0) is BreakerState.OPEN


def test_after_the_cooldown_exactly_one_probe_goes_through() -> None:
    breaker = opened()
    assert breaker.state(5) is BreakerState.HALF_OPEN
    assert breaker.lets_through(5)
    breaker.sent("probe")
    assert not breaker.lets_through(5)
    assert not breaker.lets_through(500), "however long the probe takes"


def test_a_probe_that_succeeds_closes_it() -> None:
    breaker = probing()
    breaker.succeeded("probe")
    assert breaker.state(5) is BreakerState.CLOSED
    assert breaker.failures == 0


def test_a_probe_that_fails_opens_it_again_for_a_whole_cooldown() -> None:
    breaker = probing()
    breaker.failed("probe", 7)
    assert breaker.state(11.9) is BreakerState.OPEN
    assert breaker.lets_through(12)


def test_a_probe_whose_client_left_may_be_tried_again_at_once() -> None:
    breaker = probing()
    breaker.untold("probe")
    assert breaker.state(5) is BreakerState.HALF_OPEN
    assert breaker.lets_through(5)


def test_requests_from_before_it_opened_are_neither_probes_nor_proof() -> None:
    breaker = probing()
    breaker.untold("old")
    breaker.succeeded("older")
    breaker.failed("oldest", 100)
    assert breaker.probe == "probe"
    assert breaker.state(5) is BreakerState.HALF_OPEN
    assert not breaker.lets_through(200), "there is never a second probe beside the first"
