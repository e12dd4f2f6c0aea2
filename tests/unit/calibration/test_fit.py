from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.calibration.fit import (
    StepPoint,
    fit_draft_cost,
    fit_linear,
    fit_plain,
    fit_prompt_cost,
    fit_roofline,
)
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import (
    DraftCost,
    LinearStepTime,
    PromptCost,
    RooflineStepTime,
    StepTime,
)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (0, 200, 1000)
LINEAR = LinearStepTime(fixed_s=0.020, token_s=0.0008, kv_token_s=4e-7)
DRAFT = DraftCost(step_s=0.003, pass_s=0.001, pass_sequence_s=0.0004)


def steps(form: StepTime, noise: float = 0.0, seed: int = 1) -> list[StepPoint]:
    rng = random.Random(seed)
    return [
        StepPoint(tokens, tokens * context, form.step_s(tokens, tokens * context) * rng.gauss(1, noise))
        for tokens in TOKENS
        for context in CONTEXTS
    ]


@given(
    st.builds(
        LinearStepTime,
        st.floats(1e-3, 0.2),
        st.one_of(st.just(0.0), st.floats(1e-5, 0.01)),
        st.one_of(st.just(0.0), st.floats(1e-7, 1e-5)),
    )
)
def test_a_speculation_step_time_is_found_again(form: LinearStepTime) -> None:
    fit = fit_linear(steps(form))
    assert fit.residuals.max_share < 1e-6
    assert fit.form.fixed_s == pytest.approx(form.fixed_s, rel=1e-3)
    assert fit.form.token_s == pytest.approx(form.token_s, rel=1e-3, abs=1e-8)
    assert fit.form.kv_token_s == pytest.approx(form.kv_token_s, rel=1e-3, abs=1e-11)


