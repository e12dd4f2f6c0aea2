"""The order of measurements, and the time they take, are told before they begin."""

from __future__ import annotations

from dataclasses import replace

from serving.benchmarks.gateway.measure import Plan, rotated
from serving.benchmarks.gateway.peers import Peer

PEERS = [Peer(name, "", ()) for name in "abc"]
PLAN = Plan([1, 64], 3, 3, 8, 0, 0)


def test_each_repeat_begins_with_another_peer_and_has_all() -> None:
    orders = [[peer.name for peer in rotated(PEERS, by)] for by in range(4)]
    assert orders == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_the_time_grows_with_all_that_is_asked_for() -> None:
    lasts_s = PLAN.lasts_s(2)
    assert lasts_s > 2 * 3 * 2 * (3 + 8)
    assert PLAN.lasts_s(4) == 2 * lasts_s
    assert replace(PLAN, repeats=6).lasts_s(2) == 2 * lasts_s
    for more in (replace(PLAN, window_s=9), replace(PLAN, levels=[1, 2, 3]), replace(PLAN, idle_streams=1)):
        assert more.lasts_s(2) > lasts_s
    assert PLAN.at_most_s(2) > lasts_s
