"""Leases and the load they stand for."""

from __future__ import annotations

import pytest

from serving.core.errors import LeaseError
from serving.scheduler.ledger import Lease, Ledger


def test_load_is_kept_by_replica() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    ledger.acquire(Lease("b", "r1", 20))
    ledger.acquire(Lease("c", "r2", 5))
    assert (ledger.running("r1"), ledger.outstanding_tokens("r1")) == (2, 30)
    assert (ledger.running("r2"), ledger.outstanding_tokens("r2")) == (1, 5)
    assert [lease.request_id for lease in ledger.leases()] == ["a", "b", "c"]


def test_release_gives_back_that_lease_and_no_other() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    ledger.acquire(Lease("b", "r1", 20))
    assert ledger.release("a") == Lease("a", "r1", 10)
    assert (ledger.running("r1"), ledger.outstanding_tokens("r1")) == (1, 20)
    assert "a" not in ledger
    assert "b" in ledger


def test_double_release_is_an_error_and_changes_nothing() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    ledger.acquire(Lease("b", "r1", 20))
    ledger.release("a")
    with pytest.raises(LeaseError, match="'a' holds no lease"):
        ledger.release("a")
    assert (len(ledger), ledger.running("r1"), ledger.outstanding_tokens("r1")) == (1, 1, 20)


def test_a_second_lease_for_one_request_is_an_error_and_changes_nothing() -> None:
    ledger = Ledger()
    ledger.acquire(Lease("a", "r1", 10))
    with pytest.raises(LeaseError, match="'a' holds a lease already"):
        ledger.acquire(Lease("a", "r2", 99))
    assert (ledger.outstanding_tokens("r1"), ledger.outstanding_tokens("r2")) == (10, 0)


def test_an_unknown_replica_bears_no_load() -> None:
    assert (Ledger().running("?"), Ledger().outstanding_tokens("?")) == (0, 0)
