"""Which lane requests that pin none go to, and why, when placement weighs what each lane would give."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from serving.core.choice import Choice, Why
from serving.core.lane import ReplicaInfo, Strategy
from serving.core.request import Lease, ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.core.speculation.acceptance import geometric_rates
from serving.core.speculation.cost_model import CostModel, Lengths
from serving.core.speculation.step_time import DraftCost, LinearStepTime, PromptCost
from serving.core.speculation.text_kind import TextKind
from serving.scheduler.adaptive import Adaptive
from serving.scheduler.breaker import Breaker
from serving.scheduler.core import SchedulerCore
from serving.scheduler.corrections import Corrections
from serving.scheduler.lane_costs import LaneCost, LaneCosts
from serving.scheduler.ledger import Load
from serving.scheduler.placement import ReplicaState
from tests.unit.scheduler.examples import core, placed, replica, request

K = 3
STEP = LinearStepTime(0.020, 0.002, 1e-7)
PRIORS = {
    TextKind.COPY: geometric_rates(0.9, K),
    TextKind.OPEN: geometric_rates(0.2, K),
}
COSTS = {
    "batched": LaneCost(CostModel(STEP)),
    "speculative": LaneCost(CostModel(STEP, DraftCost(0.002, 0.002)), (K,), PRIORS),
}
COPY, OPEN = TextKind.COPY, TextKind.OPEN


def plain(replica_id: str = "b", **fields: Any) -> ReplicaInfo:
    return replace(replica(replica_id, max_running=16), **fields)


def drafting(replica_id: str = "s", **fields: Any) -> ReplicaInfo:
    return replace(replica(replica_id, "speculative", Strategy.SPECULATIVE, max_running=16), **fields)


def policy(*replicas: ReplicaInfo, margin: float = 0.0, costs: LaneCosts | None = None) -> Adaptive:
    made = Adaptive(COSTS if costs is None else costs, margin, random.Random(0))
    for info in replicas:
        made.join(info)
    return made


def states(*replicas: ReplicaInfo) -> list[ReplicaState]:
    return [ReplicaState(info, Load(), Breaker(3, 5)) for info in replicas]


def ask(number: int | str, kind: TextKind, **fields: Any) -> SchedulingRequest:
    sizes = {"prompt_tokens": 50, "max_output_tokens": 100}
    return request(f"r{number}", kind=kind, **sizes | fields)


def run(made: Adaptive, asked: SchedulingRequest, info: ReplicaInfo) -> None:
    """The request runs there, whoever chose it."""
    made.placed(asked, info, 0.0)


def choice(made: Adaptive, asked: SchedulingRequest, *among: ReplicaInfo) -> Choice:
    made.choose(asked, states(*among))
    found = made.explain()
    assert found is not None
    return found


def adaptive_core(*replicas: ReplicaInfo, **settings: Any) -> SchedulerCore:
    return core(*replicas, placement="adaptive", profile="none is read", lane_costs=COSTS, **settings)


# The score


def test_what_can_be_guessed_goes_to_drafts_and_what_cannot_does_not() -> None:
    lanes = plain(), drafting()
    made = policy(*lanes)
    assert choice(made, ask(1, COPY), *lanes).lane == "speculative"
    assert choice(made, ask(2, OPEN), *lanes).lane == "batched"


def test_a_score_is_what_all_on_the_replica_gain_by_the_request() -> None:
    info = drafting()
    made = policy(info)
    for number in range(3):
        run(made, ask(number, OPEN), info)
    (score,) = choice(made, ask(9, COPY), info).scores
    cost = COSTS["speculative"].cost
    hard, easy = (1 + sum(PRIORS[kind]) for kind in (OPEN, COPY))
    lengths = Lengths(50, 100)
    before = cost.serve_at(3, lengths, K, hard).tokens_per_s
    after = cost.serve_at(4, lengths, K, (3 * hard + easy) / 4).tokens_per_s
    assert score.tokens_per_s == pytest.approx(after)
    assert score.score == pytest.approx(after - before)
    assert (score.batch, score.context_tokens, score.num_drafts, score.num_sharing) == (4, 100, K, 1)
    assert score.tokens_per_step == pytest.approx(easy)


@pytest.mark.parametrize(("output_tokens", "lane"), [(200, "speculative"), (8, "batched")])
def test_prompts_count_where_a_lane_takes_longer_for_them(output_tokens: int, lane: str) -> None:
    lanes = plain(), drafting()
    cost = COSTS["speculative"]
    # As a learned draft does that reads them too.
    slow = replace(cost, cost=replace(cost.cost, prompt_cost=PromptCost(step_s=0.1)))
    made = policy(*lanes, costs={**COSTS, "speculative": slow})
    assert choice(made, ask(1, COPY, max_output_tokens=output_tokens), *lanes).lane == lane
    # Where they cost the same, drafts are better for both.
    same = policy(*lanes)
    assert choice(same, ask(1, COPY, max_output_tokens=output_tokens), *lanes).lane == "speculative"


def test_drafts_are_left_when_their_batch_has_grown() -> None:
    lanes = plain(), drafting()
    made = policy(*lanes)
    for number in range(8):
        run(made, ask(number, COPY), lanes[1])
    assert choice(made, ask("n", COPY), *lanes).lane == "batched"


def test_on_cores_of_their_own_replicas_of_a_lane_fill_alike() -> None:
    infos = [plain(name) for name in "abc"]
    made = adaptive_core(*infos)
    for number in range(12):
        made.submit(ask(number, OPEN), 0.0)
    where = [place for _, place in placed(made)]
    assert sorted(where.count(info.replica_id) for info in infos) == [4, 4, 4]


# Shared cores

MACHINE = {"cores": "the machine"}


def test_on_shared_cores_all_are_asked_to_one_lane_and_leave_it_together() -> None:
    lanes = plain(**MACHINE), drafting(**MACHINE)
    made = policy(*lanes)
    apart = policy(plain(), drafting())
    for number in range(3):
        run(made, ask(number, COPY), lanes[1])
        run(apart, ask(number, COPY), drafting())
    # Alone on a machine of its own it would run without drafts; here it would take half of the others' time.
    assert choice(apart, ask("n", OPEN), plain(), drafting()).lane == "batched"
    assert choice(made, ask("n", OPEN), *lanes).lane == "speculative"
    for number in range(4, 16):
        run(made, ask(number, OPEN), lanes[1])
    # Now they are many and hard: all would be better off without, though today all would share with one.
    assert choice(made, ask("m", OPEN), *lanes).lane == "batched"


def test_a_busy_replica_that_nobody_may_move_takes_its_turns() -> None:
    lanes = plain(**MACHINE), drafting(**MACHINE)
    other = replace(
        replica("q", "sequential", Strategy.SEQUENTIAL, takes_unpinned=False), cores=MACHINE["cores"]
    )
    made = policy(*lanes, other)
    alone = choice(made, ask(1, COPY), *lanes)
    run(made, ask(2, OPEN, lane="sequential"), other)
    shared = choice(made, ask(3, COPY), *lanes)
    assert [score.num_sharing for score in shared.scores] == [2, 2]
    assert shared.scores[0].tokens_per_s == pytest.approx(alone.scores[0].tokens_per_s / 2)


def test_on_shared_cores_it_waits_for_the_better_lane_and_elsewhere_it_does_not() -> None:
    for cores, expected in (("the machine", {"s": 1}), ("", {"s": 1, "b": 1})):
        made = adaptive_core(plain(cores=cores), drafting(cores=cores, max_running=1))
        for number in range(2):
            assert made.submit(ask(number, COPY), 0.0) is None
        where = [place for _, place in placed(made)]
        assert {place: where.count(place) for place in where} == expected


def test_who_may_not_wait_and_who_is_pinned_take_the_room_there_is() -> None:
    made = adaptive_core(plain(**MACHINE), drafting(max_running=1, **MACHINE), max_waiting=1)
    assert made.submit(ask(0, COPY), 0.0) is None
    assert placed(made) == [("r0", "s")]
    assert made.submit(ask(1, COPY, max_queue_s=0.0), 0.0) is None
    assert placed(made) == [("r1", "b")]
    assert made.submit(ask(2, COPY), 0.0) is None
    assert placed(made) == []
    refusal = made.submit(ask(3, COPY), 0.0)
    assert refusal is not None, "the queue is bounded though there is room"
    assert refusal.reason == "queue_full"
    assert made.submit(ask(5, COPY, max_queue_s=0.0), 0.0) is None, (
        "who waits for the better lane is not before it"
    )
    assert placed(made) == [("r5", "b")]
    made.release("r5", 0.0)
    assert made.submit(ask(4, COPY, lane="batched"), 0.0) is None
    assert placed(made) == [("r4", "b")]
    made.release("r1", 1.0)
    made.release("r4", 1.0)
    made.release("r0", 1.0)
    assert placed(made) == [("r2", "s")]


@pytest.mark.parametrize("limit", [{"max_queue_s": 5.0}, {"ttft_deadline_s": 5.0}])
def test_a_request_whose_client_set_a_limit_does_not_wait_beside_a_lane_with_room(
    limit: dict[str, float],
) -> None:
    made = adaptive_core(plain(**MACHINE), drafting(max_running=1, **MACHINE))
    for number, limits in enumerate(({}, {}, limit)):
        assert made.submit(ask(number, COPY, **limits), 0.0) is None
    assert placed(made) == [("r0", "s"), ("r2", "b")]


@pytest.mark.parametrize(("pinned", "waits"), [(0, True), (1, True), (2, False), (4, False)])
def test_nobody_waits_for_a_lane_that_is_held_by_requests_pinned_to_it(pinned: int, waits: bool) -> None:
    made = adaptive_core(plain(**MACHINE), drafting(max_running=4, **MACHINE))
    for number in range(4):
        assert made.submit(ask(number, COPY, lane="speculative" if number < pinned else None), 0.0) is None
        assert placed(made) == [(f"r{number}", "s")]
    assert made.submit(ask(9, COPY), 0.0) is None
    assert placed(made) == ([] if waits else [("r9", "b")])


def test_nobody_waits_for_a_lane_whose_breaker_is_open() -> None:
    made = adaptive_core(plain(**MACHINE), drafting(max_running=1, **MACHINE), breaker_failures=1)
    for number in range(2):
        made.submit(ask(number, COPY), 0.0)
    assert placed(made) == [("r0", "s")]
    made.release("r0", 0.0, RequestEnd(ReplicaVerdict.FAILED))
    assert placed(made) == [("r1", "b")]


def test_nobody_waits_for_a_lane_on_trial() -> None:
    lanes = plain(**MACHINE), drafting(max_running=2, **MACHINE)
    made = adaptive_core(*lanes, breaker_failures=1, breaker_cooldown_s=5)
    for number in range(2):
        made.submit(ask(number, COPY), 0.0)
    assert placed(made) == [("r0", "s"), ("r1", "s")]
    made.release("r0", 0.0, RequestEnd(ReplicaVerdict.FAILED))
    made.submit(ask("several", COPY, num_sequences=2), 10.0)
    granted = [(grant.lease.request_id, grant.replica.replica_id) for grant in made.dispatch(10.0)]
    assert granted == [("rseveral", "b")]


def test_slots_of_the_lane_that_a_request_of_several_waits_for_are_kept_for_it() -> None:
    made = adaptive_core(plain(**MACHINE), drafting(max_running=2, **MACHINE))
    for number in range(2):
        made.submit(ask(number, COPY), 0.0)
    assert placed(made) == [("r0", "s"), ("r1", "s")]
    made.submit(ask("several", COPY, num_sequences=2), 0.0)
    made.submit(ask(2, COPY), 0.0)
    assert placed(made) == []
    made.release("r0", 1.0)
    assert placed(made) == [], "one slot is free, and it is not for the request behind"
    made.release("r1", 2.0)
    assert placed(made) == [("rseveral", "s")]
    made.release("rseveral", 3.0)
    assert placed(made) == [("r2", "s")]


def test_nobody_waits_for_a_full_replica_of_a_lane_that_has_room_on_another() -> None:
    infos = plain(**MACHINE), drafting("s1", **MACHINE), drafting("s2", **MACHINE)
    made = policy(*infos)
    run(made, ask("short", COPY), infos[1])
    run(made, ask("long", COPY), infos[2])
    other, full, roomy = states(*infos)
    roomy.load.outstanding_tokens = 1_000  # of equals the full one has fewer
    assert not made.awaited(ask(1, COPY), [other, roomy], lambda: [full])
    assert made.awaited(ask(1, COPY), [other], lambda: [full, roomy]) == [full]


# What it may choose from


def test_pins_options_and_avoided_replicas_hold_as_under_any_placement() -> None:
    made = adaptive_core(plain(), drafting())
    for asked in (
        ask("pinned", COPY, lane="batched"),
        ask("plain", COPY, needs_plain_decoding=True),
        ask("avoids", COPY, avoid_replica="s"),
    ):
        made.submit(asked, 0.0)
    assert {place for _, place in placed(made)} == {"b"}


def test_a_pin_is_no_choice_and_one_lane_is_the_only_one() -> None:
    made = adaptive_core(plain("b1"), plain("b2"))
    made.submit(ask(1, COPY, lane="batched"), 0.0)
    made.submit(ask(2, COPY), 0.0)
    pinned, free = made.dispatch(0.0)
    assert pinned.choice is None
    assert free.choice is not None
    assert free.choice.why is Why.ONLY_CHOICE
    assert str(free.choice).endswith("kind=copy why=only_choice")
    assert "other" not in str(free.choice)


# Hysteresis


def flaps(margin: float) -> int:
    """Changes of lane of requests of one kind, between two lanes whose scores cross again and again."""
    lanes = plain(), drafting()
    made = policy(*lanes, margin=margin)
    chosen = []
    for number in range(40):
        extra = ask(f"x{number}", COPY)
        for other in range(1 if number % 2 else 7):
            run(made, ask(f"x{number}-{other}", COPY), lanes[1])
        chosen.append(choice(made, extra, *lanes).lane)
        for other in range(1 if number % 2 else 7):
            made.ended(f"rx{number}-{other}", RequestEnd(), 0.0)
    return sum(before != after for before, after in pairwise(chosen))


def test_a_lane_is_kept_until_another_is_better_by_the_margin() -> None:
    assert flaps(0.0) == 39
    assert flaps(0.9) == 0
    lanes = plain(), drafting()
    made = policy(*lanes, margin=0.9)
    assert choice(made, ask(1, COPY), *lanes).why is Why.SCORE
    for number in range(8):
        run(made, ask(f"x{number}", COPY), lanes[1])
    kept = choice(made, ask(2, COPY), *lanes)
    assert (kept.lane, kept.why, kept.scores[0].lane) == ("speculative", Why.KEPT, "batched")
    # Of another kind nothing is kept.
    assert choice(made, ask(3, OPEN), *lanes).lane == "batched"


def test_on_shared_cores_the_last_choice_is_kept_for_all_kinds_and_an_idle_machine_keeps_none() -> None:
    lanes = plain(**MACHINE), drafting(**MACHINE)
    made = policy(*lanes, margin=3.0)
    assert choice(made, ask(1, OPEN), *lanes).lane == "batched"
    run(made, ask(1, OPEN), lanes[0])
    # One that had no choice says nothing, wherever most run.
    for number in range(3):
        assert choice(made, ask(f"x{number}", COPY), lanes[1]).why is Why.ONLY_CHOICE
        run(made, ask(f"x{number}", COPY), lanes[1])
    for number in range(3):
        made.ended(f"rx{number}", RequestEnd(), 0.0)
    kept = choice(made, ask(2, COPY), *lanes)
    assert (kept.lane, kept.why) == ("batched", Why.KEPT)
    made.ended("r1", RequestEnd(), 0.0)
    assert choice(made, ask(3, COPY), *lanes).lane == "speculative"


# What it learns


def ended(output_tokens: int, num_steps: int | None) -> RequestEnd:
    return RequestEnd(ReplicaVerdict.HEALTHY, 0.1, output_tokens, num_steps)


def test_requests_that_end_say_what_drafts_give_on_that_lane() -> None:
    lanes = plain(), drafting()
    made = policy(*lanes)
    assert choice(made, ask("a", OPEN), *lanes).lane == "batched"
    for number in range(20):
        asked = ask(number, OPEN)
        run(made, asked, lanes[1])
        made.ended(asked.request_id, ended(output_tokens=1 + 4 * 30, num_steps=31), 0.0)
    assert choice(made, ask("b", OPEN), *lanes).lane == "speculative"
    sums = made.accepted["speculative", OPEN]
    assert sums.observed == 20 * 30 * K
    # What was expected of each when it came: less, and more and more.
    assert 20 * 30 * sum(PRIORS[OPEN]) < sums.predicted < sums.observed
    bins = made.reliability["speculative"].bins()
    assert sum(part.num_requests for part in bins) == 20
    assert all(part.observed == 1 for part in bins)


@pytest.mark.parametrize(
    ("end", "observed"),
    [
        (ended(61, 31), 30),  # 30 steps after the first gave 60 tokens
        (ended(1 + 30 * (K + 1) + 1, 31), 30 * K),  # the last token has no text
        (ended(1 + 30 * (K + 1) + 2, 31), None),  # chunks were merged, of how many steps nobody knows
        (ended(31, 40), 0),
        (ended(61, None), None),
        (ended(1, 1), None),
        (RequestEnd(), None),
    ],
)
def test_only_steps_that_were_counted_say_something(end: RequestEnd, observed: int | None) -> None:
    info = drafting()
    made = policy(info)
    run(made, ask(1, COPY), info)
    made.ended("r1", end, 0.0)
    sums = made.accepted.get(("speculative", COPY))
    assert (sums.observed if sums else None) == observed


def test_of_a_lane_whose_k_follows_the_batch_only_requests_of_one_k_say_something() -> None:
    costs = COSTS | {"speculative": replace(COSTS["speculative"], drafts_by_batch=(K, K, 0))}
    info = drafting()
    made = policy(info, costs=costs)
    run(made, ask(1, COPY), info)
    run(made, ask(2, COPY), info)
    made.ended("r1", ended(61, 31), 0.0)
    assert not made.accepted
    made.ended("r2", ended(61, 31), 0.0)
    assert not made.accepted
    run(made, ask(3, COPY), info)
    made.ended("r3", ended(61, 31), 0.0)
    assert made.accepted["speculative", COPY].observed == 30


# Replicas that come and go, and books that stay straight


def test_a_replica_that_is_back_has_what_runs_on_it() -> None:
    info = drafting()
    made = policy(info)
    run(made, ask(1, COPY), info)
    made.forget("s")
    run_there = choice(policy(info), ask(2, COPY), info).scores[0].batch
    made.join(info)
    assert choice(made, ask(2, COPY), info).scores[0].batch == run_there + 1
    made.ended("r1", RequestEnd(), 0.0)
    assert choice(made, ask(2, COPY), info).scores[0].batch == run_there


def test_a_lease_from_before_counts_as_open_and_stays_where_it_is() -> None:
    lanes = plain(**MACHINE), drafting(**MACHINE)
    made = policy(*lanes)
    made.adopted(Lease("old", "s", 100, num_sequences=2))
    scores = {score.lane: score for score in choice(made, ask(1, COPY), *lanes).scores}
    assert (scores["speculative"].batch, scores["batched"].batch) == (3, 1)
    assert scores["batched"].num_sharing == 2
    made.ended("old", RequestEnd(), 0.0)
    assert {score.batch for score in choice(made, ask(2, COPY), *lanes).scores} == {1}


def test_the_only_lane_of_a_model_is_no_choice_though_nobody_measured_it() -> None:
    alone = replica("o1", "other", model="tuned"), replica("o2", "other", model="tuned")
    made = policy(plain(), drafting(), *alone, costs=COSTS | {"other": None})
    busy = ask(1, COPY, model="tuned")
    run(made, busy, alone[0])
    assert made.choose(ask(2, COPY, model="tuned"), states(*alone)).info in alone
    assert str(made.explain()) == "lane=other kind=copy why=only_choice"
    assert made.choices == {("other", COPY, Why.ONLY_CHOICE): 1}
    made.ended("r1", ended(61, 31), 0.0)
    assert not made.accepted


def test_a_lane_that_nobody_measured_takes_no_request_that_pins_none() -> None:
    with pytest.raises(ValueError, match="lane 'other'"):
        policy(replica("o", "other"))
    policy(replica("o", "other", takes_unpinned=False))


def test_of_a_lane_that_chooses_for_each_row_nothing_is_learnt() -> None:
    costs = COSTS | {"speculative": replace(COSTS["speculative"], is_by_row=True)}
    info = drafting()
    made = policy(info, costs=costs)
    before = choice(made, ask(1, COPY), info).scores[0].tokens_per_step
    for number in range(20):
        run(made, ask(number, COPY), info)
        made.ended(f"r{number}", ended(61, 58), 0.0)
    assert not made.accepted
    assert choice(made, ask(99, COPY), info).scores[0].tokens_per_step == before


def test_what_it_chose_is_counted_and_kept_for_people() -> None:
    lanes = plain(), drafting()
    made = policy(*lanes)
    for number in range(30):
        choice(made, ask(number, COPY), *lanes)
    assert made.choices == {("speculative", COPY, Why.SCORE): 30}
    assert len(made.last_choices) == 20
    text = str(made.last_choices[-1])
    first, second = (score.score for score in made.last_choices[-1].scores)
    assert text == f"lane=speculative score={first:.1f} other=batched:{second:.1f} kind=copy why=score"


# What lanes give over what their profile says


def serve(made: Adaptive, info: ReplicaInfo, seconds: float, *, at_s: float, batch: int = 16) -> float:
    """So many that all come at once and end at once, having got their 100 tokens; when that is."""
    name = f"{info.replica_id}{at_s}"
    for number in range(batch):
        made.placed(ask(f"{name}-{number}", OPEN), info, at_s)
    for number in range(batch):
        made.ended(f"r{name}-{number}", ended(100, None), at_s + seconds)
    return at_s + seconds


def promised_s(lane: str, batch: int = 16) -> float:
    """Of an answer of 100 tokens, by the lane's profile."""
    cost = COSTS[lane]
    k = cost.num_drafts(batch)
    rates = PRIORS[OPEN] if k else ()
    return batch * 100 / cost.cost.serve(batch, Lengths(50, 100), k, rates).tokens_per_s


