"""Leases, and the load they put on each replica. The only writer of load counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from serving.core.errors import LeaseError
from serving.core.request import Lease


@dataclass(slots=True)
class Load:
    """What is booked on one replica now. Read it; only the ledger writes it.

    `running` are requests; `sequences` the slots they take, one for each choice of each prompt.
    """

    running: int = 0
    outstanding_tokens: int = 0
    sequences: int = 0


class Ledger:
    """Live leases by request, and their sums by replica."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._loads: dict[str, Load] = {}
        self.num_changes = 0  # of any load
        self._last_change: OrderedDict[str, int] = OrderedDict()  # by replica, the latest last

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def acquire(self, lease: Lease) -> None:
        """Book a lease.

        Raises:
            LeaseError: the request holds one already.
        """
        if lease.request_id in self._leases:
            raise LeaseError(f"request {lease.request_id!r} holds a lease already")
        self._leases[lease.request_id] = lease
        load = self.load(lease.replica_id)
        load.running += 1
        load.sequences += lease.num_sequences
        load.outstanding_tokens += lease.reserved_tokens
        self._changed(lease.replica_id)

    def release(self, request_id: str) -> Lease:
        """End a lease and give its room back.

        Raises:
            LeaseError: there is none: released twice, or never granted.
        """
        lease = self._leases.pop(request_id, None)
        if lease is None:
            raise LeaseError(f"request {request_id!r} holds no lease: released twice, or never granted")
        load = self._loads[lease.replica_id]
        load.running -= 1
        load.sequences -= lease.num_sequences
        load.outstanding_tokens -= lease.reserved_tokens
        self._changed(lease.replica_id)
        return lease

    def load(self, replica_id: str) -> Load:
        """The live load of a replica: a view that follows every later lease."""
        return self._loads.setdefault(replica_id, Load())

    def forget(self, replica_id: str) -> None:
        """Drop the books of a replica that is gone for good; one with live leases keeps them."""
        if replica_id in self._loads and self._loads[replica_id].running == 0:
            del self._loads[replica_id]
            self._last_change.pop(replica_id, None)

    def changed_since(self, num_changes: int) -> Iterator[str]:
        """Replicas whose load changed after so many changes, each once, the latest first."""
        for replica_id, number in reversed(self._last_change.items()):
            if number <= num_changes:
                return
            yield replica_id

    def leases(self) -> tuple[Lease, ...]:
        """All live leases, oldest first."""
        return tuple(self._leases.values())

    def _changed(self, replica_id: str) -> None:
        self.num_changes += 1
        self._last_change[replica_id] = self.num_changes
        self._last_change.move_to_end(replica_id)
