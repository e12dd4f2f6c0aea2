"""Nobody starves: how often a request may be overtaken is bounded under `sjf` and `fair`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.core.request import SchedulingRequest
from serving.scheduler.order import FairTokens, ShortestJobFirst
from serving.scheduler.queue import WaitingQueue

LONGEST_INPUT, LONGEST_OUTPUT = 50, 100
sizes = st.tuples(st.integers(0, LONGEST_INPUT), st.integers(1, LONGEST_OUTPUT))


def request(name: str, tenant: str, size: tuple[int, int]) -> SchedulingRequest:
    """A request of (input, predicted output) tokens."""
    prompt_tokens, output_tokens = size
    return SchedulingRequest(
        request_id=name,
        lane=None,
        prompt_tokens=prompt_tokens,
        max_output_tokens=LONGEST_OUTPUT,
        tenant=tenant,
        predicted_output_tokens=output_tokens,
    )


def next_of(queue: WaitingQueue) -> SchedulingRequest:
    head = queue.head(lambda _: True)
    assert head is not None
    queue.leave(head.request.request_id)
    return head.request


@given(
    length=st.integers(1, LONGEST_OUTPUT),
    ageing=st.sampled_from([1.0, 5.0, 20.0]),
    others=st.lists(st.tuples(st.floats(0, 10), st.integers(1, LONGEST_OUTPUT)), max_size=60),
)
def test_under_sjf_nobody_who_comes_later_than_length_over_ageing_overtakes(
    length: int, ageing: float, others: list[tuple[float, int]]
) -> None:
    """One is served at each arrival, so the queue is never empty of rivals."""
    queue = WaitingQueue(ShortestJobFirst(ageing))
    queue.join(request("victim", "t", (0, length)), 0, 1e9)
    now_s, sent = 0.0, {}
    for number, (pause_s, other_length) in enumerate(others):
        now_s += pause_s
        sent[f"q{number}"] = (now_s, other_length)
        queue.join(request(f"q{number}", "t", (0, other_length)), now_s, 1e9)
        served = next_of(queue)
        if served.request_id == "victim":
            return
        arrived_s, served_length = sent[served.request_id]
        assert served_length <= length, "only shorter ones overtake"
        assert arrived_s <= (length - served_length) / ageing + 1e-9


@given(
    size=sizes,
    weights=st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.5, 1.0, 4.0])),
    flood=st.lists(st.tuples(sizes, st.integers(0, LONGEST_OUTPUT)), min_size=1, max_size=80),
)
def test_under_fair_a_newcomer_waits_for_one_request_of_each_other_tenant_at_most_and_its_debt(
    size: tuple[int, int], weights: tuple[float, float], flood: list[tuple[tuple[int, int], int]]
) -> None:
    """However much a tenant has waiting, it is served one largest request beyond the newcomer's counter."""
    policy = FairTokens({"flood": weights[0], "newcomer": weights[1]})
    queue = WaitingQueue(policy)
    for number, (other, _) in enumerate(flood):
        queue.join(request(f"f{number}", "flood", other), 0, 1e9)
    outputs = {f"f{number}": output for number, (_, output) in enumerate(flood)}
    for _ in range(len(flood) // 2):  # it has been alone for a while
        served = next_of(queue)
        policy.dispatched(served)
        policy.finished(served, outputs[served.request_id])
    queue.join(request("newcomer", "newcomer", size), 1, 1e9)
    overtook = 0
    while (served := next_of(queue)).tenant == "flood":
        overtook += 1
        policy.dispatched(served)  # all at once: nothing ends meanwhile
    assert overtook <= 1
