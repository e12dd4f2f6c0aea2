from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from serving.config import SchedulerConfig
from serving.core.speculation.acceptance import geometric_rates
from serving.core.speculation.cost_model import CostModel, Lengths
from serving.core.speculation.step_time import LinearStepTime
from serving.simulation.calibrated import LaneModel, same_drafts
from serving.simulation.planned_lab import Offered, PlannedLab, PlannedRun, Watch

STEP = CostModel(LinearStepTime(0.010, 0.0005, 0))
PLAIN = LaneModel("batched", STEP, same_drafts(0, 4), ((), ()))
RATES = geometric_rates(0.8, 3)
DRAFTED = LaneModel("speculative", STEP, same_drafts(3, 4), (RATES, (0.0,)))


def poisson(rate_per_s: float, num_requests: int, output_tokens: int = 20, kinds: int = 1) -> list[Offered]:
    rng, at_s, offered = random.Random(7), 0.0, []
    for number in range(num_requests):
        at_s += rng.expovariate(rate_per_s)
        offered.append(Offered(at_s, 50, output_tokens, number % kinds))
    return offered


def run(
    offered: list[Offered],
    *fleet: tuple[LaneModel, int],
    num_cells: int = 1,
    watch: Watch | None = None,
    **settings: object,
) -> PlannedRun:
    config = SchedulerConfig.model_validate(settings)
    return PlannedLab(config, fleet, offered, num_cells=num_cells).run(watch=watch)


def closed(offered: list[Offered], num_users: int) -> PlannedRun:
    return PlannedLab(SchedulerConfig(), [(PLAIN, 1)], offered, num_users=num_users).run()


def test_one_request_takes_its_prompt_s_step_and_one_for_each_further_token() -> None:
    done = run([Offered(2.0, 50, 11)], (PLAIN, 1))
    assert done.ttft_s[0] == pytest.approx(0.010 + 50 * 0.0005)
    assert done.tpot_s[0] == pytest.approx(0.0105)
    assert done.e2e_s[0] == pytest.approx(0.035 + 10 * 0.0105)
    assert (done.num_refused, done.was_given_up) == (0, False)
    (use,) = done.replicas
    assert (use.lane, use.num_steps, use.num_requests) == ("batched", 11, 1)
    assert use.busy_share == pytest.approx(0.140 / 2.140)


def test_who_finds_no_slot_waits_in_the_scheduler() -> None:
    done = run([Offered(0.0, 1, 2)] * 5, (PLAIN, 1))
    # The first begins alone, three more fill the batch, and the fifth takes the first one's place.
    assert done.ttft_s == pytest.approx([0.0105, 0.0225, 0.0225, 0.0225, 0.0345])
    assert done.tpot_s == pytest.approx([0.0120, 0.0120, 0.0120, 0.0120, 0.0105])


def test_the_scheduler_s_own_bounds_hold() -> None:
    offered = [Offered(0.0, 10, 200)] * 20
    full = run(offered, (PLAIN, 1), max_waiting_requests=3)
    assert full.num_refused == 13
    assert np.isinf(full.ttft_s).sum() == 13
    late = run(offered, (PLAIN, 1), max_queue_wait_s=1.0)
    # 200 steps of 4 take about 2.4 s: nobody of the second batch is in time.
    assert late.num_refused == 16
    assert late.ended.all()
    assert late.lasted_s < 4


def test_load_is_spread_over_the_replicas() -> None:
    done = run(poisson(20, 400), (PLAIN, 4))
    served = [use.num_requests for use in done.replicas]
    assert sum(served) == 400
    assert min(served) > 60


def test_speculation_lowers_tpot_by_what_is_accepted() -> None:
    few = poisson(0.5, 400, output_tokens=80, kinds=2)
    plain, drafted = run(few, (PLAIN, 1)), run(few, (DRAFTED, 1))
    guessable, others = drafted.tpot_s[::2], drafted.tpot_s[1::2]
    # Steps of four positions instead of one.
    assert np.median(guessable) < 0.5 * np.median(plain.tpot_s)
    assert np.median(others) == pytest.approx(0.012, rel=0.05)