def correction(made: Adaptive, lane: str, batch: float = 16) -> float:
    return made.corrections.factor(lane, batch)


@pytest.mark.parametrize("takes", [0.8, 1.0, 1.25])
def test_what_a_lane_gives_over_its_profile_is_learnt(takes: float) -> None:
    info = plain()
    made, at_s = policy(info), 0.0
    for _ in range(20):
        at_s = serve(made, info, takes * promised_s("batched"), at_s=at_s)
    assert correction(made, "batched") == pytest.approx(1 / takes, abs=0.02)
    assert [each.lane for each in made.corrections.all()] == ["batched"]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("machine", ["one", ""])
def test_a_lane_that_gives_less_than_its_profile_says_is_left(machine: str, pinned: bool) -> None:
    lanes = plain(cores=machine), drafting(cores=machine)
    made, fresh = (policy(*lanes, margin=0.05) for _ in range(2))
    for at_s in range(0, 3600, 10):
        asked = ask(at_s, COPY, lane="speculative" if pinned else None)
        made.placed(asked, lanes[1], at_s)
        made.ended(asked.request_id, ended(100, None), at_s + 10.0)
    assert correction(made, "speculative", 1) < 0.55
    assert correction(made, "speculative", 64) > 0.95
    assert correction(made, "batched", 1) > 0.95  # it was not asked for an hour
    found = choice(made, ask("x", COPY), *lanes)
    scores = {each.lane: each for each in found.scores}
    assert found.lane == "batched"
    assert scores["speculative"].correction == correction(made, "speculative", 1)
    assert scores["batched"].correction == correction(made, "batched", 1)
    before = choice(fresh, ask("x", COPY), *lanes)
    assert before.lane == "speculative"
    promised = {each.lane: each.tokens_per_s for each in before.scores}
    assert scores["speculative"].tokens_per_s == pytest.approx(
        correction(made, "speculative", 1) * promised["speculative"]
    )


