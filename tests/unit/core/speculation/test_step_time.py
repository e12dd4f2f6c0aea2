from __future__ import annotations

import math

import pytest

from serving.core.speculation.step_time import DraftCost, LinearStepTime, RooflineStepTime

# LLaMA-2 13B in int8 weights and bf16 arithmetic on eight TPU v5e: scaling-book, chapter on inference.
BATCHES = (1, 8, 16, 32, 64, 240)
V5E_X8 = {"parameters": 13e9, "weights_bytes": 26e9, "flops_per_s": 8 * 1.97e14, "bytes_per_s": 6.56e12}


@pytest.mark.parametrize(
    ("kv_bytes", "step_ms", "tokens_per_s"),
    [
        (
            6.7e9,
            (4.98, 12.13, 20.30, 36.65, 69.33, 249.09),
            (200.61, 659.30, 787.99, 873.21, 923.13, 963.53),
        ),
        (
            1.34e9,
            (4.17, 5.60, 7.23, 10.50, 17.04, 52.99),
            (239.94, 1429.19, 2212.48, 3047.62, 3756.62, 4529.34),
        ),
    ],
)
def test_roofline_table_of_the_13b_model(
    kv_bytes: float, step_ms: tuple[float, ...], tokens_per_s: tuple[float, ...]
) -> None:
    roofline = RooflineStepTime.of_hardware(**V5E_X8, kv_bytes_per_token=kv_bytes)  # of a whole sequence
    steps_s = [roofline.step_s(batch, kv_tokens=batch) for batch in BATCHES]
    assert [round(1000 * step_s, 2) for step_s in steps_s] == list(step_ms)
    assert [round(batch / step_s, 2) for batch, step_s in zip(BATCHES, steps_s, strict=True)] == list(
        tokens_per_s
    )


def test_roofline_of_a_30b_model_on_16_chips() -> None:
    roofline = RooflineStepTime.of_hardware(
        parameters=30e9,
        weights_bytes=30e9,
        flops_per_s=16 * 1.97e14,
        bytes_per_s=16 * 8.1e11,
        kv_bytes_per_token=819e6,  # of a whole sequence
    )
    assert roofline.step_s(4, 4) == pytest.approx(2.5e-3, abs=0.1e-3)
    assert roofline.step_s(256, 256) == pytest.approx(21e-3, abs=0.1e-3)


def test_roofline_knee_of_an_h100_is_its_critical_batch() -> None:
    roofline = RooflineStepTime.of_hardware(
        parameters=8e9, weights_bytes=16e9, flops_per_s=989e12, bytes_per_s=3.35e12
    )
    assert roofline.knee_tokens == pytest.approx(295, abs=0.5)
    assert roofline.step_s(295, 0) == pytest.approx(roofline.step_s(1, 0), rel=1e-3)
    assert roofline.step_s(590, 0) == pytest.approx(2 * roofline.read_s, rel=1e-2)


def test_linear_speculation_step_adds_what_is_in_it() -> None:
    linear = LinearStepTime(fixed_s=0.020, token_s=0.001, kv_token_s=1e-6)
    assert linear.step_s(8, 4000) == pytest.approx(0.032)
    assert linear.knee_tokens == pytest.approx(20)
    assert LinearStepTime(0.02, 0, 0).knee_tokens == math.inf


def test_speculation_drafts_cost_by_step_pass_and_sequence() -> None:
    cost = DraftCost(step_s=0.004, pass_s=0.001, pass_sequence_s=0.0005)
    assert cost.draft_s(3, sequences=8) == pytest.approx(0.004 + 3 * 0.005)
    assert cost.draft_s(0, sequences=8) == 0
    assert cost.draft_s(3, sequences=0) == 0


def test_speculation_by_a_learned_draft_has_a_pass_in_every_step() -> None:
    cost = DraftCost(0.001, 0.002, 0.0005, least_passes=1)
    assert cost.draft_s(0, 4) == cost.draft_s(1, 4) == pytest.approx(0.001 + 0.002 + 4 * 0.0005)
    assert cost.draft_s(0, 0) == 0
    assert DraftCost(0.001, 0.002, 0.0005).draft_s(0, 4) == 0
    with pytest.raises(ValueError, match="least_passes=2 must be 0 or 1"):
        DraftCost(least_passes=2)


def test_speculation_times_below_0_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token_s=-0\.001 must be"):
        LinearStepTime(0.02, -0.001, 0)
    with pytest.raises(ValueError, match="pass_s=nan must be"):
        DraftCost(pass_s=math.nan)
