from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.by_hand.shares import Shares

WORKERS = ("a", "b", "c")


def test_who_is_gone_holds_up_nobody_and_who_comes_back_is_waited_for() -> None:
    shares = Shares({"a": 4, "b": 3})
    assert shares.look({"a", "b"}) == ({}, {})
    assert shares.look({"a"}) == ({"b": 3}, {})
    assert shares.look({"a"}) == ({}, {}), "a loss is told once"
    assert shares.look({"a", "b"}) == ({}, {"b": 3})
    shares.done("a")
    assert not shares.is_over
    assert shares.look(set()) == ({"b": 3}, {})
    assert (shares.is_over, shares.lost, shares.total) == (True, {"b": 3}, 7)


def test_a_share_that_is_done_cannot_be_lost() -> None:
    shares = Shares({"a": 4, "b": 3})
    shares.done("a")
    assert shares.look({"b"}) == ({}, {})
    shares.look({"a"})
    shares.done("b")  # it was only silent for a while
    assert (shares.is_over, shares.lost) == (True, {})


@given(st.lists(st.one_of(st.sampled_from(WORKERS), st.sets(st.sampled_from(WORKERS)))))
def test_a_share_is_waited_for_or_lost_or_done(events: list[str | set[str]]) -> None:
    """Whatever comes and goes, a worker that is there with its share undone keeps the test going."""
    shares, finished, present = Shares(dict.fromkeys(WORKERS, 1)), set[str](), set(WORKERS)
    for event in events:
        if isinstance(event, str):
            shares.done(event)
            finished.add(event)
        else:
            shares.look(event)
            present = event
    shares.look(present)
    assert shares.lost.keys() == set(WORKERS) - finished - present
    assert shares.is_over == (not (present - finished))
