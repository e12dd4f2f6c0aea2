"""The ready replicas: who may serve a request, who of them has room now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from serving.core.lane import ReplicaInfo
from serving.scheduler.breaker import Breaker
from serving.scheduler.ledger import Ledger
from serving.scheduler.placement import Openings, ReplicaState, may_serve
from serving.scheduler.queue import Eligibility

FEW_REPLICAS = 32  # up to so many are sooner looked at one by one than kept sorted


@dataclass(frozen=True, slots=True)
class Places:
    """Where requests of one eligibility may run.

    Attributes:
        limits: for each replica, how many sequences it may hold when one of these joins; slots reserved
            for higher bands are taken off.
        fullest: for each, how many it may hold for one of these to join.
        models: whose requests that pin no lane may run on one of them as well; as in `ReplicaInfo`.
        num_slots: their sum, sequences of such requests that may run at once.
        openings: those with room, kept sorted; None where the replicas are few.
        slot_is_room: one free slot is all that such a request needs, wherever it runs.
    """

    replicas: tuple[ReplicaState, ...]
    limits: tuple[int, ...]
    fullest: tuple[int, ...]
    lanes: frozenset[str]
    models: frozenset[str]
    num_slots: int
    openings: Openings | None
    slot_is_room: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """While requests are placed: replicas whose slots are kept for a request that lacks some, and who waits so."""

    replicas: set[str] = field(default_factory=set)
    waiting: set[Eligibility] = field(default_factory=set)


NOTHING_KEPT = Kept()


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
        self._not_closed: set[str] = set()  # replicas, by their breakers

    def all(self) -> list[ReplicaState]:
        """Every ready replica."""
        return list(self._replicas.values())

    def get(self, replica_id: str) -> ReplicaState | None:
        return self._replicas.get(replica_id)

    def join(self, info: ReplicaInfo) -> None:
        """A replica is ready, with a clean record; one that is here already keeps its own."""
        known = self._replicas.get(info.replica_id)
        breaker = known.breaker if known else self._breaker(info.replica_id)
        self._replicas[info.replica_id] = ReplicaState(info, self._ledger.load(info.replica_id), breaker)
        self._by_eligibility.clear()

    def leave(self, replica_id: str) -> None:
        """A replica takes no more requests."""
        self._replicas.pop(replica_id, None)
        self._not_closed.discard(replica_id)
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
            # Alone on a replica too narrow for it only where there is none that is wide enough.
            wide = [i for i, limit in enumerate(limits) if limit >= eligibility.num_sequences]
            if wide:
                replicas, limits = [replicas[i] for i in wide], [limits[i] for i in wide]
            # One that is wider than the limit runs alone: else it would wait for ever.
            fullest = [limit - min(eligibility.num_sequences, limit) for limit in limits]
            lanes = frozenset(replica.info.lane for replica in replicas)
            models = frozenset(replica.info.model for replica in replicas if replica.info.takes_unpinned)
            is_large = len(replicas) > FEW_REPLICAS
            places = self._by_eligibility[eligibility] = Places(
                tuple(replicas),
                tuple(limits),
                tuple(fullest),
                lanes,
                models,
                sum(limits),
                Openings(replicas, fullest, self._ledger) if is_large else None,
                all(full == limit - 1 for limit, full in zip(limits, fullest, strict=True)),
            )
        return places

    def with_room(
        self, eligibility: Eligibility, now_s: float, kept: Kept = NOTHING_KEPT
    ) -> Sequence[ReplicaState]:
        """Replicas that have all the slots of one more such request free now; until the next lease changes that."""
        places = self.places(eligibility)
        if (openings := self._openings(places, kept)) is not None:
            return openings
        # Written out, for it is asked of every replica for every request.
        return [
            replica
            for replica, fullest in zip(places.replicas, places.fullest, strict=True)
            if replica.load.sequences <= fullest
            and (replica.breaker.opened_at_s is None or replica.breaker.lets_through(now_s))
            and replica.info.replica_id not in kept.replicas
        ]

    def full(self, eligibility: Eligibility, kept: Kept = NOTHING_KEPT) -> list[ReplicaState]:
        """Those that may serve such a request, can be trusted, and lack room for it now.

        One whose breaker asks for a probe is not waited for: it may be full of requests that hang.
        """
        places = self.places(eligibility)
        return [
            replica
            for replica, fullest in zip(places.replicas, places.fullest, strict=True)
            if replica.breaker.opened_at_s is None
            and (replica.load.sequences > fullest or replica.info.replica_id in kept.replicas)
        ]

    def has_room(self, eligibility: Eligibility, now_s: float, kept: Kept = NOTHING_KEPT) -> bool:
        """Whether `with_room` would name any, and nobody like it waits though there is room."""
        if eligibility in kept.waiting:
            return False
        places = self.places(eligibility)
        if (openings := self._openings(places, kept)) is not None:
            return bool(openings)
        for replica, fullest in zip(places.replicas, places.fullest, strict=True):
            if (
                replica.load.sequences <= fullest
                and replica.breaker.lets_through(now_s)
                and replica.info.replica_id not in kept.replicas
            ):
                return True
        return False

    def has_slot(self, eligibility: Eligibility, now_s: float, kept: Kept = NOTHING_KEPT) -> bool:
        """Whether any replica has a slot free for such requests, if not all that one of them takes."""
        if kept.waiting and eligibility in kept.waiting:
            return False
        places = self.places(eligibility)
        if places.slot_is_room and (openings := self._openings(places, kept)) is not None:
            return bool(openings)
        for replica, limit in zip(places.replicas, places.limits, strict=True):
            if _has_slot(replica, limit, now_s) and replica.info.replica_id not in kept.replicas:
                return True
        return False

    def keep_for(self, eligibility: Eligibility, now_s: float, kept: Kept) -> None:
        """Keep the emptiest replica that such a request may run on for it; at least one has a slot free."""
        places = self.places(eligibility)
        free = [
            (limit - replica.load.sequences, replica.info.replica_id)
            for replica, limit in zip(places.replicas, places.limits, strict=True)
            if _has_slot(replica, limit, now_s) and replica.info.replica_id not in kept.replicas
        ]
        kept.replicas.add(max(free)[1])
        # Whoever differs in patience alone waits behind it, and keeps no replica more.
        kept.waiting.update(replace(eligibility, is_patient=is_patient) for is_patient in (True, False))

    def wait_for(self, awaited: Sequence[ReplicaState], eligibility: Eligibility, kept: Kept) -> None:
        """Such a request waits for these: what slots they have free must not go one by one to those behind it."""
        places = self.places(eligibility)
        limit_of = {
            replica.info.replica_id: limit
            for replica, limit in zip(places.replicas, places.limits, strict=True)
        }
        kept.replicas.update(
            replica.info.replica_id
            for replica in awaited
            if replica.load.sequences < limit_of[replica.info.replica_id]
        )
        kept.waiting.add(eligibility)

    def _openings(self, places: Places, kept: Kept) -> Openings | None:
        """Those with room, if the sorted ones are they: no slots are kept, and all breakers closed."""
        if places.openings is None or kept.replicas or self._not_closed:
            return None
        return places.openings.follow()

    def _breaker(self, replica_id: str) -> Breaker:
        return Breaker(
            self._breaker_failures,
            self._breaker_cooldown_s,
            replica_id=replica_id,
            not_closed=self._not_closed,
        )


def _has_slot(replica: ReplicaState, limit: int, now_s: float) -> bool:
    return replica.load.sequences < limit and replica.breaker.lets_through(now_s)
