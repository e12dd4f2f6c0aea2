from __future__ import annotations

import pytest

from serving.config import SimulatedProfile
from serving.simulation.replica import EngineSequence, ReplicaModel, SimulatedReplica
from tests.unit.simulation.examples import arrival, model, run


def test_one_request_alone() -> None:
    # Steps end every 10 ms; the first one at or after 25 ms gives the first token, four more the rest.
    (one,) = run([arrival(0, 1.0, output_tokens=5)], model()).requests
    assert one.granted_at_s == 1.0
    assert one.first_token_at_s == pytest.approx(1.030)
    assert one.finished_at_s == pytest.approx(1.070)


def test_prefill_grows_with_the_prompt() -> None:
    # 25 ms and 100 prompt tokens of 0.3 ms: 55 ms, so the sixth step of 10 ms.
    (one,) = run([arrival(0, 0.0, 1)], model(prefill_ms_per_prompt_token=0.3)).requests
    assert one.first_token_at_s == one.finished_at_s == pytest.approx(0.060)


def test_two_at_once_share_each_step() -> None:
    # Both in every step: 12 ms. First tokens after three, at 36 ms; the first is done at 48 ms.
    # From then on steps take 10 ms again: 58 ms and 68 ms.
    first, second = run([arrival(0, 0.0, 2), arrival(1, 0.0, 4)], model()).requests
    assert (first.first_token_at_s, second.first_token_at_s) == pytest.approx((0.036, 0.036))
    assert (first.finished_at_s, second.finished_at_s) == pytest.approx((0.048, 0.068))


def test_a_request_joins_at_the_next_step_and_a_third_waits_for_a_slot() -> None:
    # q0 steps alone until q1 (arrived at 1 ms) joins at 10 ms: steps end at 22, 34 (q0's first, due at 25), 46.
    # q1 is due at 10 + 25 = 35, so at 46. Both are done then; q2 gets the room at 46 and steps of 10 ms.
    trace = [arrival(0, 0.0, 2), arrival(1, 0.001, 1), arrival(2, 0.002, 1)]
    first, second, third = run(trace, model()).requests
    assert first.first_token_at_s == pytest.approx(0.034)
    assert (first.finished_at_s, second.finished_at_s) == pytest.approx((0.046, 0.046))
    assert third.granted_at_s == pytest.approx(0.046)
    assert third.finished_at_s == pytest.approx(0.076)


def test_the_engine_itself_never_runs_more_than_its_limit() -> None:
    replica = SimulatedReplica(model(max_num_seqs=2))
    for name in "abc":
        replica.join(EngineSequence(name, prompt_tokens=0, output_tokens=1))
    assert replica.start_step(0.0) == pytest.approx(0.012)
    assert [one.request_id for one in replica.end_step(1.0)] == ["a", "b"]
    assert replica.start_step(1.0) == pytest.approx(1.010), "c alone"


def test_an_idle_replica_takes_no_step() -> None:
    assert SimulatedReplica(model()).start_step(0.0) is None


def test_time_of_a_slot_when_all_are_taken() -> None:
    # Steps of 12 ms: the third reaches 25 ms, nine more for ten tokens.
    assert model().held_when_full_s(prompt_tokens=100, output_tokens=10) == pytest.approx(12 * 0.012)


def test_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens=4 must be 0"):
        ReplicaModel(SimulatedProfile(num_speculative_tokens=4), max_num_seqs=1)
