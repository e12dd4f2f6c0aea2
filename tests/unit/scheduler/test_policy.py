"""Who may run where, and where they do."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serving.core.lane import Strategy
from serving.scheduler.policy import ReplicaLoad, least_outstanding, may_serve
from serving.scheduler.queue import Line
from tests.unit.scheduler.examples import replica

PLAIN = replica("p", "batched")
DRAFTING = replica("d", "speculative", Strategy.SPECULATIVE)
CLOSED = replica("c", "sequential", Strategy.SEQUENTIAL, takes_unpinned=False)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        (Line(None, needs_plain_decoding=False), {"p", "d"}),
        (Line(None, needs_plain_decoding=True), {"p"}),
        (Line("sequential", needs_plain_decoding=False), {"c"}),
        (Line("sequential", needs_plain_decoding=True), {"c"}),
        # Pinned is the client's word, even where the engine will refuse.
        (Line("speculative", needs_plain_decoding=True), {"d"}),
        (Line("elsewhere", needs_plain_decoding=False), set()),
    ],
)
def test_may_serve(line: Line, allowed: set[str]) -> None:
    assert {info.replica_id for info in (PLAIN, DRAFTING, CLOSED) if may_serve(info, line)} == allowed


def test_fewest_outstanding_tokens_wins_over_fewest_requests() -> None:
    many_small = ReplicaLoad(replica("a"), running=5, outstanding_tokens=50)
    one_big = ReplicaLoad(replica("b"), running=1, outstanding_tokens=2000)
    assert least_outstanding([one_big, many_small], random.Random(0)) is many_small


def test_ties_reach_every_equal_replica_about_equally_and_no_other() -> None:
    equals = [ReplicaLoad(replica(name), 0, 7) for name in "abcd"]
    busier = ReplicaLoad(replica("z"), 0, 8)
    rng = random.Random(1)
    drawn = Counter(least_outstanding([*equals, busier], rng).info.replica_id for _ in range(400))
    assert drawn.keys() == set("abcd")
    assert min(drawn.values()) > 60


def test_ties_repeat_with_the_seed() -> None:
    equals = [ReplicaLoad(replica(name), 0, 0) for name in "abcd"]

    def draws(seed: int) -> list[str]:
        rng = random.Random(seed)
        return [least_outstanding(equals, rng).info.replica_id for _ in range(20)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        least_outstanding([], random.Random(0))


def test_room_ends_at_max_running() -> None:
    info = replica("a", max_running=2)
    assert ReplicaLoad(info, 1, 0).has_room
    assert not ReplicaLoad(info, 2, 0).has_room
    assert not ReplicaLoad(info, 3, 0).has_room, "adopted leases may exceed the bound"
