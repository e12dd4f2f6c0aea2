from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pydantic import ValidationError

from serving.config import LabConfig, StepCosts
from serving.core.errors import ConfigError
from serving.core.speculation.cost_model import CostModel
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.proposers.from_profile import cost_model, doubts, paths_of, tables_in_words, with_profiles
from tests.profiles import lane_profile, write_profile

STEP = LinearStepTime(0.02, 0.002, 1e-6)
COST = DraftCost(0.004, 0.003, 0.0005)
RATES = {"story": (0.6, 0.4, 0.2), "copy": (0.8, 0.6, 0.4)}
TABLE = {"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": "auto"}


def written(
    folder: Path, speculation: dict[str, Any], cost: DraftCost | None = COST, **use: Any
) -> dict[str, Any]:
    """A lane's speculation once the profile beside its config was read."""
    measured = lane_profile("fast", STEP, cost, RATES if cost else None, {"story": 0.5})
    write_profile(folder / "p.json", measured, lane_profile("plain", STEP))
    lane = {
        "name": "fast",
        "strategy": "speculative",
        "speculation": speculation | {"profile": {"path": "p.json"} | use},
    }
    lab = LabConfig.model_validate({"lanes": [lane | {"strategy": "speculative"}]}, strict=False)
    found = with_profiles(lab, folder).lane("fast").speculation
    assert found is not None
    return found.model_dump()


def test_a_table_is_the_cost_models(tmp_path: Path) -> None:
    found = written(tmp_path, TABLE)["num_speculative_tokens_per_batch_size"]
    expected = CostModel(STEP, COST).batch_table(512, (0.7, 0.5, 0.3), 3, 16, 0.75)
    assert found == tuple((each.first, each.last, each.num_drafts) for each in expected)
    assert found[0][0] == 1
    assert found[-1][1] == 16
    assert len(found) > 1


def test_a_table_for_one_workload_goes_by_its_acceptance(tmp_path: Path) -> None:
    tables = [
        written(tmp_path, TABLE, workload=name)["num_speculative_tokens_per_batch_size"] for name in RATES
    ]
    expected = CostModel(STEP, COST).batch_table(512, RATES["copy"], 3, 16)
    assert tables[1] == tuple((each.first, each.last, each.num_drafts) for each in expected)
    assert tables[0] != tables[1]


def test_the_pass_that_a_learned_draft_has_anyway_decides_nothing(tmp_path: Path) -> None:
    head = {"method": "adaptive", "drafter": "eagle3", "model": "auto"}
    copied = written(tmp_path, {"method": "adaptive"})["costs"]
    learned = written(tmp_path, head)["costs"]
    for costs in (copied, learned):
        assert (costs["fixed_s"], costs["token_s"], costs["kv_token_s"]) == (0.02, 0.002, 1e-6)
        assert (costs["draft_step_s"], costs["draft_pass_s"]) == (0.004, 0.003)
        assert costs["draft_pass_sequence_s"] == 0.0005
    by_copied, by_learned = (cost_model(StepCosts(**copied), name) for name in ("ngram", "eagle3"))
    assert by_copied.decode_step_s(2, 0, 0) == pytest.approx(STEP.step_s(2, 0))
    assert by_learned.decode_step_s(2, 0, 0) == pytest.approx(STEP.step_s(2, 0) + 0.004 + 0.003 + 2 * 0.0005)
    for drafts in (1, 3):
        assert by_learned.decode_step_s(2, 0, drafts) == by_copied.decode_step_s(2, 0, drafts)


def test_copied_drafts_need_no_lane_that_drafts(tmp_path: Path) -> None:
    costs = written(tmp_path, {"method": "adaptive"}, lane="plain")["costs"]
    assert (costs["fixed_s"], costs["draft_pass_s"]) == (0.02, 0)


def test_what_is_given_is_kept(tmp_path: Path) -> None:
    given = {"method": "adaptive", "costs": {"fixed_s": 1.0, "token_s": 2.0}}
    assert written(tmp_path, given)["costs"]["token_s"] == 2
    table = [[1, 2, 1]]
    assert written(tmp_path, TABLE | {"num_speculative_tokens_per_batch_size": table})[
        "num_speculative_tokens_per_batch_size"
    ] == ((1, 2, 1),)


