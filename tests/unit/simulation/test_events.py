from __future__ import annotations

import pytest

from serving.simulation.events import EventLoop


def test_events_run_by_instant_then_in_the_order_they_were_asked_for() -> None:
    loop, seen = EventLoop(), []
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        loop.at(at_s, lambda name=name: seen.append((loop.now_s, name)))  # type: ignore[misc]
    loop.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_an_event_may_ask_for_another_of_the_same_instant() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, lambda: loop.at(1.0, lambda: seen.append(loop.now_s)))
    loop.run()
    assert seen == [1.0]


def test_the_past_is_refused() -> None:
    loop = EventLoop()
    loop.at(2.0, lambda: loop.at(1.5, lambda: None))
    with pytest.raises(ValueError, match=r"at_s=1\.5 has passed: it is 2\.0 s"):
        loop.run()
