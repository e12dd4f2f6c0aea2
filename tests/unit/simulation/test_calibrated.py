from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.speculation.acceptance import Rates, extended, geometric_rates
from serving.core.speculation.cost_model import BatchRange, CostModel, Lengths
from serving.core.speculation.step_time import (
    DraftCost,
    LinearStepTime,
    PromptCost,
    RooflineStepTime,
    StepTime,
)
from serving.simulation.calibrated import (
    CalibratedReplica,
    LaneModel,
    SimulatedSequence,
    same_drafts,
    table_drafts,
)
from serving.simulation.planned_lab import Offered

STEP = LinearStepTime(0.010, 0.0005, 1e-6)
ROOF = RooflineStepTime(0.010, 0.0005, 1e-6)


def lane(
    step: StepTime = STEP,
    drafts_by_batch: tuple[int, ...] = same_drafts(0, 4),
    rates: Rates = (),
    max_step_tokens: int = 64,
    kv_tokens: int | None = None,
    draft_cost: DraftCost | None = None,
) -> LaneModel:
    cost = CostModel(step, draft_cost or DraftCost())
    return LaneModel("any", cost, drafts_by_batch, (rates,), max_step_tokens, kv_tokens)


def fast(model: LaneModel, offered: list[Offered]) -> list[tuple[float, float]]:
    """First token and end of each request, by the replica under test."""
    replica = CalibratedReplica(model, random.Random(1))
    first, ended = [0.0] * len(offered), [0.0] * len(offered)
    coming = 0
    while coming < len(offered) or replica.ends_at_s is not None:
        arrives_at_s = offered[coming].at_s if coming < len(offered) else float("inf")
        if replica.ends_at_s is not None and replica.ends_at_s <= arrives_at_s:
            now_s = replica.ends_at_s
            first_tokens, finished = replica.end()
            for sequence in first_tokens:
                first[sequence.number] = now_s
            for sequence in finished:
                ended[sequence.number] = now_s
            replica.start(now_s)
        else:
            _, prompt_tokens, output_tokens, kind = offered[coming]
            replica.join(SimulatedSequence(coming, prompt_tokens, output_tokens, kind), arrives_at_s)
            coming += 1
            if replica.ends_at_s is None:
                replica.start(arrives_at_s)
    return list(zip(first, ended, strict=True))


def one_by_one(
    model: LaneModel, offered: list[Offered], rng: random.Random | None = None
) -> list[tuple[float, float]]:
    """The same by single steps, each sequence counted for itself; without `rng` every draft is accepted."""
    (rates,) = model.acceptance
    first, ended = [0.0] * len(offered), [0.0] * len(offered)
    waiting = list(range(len(offered)))
    running: list[int] = []
    computed = [0] * len(offered)  # of the prompt
    made = [0] * len(offered)
    now_s = 0.0
    while waiting or running:
        if not running:
            now_s = max(now_s, offered[waiting[0]].at_s)
        while waiting and len(running) < model.max_num_seqs:
            request = offered[waiting[0]]
            promised = sum(offered[i].prompt_tokens + offered[i].output_tokens for i in running)
            wanted = promised + request.prompt_tokens + request.output_tokens
            is_too_much = model.kv_tokens is not None and running and wanted > model.kv_tokens
            # Who comes at the very end of a step is late for the next one.
            if is_too_much or request.at_s > now_s or (running and request.at_s == now_s):
                break
            running.append(waiting.pop(0))
        decoding = [number for number in running if made[number]]
        drafts = model.drafts_by_batch[len(decoding)]
        kv_tokens = sum(computed[number] + made[number] for number in running)
        budget = max(1, model.max_step_tokens - len(decoding) * (drafts + 1))
        positions = len(decoding) * (drafts + 1)
        chunks = {}
        for number in running:
            if not made[number] and budget:
                chunks[number] = min(budget, offered[number].prompt_tokens - computed[number])
                budget -= chunks[number]
                positions += chunks[number]
        now_s += model.cost.step_time.step_s(positions, kv_tokens)
        now_s += model.cost.draft_cost.draft_s(drafts, len(decoding))
        for number in decoding:
            chance = rng.random() if rng else 0.0
            accepted = sum(chance < rate for rate in extended(rates, drafts)) if rng else drafts
            made[number] = min(offered[number].output_tokens, made[number] + accepted + 1)
        for number, tokens in chunks.items():
            computed[number] += tokens
            if computed[number] == offered[number].prompt_tokens:
                made[number] = 1
                first[number] = now_s
        for number in list(running):
            if made[number] == offered[number].output_tokens:
                running.remove(number)
                ended[number] = now_s
    return list(zip(first, ended, strict=True))