def test_a_steady_rate_comes_out_as_the_cost_model_expects() -> None:
    lengths = Lengths(50, 80)
    capacity = STEP.capacity_rps(4, lengths, 0, ())
    outlook = STEP.at_rate(0.5 * capacity, 4, lengths, 0, ())
    assert outlook is not None
    done = run(poisson(0.5 * capacity, 3000, output_tokens=80), (PLAIN, 1))
    assert np.mean(done.tpot_s) == pytest.approx(outlook.tpot_s, rel=0.05)


@pytest.mark.parametrize("num_cells", [1, 4])
def test_a_seed_gives_the_same_run_again(num_cells: int) -> None:
    offered = poisson(15, 300, kinds=2)
    one, two = (run(offered, (DRAFTED, 4), num_cells=num_cells) for _ in range(2))
    assert one.e2e_s.tolist() == two.e2e_s.tolist()


def test_cells_cost_what_a_common_queue_saves() -> None:
    rate = 0.9 * 8 * STEP.capacity_rps(4, Lengths(50, 20), 0, ())
    offered = poisson(rate, 4000)
    common = run(offered, (PLAIN, 8), max_waiting_requests=100_000)
    cells = run(offered, (PLAIN, 8), num_cells=8, max_waiting_requests=100_000)
    assert np.percentile(cells.ttft_s, 95) > 1.5 * np.percentile(common.ttft_s, 95)
    assert all(use.num_requests == pytest.approx(500, rel=0.2) for use in cells.replicas)
    with pytest.raises(ValueError, match="9 cells of 8 replicas"):
        run(offered, (PLAIN, 8), num_cells=9)


def test_users_of_a_closed_loop_send_when_their_answer_has_ended() -> None:
    done = closed([Offered(1.0, 50, 11), Offered(99.0, 50, 11), Offered(2.0, 50, 11)], num_users=1)
    # 35 ms for the prompt and ten steps of 10.5 ms, one request after the other.
    assert done.e2e_s == pytest.approx([0.140] * 3)
    assert done.arrived_at_s == pytest.approx([1.0, 1.140, 1.280])
    assert done.lasted_s == pytest.approx(1.420)
    late = closed([Offered(1.0, 50, 11), Offered(99.0, 50, 11), Offered(2.0, 50, 11)], num_users=2)
    assert late.arrived_at_s == pytest.approx([1.0, 1.140, 1.280])
    lengths = Lengths(50, 60)
    many = closed([Offered(0.0, 50, 60)] * 400, num_users=4)
    expected = STEP.serve(4, lengths, 0, ())
    assert many.output_tokens.sum() / many.lasted_s == pytest.approx(expected.tokens_per_s, rel=0.02)
    # Requests of one length stay in step: no prompt falls into another's answer.
    assert np.mean(many.tpot_s) < expected.tpot_s
    assert closed([Offered(0.0, 5, 6)], num_users=9).ended.all()


class GivesUp(Watch):
    def __init__(self) -> None:
        self.seen = 0

    def ended(self, ttft_s: float, tpot_s: float, e2e_s: float) -> None:
        self.seen += 1

    def is_lost(self) -> bool:
        return self.seen > 1500


def test_a_run_of_steps_that_differ_ends_whoever_comes_meanwhile() -> None:
    noisy = replace(PLAIN, step_noise=0.5)
    offered = poisson(20.0, 2000)
    done = PlannedLab(SchedulerConfig(), [(noisy, 3)], offered).run()
    assert done.ended.all()
    assert np.isfinite(done.e2e_s).all()
    assert (done.ttft_s > 0).all()
    even = PlannedLab(SchedulerConfig(), [(PLAIN, 3)], offered).run()
    assert np.median(done.tpot_s) == pytest.approx(float(np.median(even.tpot_s)), rel=0.1)
    assert np.percentile(done.ttft_s, 95) > np.percentile(even.ttft_s, 95)


def test_a_watch_ends_a_run_that_is_lost() -> None:
    watch = GivesUp()
    done = run(poisson(20, 5000), (PLAIN, 4), watch=watch)
    assert done.was_given_up
    assert watch.seen == done.ended.sum() == 2000
    assert math.isinf(done.e2e_s[-1])
