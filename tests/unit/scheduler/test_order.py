"""Who is next, policy by policy."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.config import ORDERS, SchedulerConfig
from serving.scheduler import order
from serving.scheduler.order import (
    EarliestDeadlineFirst,
    FairTokens,
    FirstComeFirstServed,
    OrderPolicy,
    PriorityBands,
    ShortestJobFirst,
    WaitingRequest,
    order_policy,
)
from serving.scheduler.queue import WaitingQueue
from tests.unit.scheduler.examples import request, waiting


def ordered(policy: OrderPolicy, *joined: WaitingRequest) -> list[str]:
    """Ids as one subqueue serves them; `num_before` must foretell the same order."""
    subqueue = policy.new_subqueue()
    for one in joined:
        subqueue.join(one)
    found = []
    while len(subqueue):
        head = subqueue.head()
        subqueue.leave(head)
        assert subqueue.num_before(head) == 0
        found.append(head.request.request_id)
    return found


def test_fcfs_is_by_arrival_then_by_joining() -> None:
    late, early, tie = waiting("late", 2, 0), waiting("early", 1, 1), waiting("tie", 2, 2)
    assert ordered(FirstComeFirstServed(), late, early, tie) == ["early", "late", "tie"]


def policy_of(name: str) -> OrderPolicy:
    return order_policy(SchedulerConfig.model_validate({"order": name}))


@pytest.mark.parametrize("name", ORDERS)
def test_each_name_is_that_of_a_policy_of_its_own(name: str) -> None:
    assert (type(policy_of(name)).__doc__ or "").startswith(f"`{name}`")
    assert f"\n`{name}` " in (order.__doc__ or "")


@pytest.mark.parametrize("name", ORDERS)
def test_anyone_may_leave_from_the_middle_though_all_are_alike(name: str) -> None:
    policy = policy_of(name)
    subqueue = policy.new_subqueue()
    same = [waiting("same", 1, ticket) for ticket in range(5)]
    for one in same:
        subqueue.join(one)
    subqueue.leave(same[2])
    subqueue.leave(same[0])
    left = []
    while len(subqueue):
        left.append(subqueue.head())
        subqueue.leave(left[-1])
    assert left == sorted([same[1], same[3], same[4]], key=policy.rank)


# priority


def test_priority_goes_band_by_band_and_by_arrival_within_one() -> None:
    joined = [
        waiting("low", 0, 0, band=2),
        waiting("normal", 1, 1, band=1),
        waiting("high", 2, 2, band=0),
        waiting("high-early", 1.5, 3, band=0),
    ]
    assert ordered(PriorityBands(), *joined) == ["high-early", "high", "normal", "low"]


# sjf


def test_sjf_takes_the_shortest_prediction_first() -> None:
    joined = [
        waiting("long", 0, 0, predicted_output_tokens=500),
        waiting("short", 0, 1, predicted_output_tokens=10),
        waiting("middle", 0, 2, predicted_output_tokens=100),
    ]
    assert ordered(ShortestJobFirst(20), *joined) == ["short", "middle", "long"]


def test_sjf_ageing_bounds_how_long_a_long_request_is_overtaken() -> None:
    """500 tokens at 20 tokens per second of age: nobody who comes 25 s later may pass."""
    policy = ShortestJobFirst(20)
    long = waiting("long", 0, 0, predicted_output_tokens=501)
    within = waiting("within", 24.9, 1, predicted_output_tokens=1)
    beyond = waiting("beyond", 25.1, 2, predicted_output_tokens=1)
    assert ordered(policy, long, within, beyond) == ["within", "long", "beyond"]


def test_sjf_serves_a_long_request_under_endless_short_ones() -> None:
    queue = WaitingQueue(ShortestJobFirst(20))
    queue.join(request("long", predicted_output_tokens=200), 0, 600)
    overtaken = 0
    for second in range(100):
        queue.join(request(f"s{second}", predicted_output_tokens=1), second, 600)
        head = queue.head(lambda _: True)
        assert head is not None
        queue.leave(head.request.request_id)
        if head.request.request_id == "long":
            break
        overtaken += 1
    assert overtaken == 10, "199 tokens at 20 a second, one short request each second"


def test_sjf_without_ageing_never_gets_there() -> None:
    old_and_long = waiting("long", 0, 0, predicted_output_tokens=2)
    joined = [waiting(f"s{second}", second, second, predicted_output_tokens=1) for second in range(1, 50)]
    assert ordered(ShortestJobFirst(0), old_and_long, *joined)[-1] == "long"


# edf


def test_edf_takes_the_earliest_deadline_counted_from_arrival() -> None:
    joined = [
        waiting("relaxed", 0, 0, ttft_deadline_s=10.0),
        waiting("urgent", 5, 1, ttft_deadline_s=1.0),
        waiting("none", 0, 2),
        waiting("none-later", 1, 3),
    ]
    assert ordered(EarliestDeadlineFirst(), *joined) == ["urgent", "relaxed", "none", "none-later"]


# fair


def backlog(policy: FairTokens, **requests: int) -> WaitingQueue:
    """So many waiting requests of each tenant, 10 tokens in and 10 out, tenant by tenant."""
    queue = WaitingQueue(policy)
    for tenant, count in requests.items():
        for number in range(count):
            join(queue, tenant, f"{tenant}{number}")
    return queue


def join(queue: WaitingQueue, tenant: str, name: str, at_s: float = 0.0) -> None:
    asked = request(name, tenant=tenant, prompt_tokens=10, max_output_tokens=10, predicted_output_tokens=10)
    queue.join(asked, at_s, 600)


def serve(queue: WaitingQueue, policy: FairTokens, count: int) -> list[str]:
    """Dispatch so many; the tenants served."""
    served = []
    for _ in range(count):
        head = queue.head(lambda _: True)
        assert head is not None
        queue.leave(head.request.request_id)
        policy.dispatched(head.request)
        served.append(head.request.tenant)
    return served


def test_fair_serves_two_tenants_alike_though_one_asks_ten_times_as_much() -> None:
    policy = FairTokens()
    served = Counter(serve(backlog(policy, a=100, b=10), policy, 20))
    assert served == {"a": 10, "b": 10}


def test_fair_counts_tokens_and_not_requests() -> None:
    policy = FairTokens()
    queue = WaitingQueue(policy)
    for number in range(20):
        long = request(f"l{number}", tenant="long", prompt_tokens=10, predicted_output_tokens=95)
        short = request(f"s{number}", tenant="short", prompt_tokens=10, predicted_output_tokens=20)
        queue.join(long, 0, 600)
        queue.join(short, 0, 600)
    served = Counter(serve(queue, policy, 20))
    assert served == {"short": 16, "long": 4}, "50 weighted tokens against 200"


def test_fair_serves_by_weight() -> None:
    policy = FairTokens({"gold": 3})
    served = Counter(serve(backlog(policy, free=40, gold=40), policy, 20))
    assert served == {"gold": 15, "free": 5}


def test_fair_charges_the_difference_when_the_real_output_is_known() -> None:
    policy = FairTokens()
    asked = request("a", tenant="t", prompt_tokens=10, predicted_output_tokens=100)
    policy.dispatched(asked)
    assert policy.counter("t") == 10 + 2 * 100
    policy.finished(asked, output_tokens=30)
    assert policy.counter("t") == 10 + 2 * 30


def test_fair_sees_a_counter_that_changes_while_its_tenant_waits() -> None:
    policy = FairTokens()
    queue = backlog(policy, a=5, b=5)
    assert serve(queue, policy, 1) == ["a"]
    ran = request("x", tenant="a", predicted_output_tokens=40)
    policy.finished(ran, output_tokens=70)  # more than was predicted
    assert serve(queue, policy, 3) == ["b", "b", "b"]
    policy.finished(ran, output_tokens=0)  # less
    assert serve(queue, policy, 2) == ["a", "a"]


def test_fair_absence_earns_no_credit() -> None:
    policy = FairTokens()
    queue = backlog(policy, busy=60)
    serve(queue, policy, 30)
    for number in range(30):
        join(queue, "back", f"back{number}")
    assert Counter(serve(queue, policy, 20)) == {"busy": 10, "back": 10}


def test_fair_absence_earns_no_credit_though_nobody_waits() -> None:
    policy = FairTokens()
    serve(backlog(policy, busy=30), policy, 30)
    queue = backlog(policy, back=30, busy=30)
    assert Counter(serve(queue, policy, 20)) == {"busy": 10, "back": 10}


def test_fair_leaving_and_coming_back_with_the_only_request_gains_nothing() -> None:
    policy = FairTokens()
    queue = backlog(policy, a=5, b=5)
    serve(queue, policy, 1)
    before = {tenant: policy.counter(tenant) for tenant in "ab"}
    queue_of_c = request("c", tenant="c")
    queue.join(queue_of_c, 0, 600)
    lifted = policy.counter("c")
    for _ in range(3):
        queue.leave("c")
        queue.join(queue_of_c, 0, 600)
    assert policy.counter("c") == lifted == min(before.values())


def test_fair_keeps_the_place_of_a_rerouted_request_within_its_tenant() -> None:
    joined = [waiting("new", 5, 0, tenant="t"), waiting("rerouted", 1, 1, tenant="t")]
    assert ordered(FairTokens(), *joined) == ["rerouted", "new"]


def test_fair_is_one_order_over_all_subqueues() -> None:
    policy = FairTokens()
    queue = WaitingQueue(policy)
    for number in range(4):
        pinned = request(f"p{number}", "batched", tenant="a", prompt_tokens=10, predicted_output_tokens=10)
        queue.join(pinned, 0, 600)
        join(queue, "a", f"a{number}")
        join(queue, "b", f"b{number}")
    assert Counter(serve(queue, policy, 8)) == {"a": 4, "b": 4}


def test_fair_keeps_a_bounded_number_of_idle_tenants_and_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "MAX_IDLE_TENANTS", 10)
    policy = FairTokens()
    queue = backlog(policy, heavy=2, waits=1)
    heavy = request("x", tenant="heavy", prompt_tokens=1000)
    policy.dispatched(heavy)
    kept = policy.counter("heavy")
    for number in range(100):
        queue.join(request("once", tenant=f"invented{number}", prompt_tokens=1), 0, 600)
        queue.leave("once")
    known = [tenant for tenant in (f"invented{number}" for number in range(100)) if policy.knows(tenant)]
    assert 5 <= len(known) <= 10
    assert policy.counter("heavy") == kept
    assert policy.knows("waits")


def test_fair_forgets_the_idle_tenants_that_were_served_least_and_never_the_newcomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "MAX_IDLE_TENANTS", 5)
    policy = FairTokens()
    for tenant, tokens in (("a", 400), ("b", 300), ("c", 200), ("d", 100), ("last", 10)):
        policy.dispatched(request(tenant, tenant=tenant, prompt_tokens=tokens))
    policy.tenant_arrives("last")
    assert all(map(policy.knows, ("a", "b", "c", "d"))), "there are not too many yet"
    policy.tenant_arrives("new")
    known = {tenant for tenant in ("a", "b", "c", "d", "last", "new") if policy.knows(tenant)}
    assert known == {"a", "b", "last", "new"}


def test_fair_coming_back_forgives_nothing() -> None:
    policy = FairTokens()
    for tenant, tokens in (("much", 1000), ("little", 10)):
        policy.dispatched(request(tenant, tenant=tenant, prompt_tokens=tokens))
    policy.tenant_arrives("much")
    assert policy.counter("much") == 1000


def test_fair_estimates_who_goes_before_by_turns() -> None:
    policy = FairTokens()
    subqueue = policy.new_subqueue()
    for ticket in range(9):
        subqueue.join(waiting(f"a{ticket}", 0, ticket, tenant="a"))
    assert subqueue.num_before(waiting("b", 1, 9, tenant="b")) == 1
    assert subqueue.num_before(waiting("a", 1, 9, tenant="a")) == 9


@pytest.mark.parametrize(
    ("own", "tenant", "others_before"),
    [
        (0, "gold", 1),  # a third of a turn of theirs
        (3, "gold", 2),
        (0, "free", 3),  # three turns of gold's in one of its own
        (2, "free", 9),
    ],
)
def test_fair_estimates_turns_by_weight(own: int, tenant: str, others_before: int) -> None:
    subqueue = FairTokens({"gold": 3}).new_subqueue()
    other = "free" if tenant == "gold" else "gold"
    for ticket in range(20):
        subqueue.join(waiting(f"{other}{ticket}", 0, ticket, tenant=other))
    for ticket in range(own):
        subqueue.join(waiting(f"{tenant}{ticket}", 0, ticket, tenant=tenant))
    assert subqueue.num_before(waiting("new", 1, 99, tenant=tenant)) == own + others_before


def test_fair_takes_its_weights_from_the_config() -> None:
    tenants = [{"name": "gold", "weight": 3}]
    policy = order_policy(SchedulerConfig.model_validate({"order": "fair", "tenants": tenants}))
    assert isinstance(policy, FairTokens)
    assert (policy.weight("gold"), policy.weight("other")) == (3, 1)