requests = st.lists(
    st.tuples(st.floats(0, 0.3), st.integers(1, 150), st.integers(1, 40)), min_size=1, max_size=12
).map(
    lambda drawn: [
        Offered(at_s, prompt, output)
        for at_s, (_, prompt, output) in zip(
            itertools.accumulate(gap for gap, _, _ in drawn), drawn, strict=True
        )
    ]
)


def flat(times: list[tuple[float, float]]) -> list[float]:
    return [instant for pair in times for instant in pair]


@settings(max_examples=150)
@given(requests, st.sampled_from([STEP, ROOF, LinearStepTime(0.01, 0.0005, 0)]), st.sampled_from([None, 300]))
def test_a_stretch_of_steps_is_what_single_steps_are(
    offered: list[Offered], step: StepTime, kv_tokens: int | None
) -> None:
    model = lane(step, kv_tokens=kv_tokens)
    assert flat(fast(model, offered)) == pytest.approx(flat(one_by_one(model, offered)), rel=1e-9)


@settings(max_examples=60)
@given(requests)
def test_drafts_that_are_all_accepted_come_out_as_in_single_steps(offered: list[Offered]) -> None:
    # The KV cache is free here: the last draft of an answer may be cut, and the mean growth does not know where.
    model = lane(
        LinearStepTime(0.01, 0.0005, 0),
        same_drafts(3, 4),
        (1.0, 1.0, 1.0),
        draft_cost=DraftCost(0.001, 0.0005, 0.0002),
    )
    assert flat(fast(model, offered)) == pytest.approx(flat(one_by_one(model, offered)), rel=1e-9)


