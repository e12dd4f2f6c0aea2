"""The ready replicas, and who of them has room."""

from __future__ import annotations

from dataclasses import replace

from serving.core.request import Lease
from serving.scheduler.fleet import NOTHING_KEPT, Fleet, Kept
from serving.scheduler.ledger import Ledger
from serving.scheduler.queue import Eligibility
from tests.unit.scheduler.examples import replica

ANY = Eligibility(None, needs_plain_decoding=False, band=0)
LOW = Eligibility(None, needs_plain_decoding=False, band=2)


class Yard:
    """A fleet and its ledger."""

    def __init__(self, *reserved_shares: float) -> None:
        self.ledger = Ledger()
        self.fleet = Fleet(
            self.ledger,
            breaker_failures=2,
            breaker_cooldown_s=5,
            reserved_shares=list(reserved_shares) or [0.0, 0.0, 0.0],
        )

    def with_room(
        self, eligibility: Eligibility = ANY, now_s: float = 0.0, kept: Kept = NOTHING_KEPT
    ) -> set[str]:
        named = {one.info.replica_id for one in self.fleet.with_room(eligibility, now_s, kept)}
        assert self.fleet.has_room(eligibility, now_s, kept) == bool(named)
        return named


def test_room_ends_at_max_running() -> None:
    yard = Yard()
    yard.fleet.join(replica("r", max_running=2))
    for number in range(2):
        assert yard.with_room() == {"r"}
        yard.ledger.acquire(Lease(str(number), "r", 1))
    assert yard.with_room() == set()
    yard.ledger.acquire(Lease("adopted", "r", 1))
    yard.ledger.release("0")
    assert yard.with_room() == set(), "adopted leases may exceed the bound"


def test_slots_are_reserved_for_higher_bands() -> None:
    yard = Yard(0.25, 0.25, 0.0)
    yard.fleet.join(replica("r", max_running=8))
    limits = []
    for band in range(3):
        places = yard.fleet.places(Eligibility(None, needs_plain_decoding=False, band=band))
        limits.append((places.limits, places.num_slots))
    assert limits == [((8,), 8), ((6,), 6), ((4,), 4)]
    for number in range(4):
        yard.ledger.acquire(Lease(str(number), "r", 1))
    assert yard.with_room(LOW) == set()
    assert yard.with_room(ANY) == {"r"}


def test_a_replica_with_one_slot_reserves_none() -> None:
    yard = Yard(0.9, 0.0, 0.0)
    yard.fleet.join(replica("r", max_running=1))
    assert yard.with_room(LOW) == {"r"}


def test_who_may_serve_follows_every_change_of_the_fleet() -> None:
    yard = Yard()
    assert yard.with_room() == set()
    yard.fleet.join(replica("a"))
    assert yard.with_room() == {"a"}
    yard.fleet.join(replica("b"))
    assert yard.with_room() == {"a", "b"}
    yard.fleet.leave("a")
    assert yard.with_room() == {"b"}
    yard.fleet.join(replica("b", "elsewhere", takes_unpinned=False))
    assert yard.with_room() == set()


def test_an_open_breaker_leaves_no_room() -> None:
    yard = Yard()
    yard.fleet.join(replica("a", max_running=9))
    found = yard.fleet.get("a")
    assert found is not None
    found.breaker.failed("x", 0)
    found.breaker.failed("y", 0)
    assert yard.with_room(now_s=4) == set()
    assert yard.with_room(now_s=5) == {"a"}
    found.breaker.sent("probe")
    assert yard.with_room(now_s=5) == set()


def test_a_kept_replica_has_no_room_for_others() -> None:
    yard = Yard()
    yard.fleet.join(replica("a", max_running=2))
    kept = Kept()
    wide = Eligibility(None, needs_plain_decoding=False, band=0, num_sequences=2)
    yard.ledger.acquire(Lease("x", "a", 1))
    yard.fleet.keep_for(wide, 0.0, kept)
    assert yard.with_room(kept=kept) == set()
    assert yard.with_room() == {"a"}
    assert yard.with_room(wide) == set()


def test_a_replica_that_only_connects_anew_keeps_its_record() -> None:
    yard = Yard()
    yard.fleet.join(replica("a"))
    before = yard.fleet.get("a")
    assert before is not None
    before.breaker.failed("x", 0)
    yard.fleet.join(replica("a"))
    after = yard.fleet.get("a")
    assert after is not None
    assert after.breaker.failures == 1


def test_a_replica_that_was_gone_comes_back_with_a_clean_record_and_its_load() -> None:
    yard = Yard()
    yard.fleet.join(replica("a"))
    before = yard.fleet.get("a")
    assert before is not None
    before.breaker.failed("x", 0)
    yard.ledger.acquire(Lease("held", "a", 30))
    yard.fleet.leave("a")
    yard.fleet.join(replica("a"))
    after = yard.fleet.get("a")
    assert after is not None
    assert (after.breaker.failures, after.load.running, after.load.outstanding_tokens) == (0, 1, 30)


def test_the_books_of_an_idle_replica_are_closed_when_it_leaves() -> None:
    yard = Yard()
    yard.fleet.join(replica("a"))
    books = yard.ledger.load("a")
    yard.fleet.leave("a")
    assert yard.ledger.load("a") is not books


def test_a_wide_request_may_run_where_it_takes_all_slots_and_not_where_it_lacks_some() -> None:
    yard = Yard()
    for name, max_running in (("narrow", 3), ("exact", 4), ("wide", 8)):
        yard.fleet.join(replica(name, max_running=max_running))
    assert yard.fleet.places(replace(ANY, num_sequences=4)).limits == (4, 8)
    assert yard.fleet.places(replace(ANY, num_sequences=9)).limits == (3, 4, 8), "none is wide enough"


def test_a_replica_to_avoid_is_out_of_the_question_while_there_is_another() -> None:
    yard = Yard()
    avoids = Eligibility(None, needs_plain_decoding=False, band=0, avoid_replica="a")
    yard.fleet.join(replica("a"))
    assert yard.with_room(avoids) == {"a"}, "alone, it gets a second chance"
    yard.fleet.join(replica("b"))
    assert yard.with_room(avoids) == {"b"}
    yard.ledger.acquire(Lease("x", "b", 1))
    assert yard.with_room(avoids) == set(), "better wait than break on the same one again"


def test_the_emptiest_replica_that_may_be_used_is_kept_and_for_one_request_only() -> None:
    yard, wide, kept = Yard(), replace(ANY, num_sequences=4), Kept()
    for name, num_taken in (("distrusted", 0), ("half", 2), ("emptiest", 1), ("full", 4)):
        yard.fleet.join(replica(name, max_running=4))
        if num_taken:
            yard.ledger.acquire(Lease(name, name, 1, num_sequences=num_taken))
    distrusted = yard.fleet.get("distrusted")
    assert distrusted is not None
    distrusted.breaker.failed("x", 0, is_dead=True)
    yard.fleet.keep_for(wide, 1, kept)
    assert (kept.replicas, kept.waiting) == ({"emptiest"}, {wide, replace(wide, is_patient=False)})
    assert yard.fleet.has_slot(ANY, 1, kept)
    assert not yard.fleet.has_slot(wide, 1, kept), "it waits, and is not asked again"
    yard.fleet.keep_for(replace(wide, band=1), 1, kept)
    assert kept.replicas == {"emptiest", "half"}
    assert not yard.fleet.has_slot(ANY, 1, kept)