@pytest.mark.parametrize(
    ("speculation", "use", "fault"),
    [
        (TABLE, {"path": "gone.json"}, "gone.json: cannot be read: No such file"),
        (TABLE, {"lane": "slow"}, "p.json: lane 'slow' is not in the profile; it has fast, plain"),
        (TABLE, {"lane": "plain"}, "p.json: lane 'plain' has no acceptance"),
        (
            TABLE,
            {"workload": "chat"},
            r"p.json: lane 'fast' has no workload 'chat' \(profile.workload\); it has copy, story",
        ),
        (
            {"method": "adaptive", "drafter": "eagle3", "model": "auto"},
            {"lane": "plain"},
            r"p.json: lane 'plain' makes no drafts, and eagle3 costs time: .*\(profile.lane\)",
        ),
        (
            TABLE | {"num_speculative_tokens": 5},
            {},
            r"p.json: lane 'fast' was measured with 3 drafts a step, .* of 5 gives \(num_speculative_tokens\)",
        ),
    ],
)
def test_what_a_profile_lacks_is_named_with_file_lane_and_setting(
    tmp_path: Path, speculation: dict[str, Any], use: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^lanes\[fast\]\.speculation\.profile: .*{fault}"):
        written(tmp_path, speculation, **use)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", lane_profile("fast", STEP, COST, RATES, {}))
    lane = {"name": "fast", "strategy": "speculative", "speculation": TABLE | {"profile": {"path": "p.json"}}}
    lab = LabConfig.model_validate({"model": {"name": "other"}, "lanes": [lane]}, strict=False)
    with pytest.raises(ConfigError, match=r"p\.json: was measured on model .*, and is used for 'other'"):
        with_profiles(lab, tmp_path)


def test_steps_that_cost_nothing_but_their_tokens_can_be_reckoned_with(tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", lane_profile("fast", LinearStepTime(0, 0.002, 0), COST, RATES, {}))
    lane = {"name": "fast", "strategy": "speculative", "speculation": TABLE | {"profile": {"path": "p.json"}}}
    lab = with_profiles(LabConfig.model_validate({"lanes": [lane]}, strict=False), tmp_path)
    (line,) = tables_in_words(lab)
    assert re.fullmatch(r"lane fast drafts \d at 1 to \d+ sequences(, \d at \d+ to \d+ sequences)*", line)
    with pytest.raises(ValidationError, match="fixed_s and token_s are 0: a step takes time"):
        StepCosts(fixed_s=0, token_s=0)


def test_profiles_that_fit_badly_are_named(tmp_path: Path) -> None:
    good = lane_profile("fast", STEP, COST, RATES, {})
    bad = structs.replace(good, residuals=replace(good.residuals, median_share=0.5))
    write_profile(tmp_path / "good.json", good)
    write_profile(tmp_path / "bad.json", bad)
    lanes = [
        {
            "name": name,
            "strategy": "speculative",
            "speculation": TABLE | {"profile": {"path": path, "lane": "fast"}},
        }
        for name, path in (("a", "good.json"), ("b", "bad.json"), ("c", "bad.json"))
    ]
    lab = LabConfig.model_validate({"lanes": lanes}, strict=False)
    by_hand = TABLE | {
        "num_speculative_tokens_per_batch_size": [[1, 16, 1]],
        "profile": {"path": "gone.json"},
    }
    hand = {"name": "d", "strategy": "speculative", "speculation": by_hand}
    assert doubts(paths_of(LabConfig.model_validate({"lanes": [hand]}, strict=False), tmp_path)) == []
    paths = paths_of(lab, tmp_path)
    assert [path.name for path in paths] == ["good.json", "bad.json"]
    (doubt,) = doubts(paths)
    assert doubt.startswith(
        f"{tmp_path / 'bad.json'}: half of the measured steps are further from the fit than: fast 50%"
    )