def test_k_that_follows_the_batch_changes_what_is_left() -> None:
    table = (BatchRange(1, 1, 3), BatchRange(2, 4, 0))
    model = lane(LinearStepTime(0.01, 0, 0), table_drafts(table, 4), (1.0, 1.0, 1.0))
    assert model.drafts_by_batch == (3, 3, 0, 0, 0)
    # Alone the first makes 4 tokens a step, beside the second 1.
    offered = [Offered(0.0, 10, 401), Offered(0.505, 10, 51)]
    (_, first_ends_s), (second_s, second_ends_s) = fast(model, offered)
    assert second_s == pytest.approx(0.52)
    assert second_ends_s == pytest.approx(0.52 + 50 * 0.01)
    # 50 steps of 4, the step of the second's prompt with 4 more, 50 of 1, and what is left by 4.
    left = 400 - 4 * 51 - 50
    assert first_ends_s == pytest.approx(second_ends_s + 0.01 * -(-left // 4), abs=0.011)


@pytest.mark.parametrize(
    "table",
    [
        (BatchRange(1, 7, 4), BatchRange(8, 8, 0)),
        (BatchRange(1, 7, 4), BatchRange(8, 8, 1)),
        (BatchRange(1, 5, 4), BatchRange(6, 6, 2), BatchRange(7, 7, 1), BatchRange(8, 8, 0)),
    ],
)
@pytest.mark.parametrize("step", [LinearStepTime(0.010, 0.0005, 0), LinearStepTime(0.010, 0.0005, 2e-5)])
def test_a_k_that_changes_all_the_time_takes_as_long_as_in_single_steps(
    table: tuple[BatchRange, ...], step: StepTime
) -> None:
    # A prompt joins, an answer ends: of eight sequences seven decode, then eight, and k changes each time.
    model = lane(step, table_drafts(table, 8), geometric_rates(0.7, 4), max_step_tokens=2048)
    rng = random.Random(5)
    offered = [Offered(0.0, 100, rng.randint(20, 60)) for _ in range(1200)]
    lasted_s, expected_s = (
        max(flat(times)) for times in (fast(model, offered), one_by_one(model, offered, rng))
    )
    assert lasted_s == pytest.approx(expected_s, rel=0.015)


@pytest.mark.parametrize("tokens", [8, 60, 400])
@pytest.mark.parametrize(
    "rates", [geometric_rates(0.7, 3), (0.66, 0.45, 0.29), (0.1,), (0.95, 0.9, 0.9, 0.85)]
)
def test_steps_of_an_answer_have_mean_and_spread_of_drawn_drafts(rates: Rates, tokens: int) -> None:
    rng = random.Random(3)

    def drawn() -> int:
        """By the definition: position by position, until one is not accepted."""
        made = steps = 0
        while made < tokens:
            chance = rng.random()
            made += 1 + sum(chance < rate for rate in rates)
            steps += 1
        return steps

    def simulated() -> int:
        model = lane(LinearStepTime(1.0, 0, 0), same_drafts(len(rates), 1), rates)
        replica = CalibratedReplica(model, rng)
        replica.join(SimulatedSequence(0, 1, tokens + 1, 0), 0.0)
        replica.start(0.0)
        replica.end()
        replica.start(1.0)
        replica.end()
        return replica.num_steps - 1

    expected, got = ([draw() for _ in range(2000)] for draw in (drawn, simulated))
    assert statistics.mean(got) == pytest.approx(statistics.mean(expected), rel=0.03)
    assert statistics.stdev(got) == pytest.approx(statistics.stdev(expected), rel=0.25, abs=0.15)


def test_a_full_batch_gives_what_the_cost_model_expects() -> None:
    rates = geometric_rates(0.7, 3)
    model = lane(drafts_by_batch=same_drafts(3, 8), rates=rates, max_step_tokens=2048)
    lengths = Lengths(100, 60)
    offered = [Offered(i * 1e-6, 100, 60) for i in range(800)]
    ends_s = sorted(end_s for _, end_s in fast(model, offered))
    # Not the first and the last of them, which find the batch half empty.
    per_s = 600 / (ends_s[700] - ends_s[100])
    assert per_s == pytest.approx(model.cost.capacity_rps(8, lengths, 3, rates), rel=0.03)


def test_steps_that_differ_take_as_long_on_average_and_differ_as_much() -> None:
    steady = lane(drafts_by_batch=same_drafts(0, 1))
    # One after the other: each has a step for its prompt, and nine in one stretch.
    offered = [Offered(10.0 * i, 20, 10) for i in range(4000)]

    def lasted_s(model: LaneModel) -> tuple[list[float], list[float]]:
        times = fast(model, offered)
        firsts = [first - asked.at_s for (first, _), asked in zip(times, offered, strict=True)]
        return firsts, [end - first for first, end in times]

    pairs = zip(lasted_s(steady), lasted_s(replace(steady, step_noise=0.3)), strict=True)
    for (even_s, uneven_s), num_steps in zip(pairs, (1, 9), strict=True):
        mean_s = statistics.fmean(even_s)
        assert statistics.fmean(uneven_s) == pytest.approx(mean_s, rel=0.02)
        assert statistics.stdev(uneven_s) == pytest.approx(0.3 * mean_s / num_steps**0.5, rel=0.06)


class Scripted(random.Random):
    """Draws these factors of noise, one after the other."""

    def __init__(self, *factors: float) -> None:
        super().__init__(1)
        self.factors = list(factors)

    def lognormvariate(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return self.factors.pop(0)


@pytest.mark.parametrize(("last", "ends_s"), [(1.0, 0.5), (3.0, 0.7), (0.1, 0.45)])
def test_who_comes_in_the_middle_waits_for_a_step_that_differs_as_one_step_does(
    last: float, ends_s: float
) -> None:
    # A step takes 100 ms: one for the prompt, then a stretch of twenty.
    model = replace(lane(LinearStepTime(0.1, 0.0, 0.0)), step_noise=0.3)
    replica = CalibratedReplica(model, Scripted(1.0, 1.0, last))
    replica.join(SimulatedSequence(0, 10, 21, 0), 0.0)
    assert replica.start(0.0) == pytest.approx(0.1)
    replica.end()
    assert replica.start(0.1) == pytest.approx(2.1)
    # In the fourth step of the stretch, which ends no sooner than now.
    replica.join(SimulatedSequence(1, 10, 5, 0), 0.45)
    assert replica.ends_at_s == pytest.approx(ends_s)
    replica.end()
    assert replica.num_steps == 1 + 4


def test_a_lane_without_room_or_kinds_of_text_is_refused() -> None:
    with pytest.raises(ValueError, match="needs an entry for 0 and for 1"):
        lane(drafts_by_batch=(0,))
    with pytest.raises(ValueError, match="one kind of text"):
        LaneModel("any", CostModel(STEP), (0, 0), ())


def test_drafts_that_are_not_always_found_compute_less() -> None:
    step = LinearStepTime(0.0, 0.001, 0)
    seldom = LaneModel("any", CostModel(step), same_drafts(4, 4), ((0.0,), (0.0,)), 64, None, (0.25,))
    # Of the first kind a step computes 2 positions for a sequence, of the other 5.
    (_, seldom_s), (_, always_s) = (fast(seldom, [Offered(0.0, 10, 11, kind)])[0] for kind in (0, 1))
    assert seldom_s == pytest.approx(0.010 + 10 * 0.002)
    assert always_s == pytest.approx(0.010 + 10 * 0.005)


def test_an_engine_that_chooses_k_for_each_row_drafts_for_the_kinds_where_it_pays() -> None:
    model = LaneModel(
        "any",
        CostModel(LinearStepTime(0.0, 0.001, 0), DraftCost(0.010, 0.020, 0.003)),
        same_drafts(2, 2),
        ((1.0, 1.0), (0.0, 0.0)),
        64,
        drafts_by_kind=((2, 2, 2), (0, 0, 0)),
    )
    # Alone: of the first kind 9 tokens in 3 steps of 3 positions, with the draft; of the other 9 plain steps.
    (_, drafted_s), (_, plain_s) = (fast(model, [Offered(0.0, 10, 10, kind)])[0] for kind in (0, 1))
    assert drafted_s == pytest.approx(0.010 + 3 * (0.003 + 0.010 + 2 * (0.020 + 0.003)))
    assert plain_s == pytest.approx(0.010 + 9 * 0.001)
    # The second comes a step later, so its prompt shares a step with the first's drafts; then two steps have
    # both, 3 + 1 positions and drafts for one row only.
    (_, first_s), (_, second_s) = fast(model, [Offered(0.0, 5, 10, 0), Offered(0.0, 5, 10, 1)])
    draft_s = 0.010 + 2 * (0.020 + 0.003)
    assert first_s == pytest.approx(0.005 + (3 + 5) * 0.001 + 2 * 0.004 + 3 * draft_s)
    assert second_s == pytest.approx(first_s + 7 * 0.001)


def test_rows_with_drafts_of_different_length_share_the_passes_of_the_longest() -> None:
    model = LaneModel(
        "any",
        CostModel(LinearStepTime(0.0, 0.001, 0), DraftCost(0.010, 0.020, 0.003)),
        same_drafts(2, 2),
        ((1.0, 1.0), (1.0, 1.0)),
        64,
        drafts_by_kind=((2, 2, 2), (1, 1, 1)),
    )
    # The second's prompt comes in the first's first step with drafts; then two have both: 3 + 2 positions, two
    # passes, three drafted tokens.
    (_, first_s), _ = fast(model, [Offered(0.0, 5, 10, 0), Offered(0.0, 5, 10, 1)])
    alone_s, both_s = 0.010 + 2 * 0.020 + 2 * 0.003, 0.010 + 2 * 0.020 + 3 * 0.003
    assert first_s == pytest.approx(0.005 + (3 + 5) * 0.001 + alone_s + 2 * (0.005 + both_s))


def test_a_learned_draft_has_its_pass_where_nothing_is_drafted() -> None:
    cost = CostModel(LinearStepTime(0.01, 0.001, 0), DraftCost(0.002, 0.003, 0.0005, least_passes=1))
    model = LaneModel("a", cost, same_drafts(0, 4), ((0.5,),))
    engine = CalibratedReplica(model, random.Random(1))
    for number in range(2):
        engine.join(SimulatedSequence(number, 10, 11, 0), 0.0)
    now_s = 0.0
    while (ends_at_s := engine.start(now_s)) is not None:
        now_s = ends_at_s
        engine.end()
    prompts_s, decode_s = 0.01 + 0.020, 0.01 + 0.002 + 0.002 + 0.003 + 2 * 0.0005
    assert now_s == pytest.approx(prompts_s + 10 * decode_s)


def test_prompts_cost_what_the_lane_says() -> None:
    cost = CostModel(LinearStepTime(0.01, 0.001, 0), prompt_cost=PromptCost(0.02, 0.0001, 0.005))
    engine = CalibratedReplica(LaneModel("a", cost, same_drafts(0, 4), ((),)), random.Random(1))
    engine.join(SimulatedSequence(0, 30, 6, 0), 0.0)
    now_s = 0.0
    while (ends_at_s := engine.start(now_s)) is not None:
        now_s = ends_at_s
        engine.end()
    assert now_s == pytest.approx(0.01 + 0.03 + 0.02 + 0.003 + 0.005 + 5 * 0.011)
    alone = cost.serve(1, Lengths(30, 6), 0, ())
    assert alone.tokens_per_s == pytest.approx(6 / now_s)


def test_drafts_of_a_kind_are_as_many_as_those_of_the_lane() -> None:
    with pytest.raises(
        ValueError, match="drafts_by_kind has 2 entries for a kind of text, drafts_by_batch 3"
    ):
        LaneModel("any", CostModel(STEP), same_drafts(1, 2), ((0.5,),), drafts_by_kind=((1, 1),))
