from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.speculation.acceptance import geometric_rates, tokens_per_step
from serving.core.speculation.cost_model import (
    BatchRange,
    CostModel,
    Lengths,
    free_draft_crossover,
)
from serving.core.speculation.step_time import DraftCost, LinearStepTime, RooflineStepTime

H100_KNEE = 989e12 / 3.35e12  # FLOP/s over bytes/s, two bytes and two operations a parameter
CPU = CostModel(LinearStepTime(0.020, 0.001, 1e-6), DraftCost(0.004, 0.001, 0.0005))
WIDE = 4096
LENGTHS = Lengths(prompt_tokens=100, output_tokens=51)

step_times = st.one_of(
    st.builds(LinearStepTime, st.floats(1e-4, 0.1), st.floats(1e-6, 0.01), st.floats(0, 1e-6)),
    st.builds(RooflineStepTime, st.floats(1e-4, 0.1), st.floats(1e-6, 0.01), st.floats(0, 1e-6)),
)
draft_costs = st.builds(DraftCost, st.floats(0, 0.01), st.floats(0, 0.01), st.floats(0, 0.001))
models = st.builds(CostModel, step_times, draft_costs)
acceptances = st.floats(0, 1).map(lambda acceptance: geometric_rates(acceptance, 8))


# Batches on an H100 in bf16, without KV and with free drafts: E * 295 / (k + 1).
@pytest.mark.parametrize(
    ("acceptance", "by_k"),
    [
        (0.5, {1: 221, 3: 138, 5: 97, 7: 74}),
        (0.7, {1: 251, 3: 187, 5: 145, 7: 116}),
        (0.8, {1: 266, 3: 218, 5: 182, 7: 154}),
        (0.9, {1: 280, 3: 254, 5: 231, 7: 210}),
    ],
)
def test_roofline_crossover_of_speculation(acceptance: float, by_k: dict[int, int]) -> None:
    model = CostModel(RooflineStepTime(read_s=H100_KNEE, token_s=1.0))
    for num_drafts, crossover in by_k.items():
        rates = geometric_rates(acceptance, num_drafts)
        free = free_draft_crossover(H100_KNEE, num_drafts, rates)
        assert round(free) == crossover
        found = model.crossover_batch(0, num_drafts, rates, max_batch=300)
        assert found is not None
        assert found - 1 <= free <= found


def test_speculation_crossover_moves_up_with_context() -> None:
    # An 8B model with grouped queries on an H100 at 0.7 of its bandwidth, 0.5 of its arithmetic; a draft of 0.03.
    roofline = RooflineStepTime.of_hardware(
        parameters=8.2e9,
        weights_bytes=16.4e9,
        flops_per_s=0.5 * 989e12,
        bytes_per_s=0.7 * 3.35e12,
        kv_bytes_per_token=2 * 36 * 8 * 128 * 2,
    )

    def crossover(context: int) -> int | None:
        draft = DraftCost(pass_s=0.03 * roofline.read_s, pass_sequence_s=0.03 * roofline.kv_token_s * context)
        return CostModel(roofline, draft).crossover_batch(context, 3, geometric_rates(0.7, 3), WIDE)

    assert crossover(512) == pytest.approx(199, abs=2)
    assert crossover(4096) is None


def test_a_speculation_step_pays_for_drafts_and_for_verifying_them() -> None:
    outlook = CPU.decode(batch=8, context_tokens=500, num_drafts=3, rates=(0.6, 0.3, 0.1))
    assert outlook.step_s == pytest.approx((0.020 + 0.032 + 0.004) + (0.004 + 3 * (0.001 + 0.004)))
    assert outlook.tokens_per_step == pytest.approx(2.0)
    assert outlook.tpot_s == pytest.approx(outlook.step_s / 2)
    assert outlook.tokens_per_s == pytest.approx(8 * 2 / outlook.step_s)


@given(models, st.floats(1, 256), st.floats(0, 10_000), acceptances, st.integers(0, 8))
def test_the_best_speculation_is_never_below_any_other(
    model: CostModel, batch: float, context: float, rates: tuple[float, ...], max_drafts: int
) -> None:
    best = model.best_num_drafts(batch, context, rates, max_drafts)
    most = max(model.decode(batch, context, k, rates).tokens_per_s for k in range(max_drafts + 1))
    assert model.decode(batch, context, best, rates).tokens_per_s == most


