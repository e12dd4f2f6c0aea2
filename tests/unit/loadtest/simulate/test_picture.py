from __future__ import annotations

from typing import Any

import msgspec
import pytest

from loadtest.judge.estimate import Estimate
from loadtest.simulate.lanes import TextMix, candidates
from loadtest.simulate.picture import BEST, envelope, replicas_by_lane, without_drafts
from loadtest.simulate.plan import LanePlan, PlannedFleet
from loadtest.simulate.verdict import Verdict
from serving.calibration.profile import LaneProfile
from serving.core.speculation.cost_model import CostModel, Lengths
from serving.core.speculation.step_time import DraftCost, PromptCost
from tests.unit.loadtest.simulate.profiles import profile


def plan(lane: str, replicas: int, *, holds: bool) -> LanePlan:
    verdict = Verdict(holds, Estimate(1.0 if holds else 0.5), {}, None, True)
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


STORY = TextMix(("story",), (1.0,))


def gains_of(lane: LaneProfile, plain: CostModel, lengths: Lengths) -> dict[int, dict[str, float]]:
    """By requests at once, then by line."""
    found: dict[int, dict[str, float]] = {}
    for row in rows(envelope(lane, plain, STORY, lengths), 0):
        found.setdefault(row["sequences"], {})[row["drafts"]] = row["gain"]
    return found


def test_drafts_gain_what_a_full_replica_is_said_to_serve_with_prompts_and_all() -> None:
    """The same figures that are printed beside the picture."""
    plain, lane = profile().lanes
    learned = msgspec.structs.replace(
        lane,
        draft_cost=DraftCost(pass_s=0.001, least_passes=1),
        prompt_cost=PromptCost(step_s=0.002, token_s=0.0005),
    )
    known = msgspec.structs.replace(profile(), lanes=(plain, learned))
    lengths = Lengths(300, 20)
    batched, speculative, _ = candidates(known, (), STORY, lengths)
    gains = gains_of(learned, without_drafts(known, learned), lengths)
    served = speculative.capacity_rps / batched.capacity_rps
    assert gains[16]["k = 3"] == pytest.approx(served)
    assert served < 1
    # A draft model that has its pass and its prompts all the same is no lane without drafts.
    assert gains[16][BEST] < 1


def test_the_picture_says_what_requests_it_is_of() -> None:
    plain, lane = profile().lanes
    title = envelope(lane, plain.cost_model, STORY, Lengths(139.4, 24)).to_dict()["title"]
    assert title["subtitle"] == (
        "139 tokens of prompt, computed too, and 24 of answer on average; text: story 100%"
    )


def test_drafts_are_compared_with_the_lane_without_that_has_most_slots() -> None:
    plain, lane = profile().lanes
    single = msgspec.structs.replace(plain, lane="sequential", max_num_seqs=1)
    slower = msgspec.structs.replace(plain, prompt_cost=PromptCost(step_s=0.002))
    known = msgspec.structs.replace(profile(), lanes=(single, slower, lane))
    assert without_drafts(known, lane) == slower.cost_model
    alone = msgspec.structs.replace(profile(), lanes=(lane,))
    assert without_drafts(alone, lane) == CostModel(lane.step_time)


def test_the_envelope_is_the_best_of_all_drafts_and_of_none() -> None:
    lane = profile().lane("speculative")
    by_sequences = gains_of(lane, lane.cost_model, Lengths(100, 50))
    assert min(by_sequences) == 1
    assert max(by_sequences) == lane.max_num_seqs
    for gains in by_sequences.values():
        assert set(gains) == {"k = 1", "k = 2", "k = 3", BEST}
        assert gains[BEST] == pytest.approx(max(1.0, *gains.values()))
    assert by_sequences[1]["k = 3"] > by_sequences[16]["k = 3"]
