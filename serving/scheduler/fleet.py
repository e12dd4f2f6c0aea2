"""The ready replicas: who may serve a line, who of them has room now."""

from __future__ import annotations

from serving.core.lane import ReplicaInfo
from serving.scheduler.breaker import Breaker
from serving.scheduler.ledger import Ledger
from serving.scheduler.placement import Replica, may_serve
from serving.scheduler.queue import Line


class Fleet:
    """Replicas that come and go; the lists by line are made once per change, not once per request.

    Args:
        reserved_shares: part of each replica's slots kept for each band and those above it, by band index.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        breaker_failures: int,
        breaker_cooldown_s: float,
        reserved_shares: list[float],
    ) -> None:
        self._ledger = ledger
        self._breaker_failures = breaker_failures
        self._breaker_cooldown_s = breaker_cooldown_s
        self._reserved_shares = reserved_shares
        self._replicas: dict[str, Replica] = {}
        self._by_line: dict[Line, list[Replica]] = {}

    def all(self) -> list[Replica]:
        """Every ready replica."""
        return list(self._replicas.values())

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    def join(self, info: ReplicaInfo) -> None:
        """A replica is ready, with a clean record."""
        breaker = Breaker(self._breaker_failures, self._breaker_cooldown_s)
        self._replicas[info.replica_id] = Replica(info, self._ledger.load(info.replica_id), breaker)
        self._by_line.clear()

    def leave(self, replica_id: str) -> None:
        """A replica takes no more requests."""
        self._replicas.pop(replica_id, None)
        self._ledger.forget(replica_id)
        self._by_line.clear()

    def eligible(self, line: Line) -> list[Replica]:
        """Replicas that may serve the line, with room or without."""
        found = self._by_line.get(line)
        if found is None:
            found = [one for one in self._replicas.values() if may_serve(one.info, line)]
            self._by_line[line] = found
        return found

    def reserved_slots(self, replica: Replica, band: int) -> int:
        """Slots of the replica that the band must leave free for higher ones."""
        return int(sum(self._reserved_shares[:band]) * replica.info.max_running)

    def with_room(self, line: Line, now_s: float) -> list[Replica]:
        """Replicas that can take one more request of the line now."""
        return [
            one for one in self.eligible(line) if one.has_room(self.reserved_slots(one, line.band), now_s)
        ]

    def has_room(self, line: Line, now_s: float) -> bool:
        """Whether any replica can take one more request of the line now."""
        return any(one.has_room(self.reserved_slots(one, line.band), now_s) for one in self.eligible(line))

    def num_slots(self, line: Line) -> int:
        """Requests of the line that may run at once."""
        return sum(one.info.max_running - self.reserved_slots(one, line.band) for one in self.eligible(line))