def test_time_that_lanes_shared_says_nothing_of_either() -> None:
    lanes = plain(cores="one"), drafting(cores="one")
    made = policy(*lanes)
    for number, info in enumerate(lanes):
        made.placed(ask(number, OPEN), info, 0.0)
    for number in range(2):
        made.ended(f"r{number}", ended(100, None), 9.0)
    assert list(made.corrections.all()) == []


@pytest.mark.parametrize(
    ("asked", "end"),
    [
        (ask(1, OPEN), RequestEnd(ReplicaVerdict.UNTOLD, 0.1, 100)),  # its client left
        (ask(1, OPEN), RequestEnd(ReplicaVerdict.FAILED, 0.1, 100)),
        (ask(1, OPEN), RequestEnd(ReplicaVerdict.HEALTHY, 0.1, None)),
        (ask(1, OPEN, num_sequences=2), RequestEnd(ReplicaVerdict.HEALTHY, 0.1, 200)),  # which ended first?
    ],
)
def test_ends_that_say_nothing_of_the_lane(asked: SchedulingRequest, end: RequestEnd) -> None:
    made = policy(plain())
    made.placed(asked, plain(), 0.0)
    made.ended("r1", end, 9.0)
    assert list(made.corrections.all()) == []


def test_one_that_came_before_the_scheduler_says_nothing() -> None:
    made = policy(plain())
    made.adopted(Lease("r1", "b", 100))
    made.placed(ask(2, OPEN), plain(), 3.0)
    made.ended("r1", ended(100, None), 9.0)
    assert list(made.corrections.all()) == []
    made.ended("r2", ended(100, None), 9.0)
    assert [each.lane for each in made.corrections.all()] == ["batched"]