def test_speculation_that_is_never_accepted_is_not_done() -> None:
    assert CPU.best_num_drafts(1, 100, geometric_rates(0, 4), max_drafts=4) == 0
    # Free to draft and to verify, and of no use: still none.
    assert CostModel(LinearStepTime(0.02, 0, 0)).best_num_drafts(1, 100, (0.0,), 4) == 0


@given(models, st.floats(0, 10_000), acceptances)
def test_past_its_crossover_speculation_loses(
    model: CostModel, context: float, rates: tuple[float, ...]
) -> None:
    def pays(batch: int) -> bool:
        drafted, plain = model.decode(batch, context, 3, rates), model.decode(batch, context, 0, ())
        return drafted.tokens_per_s >= plain.tokens_per_s

    crossover = model.crossover_batch(context, 3, rates, max_batch=64)
    assert not any(pays(batch) for batch in range(crossover or 65, 65))
    assert crossover == 1 or pays(64 if crossover is None else crossover - 1)


def test_the_speculation_table_covers_every_batch_once() -> None:
    table = CPU.batch_table(100, geometric_rates(0.7, 4), max_drafts=4, max_batch=32)
    batches = [batch for part in table for batch in range(part.first, part.last + 1)]
    assert batches == list(range(1, 33))
    ks = [part.num_drafts for part in table]
    assert ks == sorted(ks, reverse=True)
    assert len(set(ks)) == len(ks) > 1
    for part in table:
        for batch in (part.first, part.last):
            assert CPU.best_num_drafts(batch, 100, geometric_rates(0.7, 4), 4) == part.num_drafts
    assert CPU.batch_table(100, (0.0,), 4, 32) == (BatchRange(1, 32, 0),)


def test_speculation_capacity_counts_prompts_too() -> None:
    # 51 tokens without drafts are 51 steps, and the prompt's 100 positions are spread over them.
    served = CPU.serve(10, LENGTHS, 0, ())
    positions = 10 * 150 / 51
    assert served.step_s == pytest.approx(0.020 + 0.001 * positions + 1e-6 * 10 * 125.5)
    assert served.tokens_per_s == pytest.approx(10 / served.step_s)
    assert CPU.capacity_rps(10, LENGTHS, 0, ()) == pytest.approx(served.tokens_per_s / 51)


@given(models, st.floats(0.01, 0.99), acceptances, st.integers(0, 4))
def test_speculation_at_a_rate_serves_that_rate(
    model: CostModel, load: float, rates: tuple[float, ...], num_drafts: int
) -> None:
    capacity = model.capacity_rps(16, LENGTHS, num_drafts, rates)
    outlook = model.at_rate(load * capacity, 16, LENGTHS, num_drafts, rates)
    assert outlook is not None
    assert outlook.tokens_per_s / LENGTHS.output_tokens == pytest.approx(load * capacity, rel=1e-6)
    # Little's law: as many run as come in the time that one stays.
    steps = 1 + (LENGTHS.output_tokens - 1) / tokens_per_step(rates[:num_drafts])
    assert outlook.batch == pytest.approx(load * capacity * steps * outlook.step_s, rel=1e-6)
    assert model.at_rate(1.01 * capacity, 16, LENGTHS, num_drafts, rates) is None


def test_speculation_that_seldom_finds_a_draft_verifies_less() -> None:
    whole, half = (CPU.decode(8, 0, 4, (0.3,), share) for share in (1.0, 0.5))
    drafting_s = CPU.draft_cost.draft_s(4, 8) - CPU.draft_cost.draft_s(4, 4)
    assert whole.step_s - half.step_s == pytest.approx(8 * 2 * 0.001 + drafting_s), "of half as many rows"
    assert half.tokens_per_step == whole.tokens_per_step
    seldom = CPU.batch_table(0, (0.3, 0.2), max_drafts=2, max_batch=32, draft_share=0.2)
    always = CPU.batch_table(0, (0.3, 0.2), max_drafts=2, max_batch=32)
    drafts = [
        sum(part.num_drafts * (part.last + 1 - part.first) for part in each) for each in (seldom, always)
    ]
    assert drafts[0] > drafts[1]
    capacities = [CPU.capacity_rps(8, LENGTHS, 4, (0.3,), share) for share in (1.0, 0.5)]
    assert capacities[1] > capacities[0]
    outlook = CPU.at_rate(0.5 * capacities[1], 8, LENGTHS, 4, (0.3,), 0.5)
    assert outlook is not None
    assert outlook.tokens_per_s == pytest.approx(0.5 * capacities[1] * LENGTHS.output_tokens)
