"""Who may run where, and where they do."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from serving.config import PLACEMENTS, SchedulerConfig
from serving.core.lane import Strategy
from serving.scheduler.placement import (
    LeastOutstanding,
    PowerOfTwo,
    PrefixAffinity,
    ReplicaState,
    may_serve,
)
from serving.scheduler.placements import placement_policy
from serving.scheduler.queue import Eligibility
from tests.unit.scheduler.examples import loaded, replica, request

PLAIN = replica("p", "batched")
DRAFTING = replica("d", "speculative", Strategy.SPECULATIVE)
CLOSED = replica("c", "sequential", Strategy.SEQUENTIAL, takes_unpinned=False)


@pytest.mark.parametrize(
    ("lane", "needs_plain_decoding", "allowed"),
    [
        (None, False, {"p", "d"}),
        (None, True, {"p"}),
        ("sequential", False, {"c"}),
        ("sequential", True, {"c"}),
        # Pinned is the client's word, even where the engine will refuse.
        ("speculative", True, {"d"}),
        ("elsewhere", False, set()),
    ],
)
def test_may_serve(lane: str | None, needs_plain_decoding: bool, allowed: set[str]) -> None:
    eligibility = Eligibility(lane, needs_plain_decoding, band=0)
    assert {info.replica_id for info in (PLAIN, DRAFTING, CLOSED) if may_serve(info, eligibility)} == allowed


def rng(seed: int = 0) -> random.Random:
    return random.Random(seed)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_name_is_that_of_a_policy_of_its_own(name: str) -> None:
    policy = placement_policy(SchedulerConfig.model_validate({"placement": name, "profile": "p"}), rng(), {})
    assert (type(policy).__doc__ or "").startswith(f"`{name}`")


def chosen(policy: LeastOutstanding | PowerOfTwo, candidates: list[ReplicaState]) -> str:
    return policy.choose(request("a"), candidates).info.replica_id


# least_outstanding


def test_fewest_outstanding_tokens_wins_over_fewest_requests() -> None:
    many_small, one_big = loaded("many", 5, 50), loaded("one", 1, 2000)
    assert chosen(LeastOutstanding(rng()), [one_big, many_small]) == "many"


def test_ties_reach_every_equal_replica_about_equally_and_no_other() -> None:
    candidates = [*(loaded(name, 0, 7) for name in "abcd"), loaded("z", 0, 8)]
    policy = LeastOutstanding(rng(1))
    drawn = Counter(chosen(policy, candidates) for _ in range(400))
    assert drawn.keys() == set("abcd")
    assert min(drawn.values()) > 60


def test_ties_repeat_with_the_seed() -> None:
    equals = [loaded(name) for name in "abcd"]

    def draws(seed: int) -> list[str]:
        policy = LeastOutstanding(rng(seed))
        return [chosen(policy, equals) for _ in range(20)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        chosen(LeastOutstanding(rng()), [])


# power_of_two


def test_of_two_the_less_loaded_is_taken() -> None:
    policy = PowerOfTwo(rng())
    assert {chosen(policy, [loaded("a", 1, 10), loaded("b", 1, 20)]) for _ in range(20)} == {"a"}
    assert chosen(policy, [loaded("alone")]) == "alone"


def test_of_three_not_always_the_least_loaded_is_taken() -> None:
    policy = PowerOfTwo(rng(1))
    candidates = [loaded(str(number), 1, 10 * number) for number in range(3)]
    assert {chosen(policy, candidates) for _ in range(100)} == {"0", "1"}


def test_of_many_any_but_the_most_loaded_may_be_taken_and_light_ones_more_often() -> None:
    policy = PowerOfTwo(rng(1))
    candidates = [loaded(str(number), 1, 10 * number) for number in range(5)]
    drawn = Counter(chosen(policy, candidates) for _ in range(500))
    assert drawn.keys() == {"0", "1", "2", "3"}, "the most loaded loses to whomever it is drawn with"
    assert drawn["0"] > drawn["1"] > drawn["2"] > drawn["3"]


# prefix_affinity


def seen_by(policy: PrefixAffinity, target: ReplicaState, *blocks: int) -> None:
    policy.choose(request("earlier", prefix_blocks=blocks), [target])


def test_the_longest_known_prefix_wins_within_the_gap() -> None:
    policy = PrefixAffinity(rng(), gap_tokens=100)
    a, b, idle = loaded("a", 1, 150), loaded("b", 1, 140), loaded("idle", 1, 50)
    seen_by(policy, a, 1, 2, 3)
    seen_by(policy, b, 1, 2)
    wanted = request("x", prefix_blocks=(1, 2, 3, 4))
    assert policy.choose(wanted, [a, b, idle]).info.replica_id == "a"


def test_load_beats_locality_above_the_gap() -> None:
    policy = PrefixAffinity(rng(), gap_tokens=100)
    knows, idle = loaded("knows", 1, 101), loaded("idle")
    seen_by(policy, knows, 1, 2, 3)
    assert policy.choose(request("x", prefix_blocks=(1, 2, 3)), [knows, idle]).info.replica_id == "idle"


def test_blocks_match_from_the_beginning_only() -> None:
    policy = PrefixAffinity(rng(), gap_tokens=1000)
    knows, idle = loaded("knows", 1, 1), loaded("idle")
    seen_by(policy, knows, 1, 2, 3)
    assert policy.choose(request("x", prefix_blocks=(9, 2, 3)), [knows, idle]).info.replica_id == "idle"


def test_a_prompt_without_blocks_goes_by_load() -> None:
    policy = PrefixAffinity(rng(), gap_tokens=1000)
    knows, idle = loaded("knows", 1, 1), loaded("idle")
    seen_by(policy, knows, 1)
    assert policy.choose(request("x"), [knows, idle]).info.replica_id == "idle"


def test_a_replica_that_left_is_forgotten() -> None:
    policy = PrefixAffinity(rng(), gap_tokens=1000)
    knows, idle = loaded("knows", 1, 1), loaded("idle")
    seen_by(policy, knows, 1)
    policy.forget("knows")
    policy.forget("never seen")
    assert policy.choose(request("x", prefix_blocks=(1,)), [knows, idle]).info.replica_id == "idle"


def test_the_least_recently_used_blocks_are_forgotten_first() -> None:
    policy = PrefixAffinity(rng(), gap_tokens=1000, max_blocks=2)
    knows, idle = loaded("knows", 1, 1), loaded("idle")
    for block in (1, 2, 1, 3):
        seen_by(policy, knows, block)
    assert policy.choose(request("x", prefix_blocks=(1,)), [knows, idle]).info.replica_id == "knows"
    assert policy.choose(request("x", prefix_blocks=(2,)), [knows, idle]).info.replica_id == "idle"