COPY_STEP_S = COSTS["speculative"].cost.serve(1, Lengths(50, 100), K, PRIORS[COPY]).step_s


def test_how_many_drafts_a_tenant_accepts_says_nothing_of_its_lanes_pace() -> None:
    info = drafting()
    made, at_s = policy(info), 0.0
    for number in range(30):
        made.placed(ask(number, COPY, tenant="hard"), info, at_s)
        at_s += 100 * COPY_STEP_S
        # Where nearly all of four tokens a step were expected it got one.
        made.ended(f"r{number}", ended(100, 100), at_s)
    assert correction(made, "speculative", 1) == pytest.approx(1, abs=0.15)


def test_one_tenant_cannot_turn_drafts_off_for_the_others() -> None:
    lanes = plain(), drafting()
    made = policy(*lanes, margin=0.05)
    for number in range(50):
        made.placed(ask(number, COPY, tenant="evil", lane="speculative"), lanes[1], 5.0 * number)
        made.ended(f"r{number}", ended(151, 151), 5.0 * number + 151 * COPY_STEP_S)
    assert choice(made, ask("x", COPY, tenant="new"), *lanes).lane == "speculative"
    assert choice(made, ask("y", COPY, tenant="evil"), *lanes).lane == "batched"


def test_drafts_that_many_found_useless_are_tried_again_after_a_while() -> None:
    lanes = plain(), drafting()
    made = policy(*lanes)
    for number in range(50):
        made.placed(ask(number, COPY, tenant=f"t{number}", lane="speculative"), lanes[1], 5.0 * number)
        made.ended(f"r{number}", ended(151, 151), 5.0 * number + 151 * COPY_STEP_S)
    chosen = []
    for hour in range(3):
        now_s = 3600.0 * hour + 60
        asked = ask(f"at{hour}", COPY, tenant="new")
        made.placed(asked, lanes[0], now_s)  # what time it is, is told by what happens
        made.ended(asked.request_id, ended(100, 100), now_s + 2.2)
        chosen.append(choice(made, ask("x", COPY, tenant="new"), *lanes).lane)
    assert chosen[0] == "batched"
    assert chosen[-1] == "speculative"


