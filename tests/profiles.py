"""Profiles that were measured nowhere, for tests of what is made of one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from serving.calibration import profile
from serving.calibration.fit import Residuals
from serving.calibration.profile import FORMAT, LaneProfile, Profile
from serving.core.speculation.acceptance import Rates
from serving.core.speculation.step_time import DraftCost, LinearStepTime

RESIDUALS = Residuals(24, 0.01, 0.03, 0.2, 1)


def lane_profile(
    lane: str,
    step_time: LinearStepTime,
    draft_cost: DraftCost | None = None,
    acceptance: Mapping[str, Rates] | None = None,
    draft_share: Mapping[str, float] | None = None,
) -> LaneProfile:
    """A lane that drafts, if it is said what that costs."""
    rates = dict(acceptance or {})
    return LaneProfile(
        lane,
        max_num_seqs=16,
        step_time=step_time,
        residuals=RESIDUALS,
        num_drafts=max(map(len, rates.values()), default=0),
        draft_cost=draft_cost,
        acceptance=rates,
        draft_share=dict(draft_share or {}),
    )


def write_profile(path: Path, *lanes: LaneProfile) -> Path:
    """A file of these lanes."""
    profile.save(
        Profile(FORMAT, datetime(2026, 3, 1, tzinfo=UTC), "smollm2-135m", {"cores": 2}, {}, lanes), path
    )
    return path
