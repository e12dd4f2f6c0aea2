"""Leases and the load they stand for."""

from __future__ import annotations

import pytest

from serving.core.errors import LeaseError
from serving.core.request import Lease
from serving.scheduler.ledger import Ledger, Load


def test_load_is_kept_by_replica() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    ledger.acquire(Lease("b", "r1", 20))
    ledger.acquire(Lease("c", "r2", 5))
    assert ledger.load("r1") == Load(2, 30, 2)
    assert ledger.load("r2") == Load(1, 5, 1)
    assert [lease.request_id for lease in ledger.leases()] == ["a", "b", "c"]


def test_release_gives_back_that_lease_and_no_other() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    ledger.acquire(Lease("b", "r1", 20))
    assert ledger.release("a") == Lease("a", "r1", 10)
    assert ledger.load("r1") == Load(1, 20, 1)
    assert "a" not in ledger
    assert "b" in ledger


def test_double_release_is_an_error_and_changes_nothing() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    ledger.acquire(Lease("b", "r1", 20))
    ledger.release("a")
    with pytest.raises(LeaseError, match="'a' holds no lease"):
        ledger.release("a")
    assert (len(ledger), ledger.load("r1")) == (1, Load(1, 20, 1))


def test_a_second_lease_for_one_request_is_an_error_and_changes_nothing() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    with pytest.raises(LeaseError, match="'a' holds a lease already"):
        ledger.acquire(Lease("a", "r2", 99))
    assert (ledger.load("r1"), ledger.load("r2")) == (Load(1, 10, 1), Load(0, 0))


def test_an_unknown_replica_bears_no_load() -> None:
    assert Ledger().load("?") == Load(0, 0)


def test_a_load_is_a_view_that_follows_later_leases() -> None:
    ledger = Ledger()
    load = ledger.load("r1")
    ledger.acquire(Lease("a", "r1", 10))
    assert load == Load(1, 10, 1)


def test_a_forgotten_replica_keeps_its_books_while_leases_live() -> None:
    ledger = Ledger()
    before = ledger.load("r1")
    ledger.acquire(Lease("a", "r1", 10))
    ledger.forget("r1")
    assert ledger.load("r1") is before
    ledger.release("a")
    ledger.forget("r1")
    ledger.forget("r1")
    assert ledger.load("r1") is not before


def test_a_lease_takes_a_slot_for_each_of_its_sequences() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10, num_sequences=4))
    ledger.acquire(Lease("b", "r1", 10))
    assert ledger.load("r1") == Load(2, 20, 5)
    ledger.release("a")
    assert ledger.load("r1") == Load(1, 10, 1)
