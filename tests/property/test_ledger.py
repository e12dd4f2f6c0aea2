"""Any order of acquire, release and forget leaves the ledger equal to the leases that live."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from serving.core.errors import LeaseError
from serving.core.request import Lease
from serving.scheduler.ledger import Ledger, Load

REPLICAS = ("r1", "r2", "r3")
names = st.sampled_from("abcdef")


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[str, Lease] = {}

    @rule(
        name=names,
        replica=st.sampled_from(REPLICAS),
        tokens=st.integers(1, 1000),
        sequences=st.integers(1, 8),
    )
    def acquire(self, name: str, replica: str, tokens: int, sequences: int) -> None:
        lease = Lease(name, replica, tokens, num_sequences=sequences)
        if name in self.live:
            with pytest.raises(LeaseError):
                self.ledger.acquire(lease)
        else:
            self.ledger.acquire(lease)
            self.live[name] = lease

    @rule(name=names)
    def release(self, name: str) -> None:
        if name in self.live:
            assert self.ledger.release(name) == self.live.pop(name)
        else:
            with pytest.raises(LeaseError):
                self.ledger.release(name)

    @rule(replica=st.sampled_from(REPLICAS))
    def forget(self, replica: str) -> None:
        self.ledger.forget(replica)

    @invariant()
    def load_is_the_sum_of_live_leases(self) -> None:
        for replica in REPLICAS:
            mine = [lease for lease in self.live.values() if lease.replica_id == replica]
            assert self.ledger.load(replica) == Load(
                len(mine),
                sum(lease.reserved_tokens for lease in mine),
                sum(lease.num_sequences for lease in mine),
            )

    @invariant()
    def membership_and_order_are_those_of_live_leases(self) -> None:
        assert self.ledger.leases() == tuple(self.live.values())
        assert len(self.ledger) == len(self.live)
        assert all((name in self.ledger) == (name in self.live) for name in "abcdef")


TestLedger = LedgerMachine.TestCase
