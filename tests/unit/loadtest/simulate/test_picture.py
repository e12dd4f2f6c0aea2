from __future__ import annotations

from typing import Any

import pytest

from loadtest.simulate.lanes import TextMix
from loadtest.simulate.picture import BEST, envelope, replicas_by_lane
from loadtest.simulate.plan import LanePlan, PlannedFleet
from loadtest.simulate.verdict import Verdict
from serving.core.speculation.cost_model import Lengths
from tests.unit.loadtest.simulate.profiles import profile


def plan(lane: str, replicas: int, *, holds: bool) -> LanePlan:
    verdict = Verdict(holds, 1.0 if holds else 0.5, {}, None)
    fleet = PlannedFleet(lane, replicas, verdict, (0.1, 0.2), (0.01, 0.02), 100.0, 0.25, 0, 10, False, 0.1)
    return LanePlan(lane, fleet if holds else None, (fleet,))


def rows(chart: Any, place: int) -> list[dict[str, Any]]:
    drawn = chart.to_dict()
    found: list[dict[str, Any]] = drawn["layer"][place].get("data", drawn.get("data"))["values"]
    return found


def test_bars_are_as_long_as_the_fewest_replicas() -> None:
    drawn = replicas_by_lane([plan("batched", 3, holds=True), plan("speculative", 8, holds=False)], 8)
    assert [(row["lane"], row["replicas"], row["label"]) for row in rows(drawn, 0)] == [
        ("batched", 3, "3 replicas, 25% of slots used"),
        ("speculative", 0, "not with 8 replicas"),
    ]


def test_the_envelope_is_the_best_of_all_drafts_and_of_none() -> None:
    lane = profile().lane("speculative")
    drawn = envelope(lane, TextMix(("story",), (1.0,)), Lengths(100, 50))
    by_sequences: dict[int, dict[str, float]] = {}
    for row in rows(drawn, 0):
        by_sequences.setdefault(row["sequences"], {})[row["drafts"]] = row["gain"]
    assert min(by_sequences) == 1
    assert max(by_sequences) == lane.max_num_seqs
    for gains in by_sequences.values():
        assert set(gains) == {"k = 1", "k = 2", "k = 3", BEST}
        assert gains[BEST] == pytest.approx(max(1.0, *gains.values()))
    assert by_sequences[1]["k = 3"] > by_sequences[16]["k = 3"]
