"""The ready replicas: who may serve a request, who of them has room now."""

from __future__ import annotations

from dataclasses import dataclass

from serving.core.lane import ReplicaInfo
from serving.scheduler.breaker import Breaker
from serving.scheduler.ledger import Ledger
from serving.scheduler.placement import ReplicaState, may_serve
from serving.scheduler.queue import Eligibility


@dataclass(frozen=True, slots=True)
class Places:
    """Where requests of one eligibility may run.

    Attributes:
        limits: for each replica, how many requests it may hold when one of these joins; slots reserved
            for higher bands are taken off.
        num_slots: their sum, such requests that may run at once.
    """

    replicas: tuple[ReplicaState, ...]
    limits: tuple[int, ...]
    lanes: frozenset[str]
    num_slots: int


class Fleet:
    """Replicas that come and go; the lists by eligibility are made once per change, not once per request.

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
        self._replicas: dict[str, ReplicaState] = {}
        self._by_eligibility: dict[Eligibility, Places] = {}

    def all(self) -> list[ReplicaState]:
        """Every ready replica."""
        return list(self._replicas.values())

    def get(self, replica_id: str) -> ReplicaState | None:
        return self._replicas.get(replica_id)

    def join(self, info: ReplicaInfo) -> None:
        """A replica is ready, with a clean record; one that is here already keeps its own."""
        known = self._replicas.get(info.replica_id)
        breaker = known.breaker if known else Breaker(self._breaker_failures, self._breaker_cooldown_s)
        self._replicas[info.replica_id] = ReplicaState(info, self._ledger.load(info.replica_id), breaker)
        self._by_eligibility.clear()

    def leave(self, replica_id: str) -> None:
        """A replica takes no more requests."""
        self._replicas.pop(replica_id, None)
        self._ledger.forget(replica_id)
        self._by_eligibility.clear()

    def places(self, eligibility: Eligibility) -> Places:
        """Where such requests may run, with room or without."""
        places = self._by_eligibility.get(eligibility)
        if places is None:
            willing = [replica for replica in self._replicas.values() if may_serve(replica.info, eligibility)]
            # Better wait for another than break on the same one again; alone, it gets a second chance.
            replicas = [
                replica for replica in willing if replica.info.replica_id != eligibility.avoid_replica
            ] or willing
            reserved_share = sum(self._reserved_shares[: eligibility.band])
            limits = [
                replica.info.max_running - int(reserved_share * replica.info.max_running)
                for replica in replicas
            ]
            lanes = frozenset(replica.info.lane for replica in replicas)
            places = self._by_eligibility[eligibility] = Places(
                tuple(replicas), tuple(limits), lanes, sum(limits)
            )
        return places

    def with_room(self, eligibility: Eligibility, now_s: float) -> list[ReplicaState]:
        """Replicas that can take one more such request now."""
        places = self.places(eligibility)
        return [
            replica
            for replica, limit in zip(places.replicas, places.limits, strict=True)
            if replica.load.running < limit and replica.breaker.lets_through(now_s)
        ]

    def has_room(self, eligibility: Eligibility, now_s: float) -> bool:
        """Whether any replica can take one more such request now."""
        # A plain loop: this runs several times per decision, mostly over full replicas.
        places = self.places(eligibility)
        for replica, limit in zip(places.replicas, places.limits, strict=True):
            if replica.load.running < limit and replica.breaker.lets_through(now_s):
                return True
        return False