def test_on_shared_cores_a_lane_that_is_full_is_left_for_good_and_not_for_one_request() -> None:
    lanes = plain(**MACHINE), drafting(max_running=8, **MACHINE)
    made = policy(*lanes, margin=0.6)
    assert choice(made, ask("first", COPY), *lanes).lane == "speculative"
    for number in range(8):
        made.placed(ask(number, COPY), lanes[1], 0.0)
    batched, full = states(*lanes)
    assert made.awaited(ask("a", COPY), [batched], lambda: [full]) == [full]
    for _ in range(50):
        made.corrections.learn("speculative", 8, 4.0, 0.0)
        made.corrections.learn("batched", 8, 1.0, 0.0)
    assert made.awaited(ask("b", COPY), [batched], lambda: [full]) == ()
    # It has the better score again, and not by the margin: the one that was chosen meanwhile is kept.
    made.corrections = Corrections()
    assert choice(made, ask("other", COPY), *lanes).lane == "speculative", "it was not placed there yet"
    assert made.awaited(ask("b", COPY), [batched], lambda: [full]) == [full]
    for _ in range(50):
        made.corrections.learn("speculative", 8, 4.0, 0.0)
        made.corrections.learn("batched", 8, 1.0, 0.0)
    assert made.awaited(ask("b", COPY), [batched], lambda: [full]) == ()
    assert choice(made, ask("b", COPY), lanes[0]).why is Why.ONLY_CHOICE
    made.corrections = Corrections()
    kept = choice(made, ask("c", COPY), *lanes)
    assert (kept.lane, kept.why, kept.scores[0].lane) == ("batched", Why.KEPT, "speculative")


