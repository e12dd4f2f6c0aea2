"""The study as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loadtest.study.analysis import Study
from loadtest.study.schedule import KINDS, LEVELS, rise_and_fall


def figures_of(study: Study) -> dict[str, Any]:
    """Every arm's goodput by step and by load, regret, gain, misses, TPOT, and where its requests went."""
    whole = study.steps_of(None)
    return {
        "step_s": study.step_s,
        "repeats": study.num_repeats,
        "offered_rps": [study.offered_rps((step,)) for step in range(len(rise_and_fall()))],
        "best_fixed": {"whole run": study.best_fixed()}
        | {f"{level:g}": study.best_fixed(level) for level in LEVELS},
        "arms": {
            arm: {
                "goodput_rps": asdict(study.goodput_rps(arm, whole)),
                "gain": asdict(study.gain(arm)),
                "by_step_goodput_rps": [
                    asdict(study.goodput_rps(arm, (step,))) for step in range(len(rise_and_fall()))
                ],
                "by_load": {f"{level:g}": _at(study, arm, level) for level in LEVELS},
            }
            for arm in study.arms
        },
    }


def _at(study: Study, arm: str, level: float) -> dict[str, Any]:
    steps = study.steps_of(level)
    return {
        "goodput_rps": asdict(study.goodput_rps(arm, steps)),
        "regret": asdict(study.regret(arm, level)),
        "misses": study.misses(arm, steps),
        "tpot_p50_s": study.tpot_p50_s(arm, steps),
        "lanes": {KINDS[kind]: shares for kind, shares in study.lane_shares(arm, steps).items()},
    }
