"""A profile with times that a reader can work out."""

from __future__ import annotations

from datetime import UTC, datetime

from serving.calibration.fit import Residuals
from serving.calibration.profile import FORMAT, LaneProfile, Profile
from serving.core.speculation.acceptance import Rates
from serving.core.speculation.step_time import DraftCost, LinearStepTime

STEP = LinearStepTime(fixed_s=0.010, token_s=0.0005, kv_token_s=0)
RESIDUALS = Residuals(20, 0.01, 0.02, 0.03, 0)
ACCEPTANCE: dict[str, Rates] = {"copy": (0.9, 0.8, 0.7), "story": (0.4, 0.2, 0.1)}


def profile() -> Profile:
    """`batched`, and `speculative` with three drafts that cost little; both with 16 slots."""
    return Profile(
        FORMAT,
        datetime(2026, 3, 1, tzinfo=UTC),
        "any-model",
        {"cores": 2},
        {"vllm": "0.32.0"},
        (
            LaneProfile("batched", 16, STEP, RESIDUALS),
            LaneProfile(
                "speculative",
                16,
                STEP,
                RESIDUALS,
                num_drafts=3,
                draft_cost=DraftCost(pass_s=0.0002),
                acceptance=ACCEPTANCE,
            ),
        ),
    )