def test_on_shared_cores_a_request_that_one_lane_alone_may_serve_keeps_nothing() -> None:
    lanes = plain("b1", max_running=1, **MACHINE), plain("b2", **MACHINE), drafting(**MACHINE)
    made = policy(*lanes, margin=3.0)
    assert choice(made, ask("first", COPY), *lanes).lane == "speculative"
    made.placed(ask("first", COPY), lanes[2], 0.0)
    full, roomy, _ = states(*lanes)
    made.placed(ask("busy", OPEN, needs_plain_decoding=True), lanes[0], 0.0)
    asked = ask("plain", OPEN, needs_plain_decoding=True)
    assert made.awaited(asked, [roomy], lambda: [full]) == ()
    assert choice(made, asked, lanes[1]).lane == "batched"
    assert choice(made, ask("next", COPY), *lanes[1:]).lane == "speculative"


def test_what_a_lane_gave_fades_though_nothing_new_is_learnt() -> None:
    made = policy(plain())
    for _ in range(100):
        made.corrections.learn("batched", 1, 2.0, 0.0)
    before = correction(made, "batched", 1)
    for number in range(20):
        made.placed(ask(number, OPEN), plain(), 3600.0 + number)
        made.ended(f"r{number}", ended(5, None), 3600.5 + number)  # too short to say anything
    assert before < 0.55 < correction(made, "batched", 1)