def test_the_form_of_a_fit_is_that_of_steps_which_nothing_held_up_and_its_level_the_mean_s() -> None:
    points = steps(LINEAR, noise=0.02)
    for place in (3, 9, 15, 20):  # four of 24 took three times as long
        points[place] = StepPoint(points[place].tokens, points[place].kv_tokens, 3 * points[place].seconds)
    fit = fit_linear(points)
    level = (20 + 4 * 3) / 24
    assert fit.form.fixed_s == pytest.approx(level * LINEAR.fixed_s, rel=0.05)
    assert fit.form.token_s == pytest.approx(level * LINEAR.token_s, rel=0.1)
    assert fit.residuals.num_points == 24
    assert fit.residuals.num_outliers >= 4
    assert fit.residuals.median_share == pytest.approx(level - 1, abs=0.04)
    assert fit.residuals.max_share == pytest.approx(1 - level / 3, abs=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_the_noise_of_steps_is_found_again(noise: float) -> None:
    points = [point for seed in range(40) for point in steps(LINEAR, noise, seed)]
    assert fit_linear(points).residuals.noise == pytest.approx(noise, rel=0.1, abs=1e-6)
    drafted = [
        replace(point, num_drafts=3, drafted_sequences=2, seconds=point.seconds + DRAFT.draft_s(3, 2))
        for point in points
    ]
    # What is added has no noise of its own here.
    assert 0.5 * noise <= fit_draft_cost(drafted, LINEAR).residuals.noise <= noise + 1e-6


def test_a_step_that_was_held_up_for_long_counts_as_one_for_a_while() -> None:
    points = steps(LINEAR)
    points[3] = StepPoint(points[3].tokens, points[3].kv_tokens, 1000 * points[3].seconds)
    level = (23 + 3) / 24
    assert fit_linear(points).form.fixed_s == pytest.approx(level * LINEAR.fixed_s, rel=0.01)


def test_a_step_with_prompts_that_takes_longer_is_known_by_it() -> None:
    """As on a GPU, where only steps without prompts are replayed from a graph."""
    plain = [*steps(LINEAR)]
    prompts = [
        StepPoint(tokens, 50, LINEAR.step_s(tokens, 50) + 0.015, prompt_tokens=tokens - 3)
        for tokens in (40, 60, 300, 700)
    ]
    fit, prompt_cost = fit_plain([*plain, *prompts])
    assert fit.form.fixed_s == pytest.approx(LINEAR.fixed_s, rel=0.01)
    assert fit.form.token_s == pytest.approx(LINEAR.token_s, rel=0.01)
    assert prompt_cost.step_s == pytest.approx(0.015, rel=0.01)
    assert (prompt_cost.token_s, prompt_cost.alone_s) == (0, 0)
    assert fit.residuals.max_share < 0.01
    drafting = [
        StepPoint(tokens, 0, LINEAR.step_s(tokens, 0) + 0.015 + 0.002 + 1e-4 * tokens, prompt_tokens=tokens)
        for tokens in (40, 60, 300, 700)
    ]
    model = CostModel(LINEAR, prompt_cost=PromptCost(0.015))
    found = fit_prompt_cost(drafting, model)
    assert (found.step_s, found.token_s) == pytest.approx((0.017, 1e-4), rel=0.01)
    assert fit_prompt_cost(drafting[:2], CostModel(LINEAR)) == PromptCost()


def test_prompts_that_come_to_an_idle_engine_are_no_measure_of_others() -> None:
    alone = [
        StepPoint(tokens, 0, LINEAR.step_s(tokens, 0) + 0.015, prompt_tokens=tokens)
        for tokens in (40, 60, 300)
    ]
    fit, prompt_cost = fit_plain([*steps(LINEAR), *alone])
    assert fit.form.fixed_s == pytest.approx(LINEAR.fixed_s, rel=0.02)
    assert prompt_cost.step_s == 0
    assert prompt_cost.alone_s == pytest.approx(0.015, rel=0.05)
    drafting = [replace(point, seconds=point.seconds + 0.004) for point in (*alone, alone[0])]
    found = fit_prompt_cost(drafting, CostModel(fit.form, prompt_cost=prompt_cost))
    assert found.alone_s == prompt_cost.alone_s
    assert found.step_s == pytest.approx(0.004, rel=0.1)


@pytest.mark.parametrize("seconds", [1e-3, 5e-5, 1e-6])
def test_one_step_that_seems_to_take_no_time_moves_nothing(seconds: float) -> None:
    fit = fit_linear([*steps(LINEAR, noise=0.02), StepPoint(1, 200, seconds)])
    assert fit.form.fixed_s == pytest.approx(LINEAR.fixed_s, rel=0.05)
    assert fit.form.token_s == pytest.approx(LINEAR.token_s, rel=0.1)


def test_no_coefficient_of_a_fit_is_negative() -> None:
    # Wider steps that take less time: noise, and not what a token gives back.
    points = [
        StepPoint(tokens, 10 * context, 0.02 - 1e-5 * tokens) for tokens in TOKENS for context in CONTEXTS
    ]
    form = fit_linear(points).form
    assert form.token_s == 0
    assert form.fixed_s == pytest.approx(0.02, rel=0.05)


def test_steps_without_kv_are_fitted_without_it() -> None:
    points = [StepPoint(tokens, 0, LINEAR.step_s(tokens, 0)) for tokens in TOKENS]
    assert fit_linear(points).form.kv_token_s == 0
    assert fit_linear(points).form.token_s == pytest.approx(LINEAR.token_s)


@pytest.mark.parametrize("knee", [3.0, 20.0, 70.0])
def test_the_roofline_s_knee_is_found_again(knee: float) -> None:
    form = RooflineStepTime(read_s=0.02, token_s=0.02 / knee, kv_token_s=2e-7)
    fit = fit_roofline(steps(form, noise=0.01))
    assert fit.form.knee_tokens == pytest.approx(knee, rel=0.1)
    assert fit.form.read_s == pytest.approx(form.read_s, rel=0.03)
    assert fit.form.kv_token_s == pytest.approx(form.kv_token_s, rel=0.1)


def test_each_form_fits_what_was_made_by_it_better() -> None:
    roofline = RooflineStepTime(read_s=0.02, token_s=0.001, kv_token_s=2e-7)
    for form, own, other in ((LINEAR, fit_linear, fit_roofline), (roofline, fit_roofline, fit_linear)):
        points = steps(form, noise=0.002)
        assert own(points).residuals.p95_share < other(points).residuals.p95_share


def test_the_cost_of_speculation_drafts_is_what_steps_take_longer() -> None:
    points = [
        StepPoint(
            batch * (k + 1),
            batch * 100,
            LINEAR.step_s(batch * (k + 1), batch * 100) + DRAFT.draft_s(k, batch),
            k,
            batch,
        )
        for batch in (1, 4, 8)
        for k in (1, 3, 5)
    ]
    fit = fit_draft_cost(points, LINEAR)
    assert fit.residuals.max_share < 1e-6
    assert fit.form.step_s == pytest.approx(DRAFT.step_s, rel=1e-3)
    assert fit.form.pass_s == pytest.approx(DRAFT.pass_s, rel=1e-3)
    assert fit.form.pass_sequence_s == pytest.approx(DRAFT.pass_sequence_s, rel=1e-3)
    # Of one k alone, the sum at that k is all that is known.
    of_3 = fit_draft_cost([point for point in points if point.num_drafts == 3], LINEAR).form
    assert of_3.step_s == 0
    assert of_3.draft_s(3, 4) == pytest.approx(DRAFT.draft_s(3, 4), rel=1e-3)


def test_points_that_say_too_little_are_refused() -> None:
    with pytest.raises(ValueError, match="3 steps without drafts were measured; a fit needs 4"):
        fit_linear(steps(LINEAR)[:3])
    alike = [StepPoint(8, 800, 0.03)] * 6
    with pytest.raises(ValueError, match="too much alike"):
        fit_linear(alike)
    one_context = [StepPoint(tokens, 100 * tokens, 0.02 + 0.001 * tokens) for tokens in TOKENS]
    with pytest.raises(ValueError, match="several lengths of context"):
        fit_roofline(one_context)
    with pytest.raises(ValueError, match="no step with drafts"):
        fit_draft_cost(steps(LINEAR), LINEAR)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "values", [(0, 0, 0.1), (1, -1, 0.1), (1, 0, 0), (1, 0, NAN), (1, INF, 1), (INF, 0, 1)]
)
def test_what_is_no_step_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="is none"):
        StepPoint(*values)
