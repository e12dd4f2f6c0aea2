"""Many replicas are kept sorted instead of looked at: the same decisions, and each of them found at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from serving.config import PLACEMENTS, SchedulerConfig
from serving.core.errors import LeaseError
from serving.core.lane import Strategy
from serving.core.request import Lease, ReplicaVerdict, RequestEnd
from serving.scheduler import core as core_module
from serving.scheduler.core import SchedulerCore
from serving.scheduler.fleet import FEW_REPLICAS, NOTHING_KEPT, Fleet, Kept
from serving.scheduler.ledger import Ledger
from serving.scheduler.placement import Openings, ReplicaState
from serving.scheduler.queue import Eligibility
from tests.unit.scheduler.examples import replica, request

NUM_REPLICAS = 2 * FEW_REPLICAS
ANY = Eligibility(None, needs_plain_decoding=False, band=0)


class LooksAtEach(Fleet):
    """The plain way: every replica is asked for every request, and `least_outstanding` gets a list."""

    def with_room(
        self, eligibility: Eligibility, now_s: float, kept: Kept = NOTHING_KEPT
    ) -> Sequence[ReplicaState]:
        places = self.places(eligibility)
        return [
            replica
            for replica, fullest in zip(places.replicas, places.fullest, strict=True)
            if replica.load.sequences <= fullest
            and (replica.breaker.opened_at_s is None or replica.breaker.lets_through(now_s))
            and replica.info.replica_id not in kept.replicas
        ]

    def has_room(self, eligibility: Eligibility, now_s: float, kept: Kept = NOTHING_KEPT) -> bool:
        return bool(self.with_room(eligibility, now_s, kept))

    def has_slot(self, eligibility: Eligibility, now_s: float, kept: Kept = NOTHING_KEPT) -> bool:
        if eligibility in kept.waiting:
            return False
        places = self.places(eligibility)
        return any(
            replica.load.sequences < limit
            and replica.breaker.lets_through(now_s)
            and replica.info.replica_id not in kept.replicas
            for replica, limit in zip(places.replicas, places.limits, strict=True)
        )


def decisions(placement: str, seed: int, *, failures: float) -> list[tuple[str, ...]]:
    """What the core decides while requests of all kinds come and go, and replicas fail, leave and return."""
    rng = random.Random(seed)
    bands = [{"name": name, "reserved_share": share} for name, share in (("a", 0.3), ("b", 0.0), ("c", 0.0))]
    settings = {"placement": placement, "order": "priority", "bands": bands, "default_band": "b"}
    core = SchedulerCore(SchedulerConfig.model_validate(settings | {"breaker_failures": 1}))
    infos = [
        replica(
            f"r{number}",
            *(("speculative", Strategy.SPECULATIVE) if number % 3 else ("batched", Strategy.BATCHED)),
            max_running=1 + number % 4,
        )
        for number in range(NUM_REPLICAS)
    ]
    for info in infos:
        core.replica_ready(info)
    made: list[tuple[str, ...]] = []
    running: list[str] = []
    for number in range(1000):
        now_s = 0.01 * number
        chance = rng.random()
        # The load rises and falls: from a fleet that idles to one that is full.
        if chance < (0.75 if number // 250 % 2 == 0 else 0.25):
            core_request = request(
                f"q{number}",
                rng.choice((None, None, "batched")),
                tokens=rng.choice((10, 20, 50)),
                band=rng.randrange(3),
                needs_plain_decoding=rng.random() < 0.1,
                num_sequences=rng.choice((1, 1, 1, 1, 3)),
                avoid_replica=rng.choice((None, None, None, "r7")),
                prefix_blocks=tuple(range(rng.randrange(4))),
            )
            refusal = core.submit(core_request, now_s)
            made.append((core_request.request_id, refusal.reason if refusal else "queued"))
        elif chance < 0.98 and running:
            verdict = ReplicaVerdict.FAILED if rng.random() < failures else ReplicaVerdict.HEALTHY
            core.release(running.pop(rng.randrange(len(running))), now_s, RequestEnd(verdict, 0.1, 5))
        elif chance < 0.985:
            info = rng.choice(infos)
            core.replica_gone(info.replica_id)
            core.dispatch(now_s)
            core.replica_ready(info)
        elif chance < 0.99:
            # Booked beside the dispatch, over what the replica may hold.
            core.adopt(Lease(f"adopted{number}", rng.choice(infos).replica_id, 30))
            running.append(f"adopted{number}")
        for grant in core.dispatch(now_s):
            made.append((grant.request.request_id, grant.replica.replica_id))
            running.append(grant.request.request_id)
    return made


@pytest.mark.parametrize(
    "placement", [name for name in PLACEMENTS if name != "adaptive"]
)  # looks at each itself
@pytest.mark.parametrize(("seed", "failures"), [(0, 0.0), (1, 0.0), (2, 0.01)])
def test_decisions_are_those_of_looking_at_each_replica(
    placement: str, seed: int, failures: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    sorted_ones = decisions(placement, seed, failures=failures)
    monkeypatch.setattr(core_module, "Fleet", LooksAtEach)
    assert sorted_ones == decisions(placement, seed, failures=failures)
    assert len({where for _, where in sorted_ones if where.startswith("r")}) == NUM_REPLICAS


def yard(max_running: int = 1) -> tuple[Ledger, Fleet]:
    ledger = Ledger()
    fleet = Fleet(ledger, breaker_failures=1, breaker_cooldown_s=5, reserved_shares=[0.0])
    for number in range(FEW_REPLICAS + 1):
        fleet.join(replica(f"r{number}", max_running=max_running))
    return ledger, fleet


def test_many_replicas_are_not_looked_at_until_a_breaker_opens_or_slots_are_kept() -> None:
    _, fleet = yard()
    assert isinstance(fleet.with_room(ANY, 0.0), Openings)
    assert not isinstance(fleet.with_room(ANY, 0.0, Kept({"r1"})), Openings)
    found = fleet.get("r0")
    assert found is not None
    found.breaker.failed("x", 0.0)
    assert not isinstance(fleet.with_room(ANY, 1.0), Openings)
    found.breaker.sent("probe")
    found.breaker.succeeded("probe")
    assert isinstance(fleet.with_room(ANY, 6.0), Openings)
    found.breaker.failed("y", 7.0)
    fleet.leave("r0")
    fleet.join(replica("r0"))
    assert isinstance(fleet.with_room(ANY, 7.0), Openings), "its record left with it"


def test_what_the_ledger_books_is_seen_by_each_kind_of_request() -> None:
    ledger, fleet = yard()
    pinned = Eligibility("batched", needs_plain_decoding=False, band=0)
    for number in range(FEW_REPLICAS):
        ledger.acquire(Lease(str(number), f"r{number}", 9))
        assert len(fleet.with_room(ANY, 0.0)) == FEW_REPLICAS - number
    assert [one.info.replica_id for one in fleet.with_room(pinned, 0.0)] == [f"r{FEW_REPLICAS}"]
    ledger.release("3")
    assert [one.info.replica_id for one in fleet.with_room(pinned, 0.0)] == ["r3", f"r{FEW_REPLICAS}"]
    with pytest.raises(LeaseError):
        ledger.release("3")


def test_a_slot_is_not_room_for_a_request_that_takes_two() -> None:
    ledger, fleet = yard(max_running=2)
    wide = Eligibility(None, needs_plain_decoding=False, band=0, num_sequences=2)
    for number in range(FEW_REPLICAS + 1):
        ledger.acquire(Lease(str(number), f"r{number}", 9))
    assert (fleet.has_slot(wide, 0.0), fleet.has_room(wide, 0.0)) == (True, False)
    assert (fleet.has_slot(ANY, 0.0), fleet.has_room(ANY, 0.0)) == (True, True)


def test_changes_are_told_once_each_the_latest_first_and_none_of_a_replica_that_is_forgotten() -> None:
    ledger = Ledger()
    for name, place in (("x", "a"), ("y", "b"), ("z", "a"), ("w", "c")):
        ledger.acquire(Lease(name, place, 1))
    assert list(ledger.changed_since(0)) == ["c", "a", "b"]
    assert list(ledger.changed_since(2)) == ["c", "a"]
    assert list(ledger.changed_since(4)) == []
    ledger.release("y")
    ledger.forget("b")
    assert list(ledger.changed_since(0)) == ["c", "a"]
