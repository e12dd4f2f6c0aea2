"""What is expected of lanes before a request was seen, by a profile."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import pytest
from msgspec import structs

from serving import config
from serving.calibration.fit import Residuals
from serving.calibration.profile import LaneProfile, Profile, save
from serving.core.errors import ConfigError
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from serving.core.speculation.text_kind import TextKind
from serving.scheduler.lane_costs import LaneCost, lane_costs_of

STEP = LinearStepTime(0.02, 0.002, 0)
FITTED = Residuals(20, 0.01, 0.02, 0.03, 0)
PROFILE = Profile(
    1,
    datetime(2026, 3, 1, tzinfo=UTC),
    "smollm2-135m",
    {},
    {},
    (
        LaneProfile("batched", 16, STEP, FITTED),
        LaneProfile(
            "speculative",
            16,
            STEP,
            FITTED,
            num_drafts=2,
            draft_cost=DraftCost(0.001),
            acceptance={"copy": (0.9, 0.8), "chat": (0.4, 0.2), "rag": (0.6, 0.4), "mine": (0.1, 0.0)},
            draft_share={"copy": 0.9, "chat": 0.2},
        ),
    ),
)
LAB = """
lanes:
  - {name: batched, strategy: batched, engine: openai, urls: ["http://127.0.0.1:1"]}
  - {name: %s, strategy: speculative, engine: openai, urls: ["http://127.0.0.1:2"], takes_unpinned: %s}
scheduler: {placement: %s, profile: %s}
"""


def lab(
    tmp_path: Path, *, lane: str = "speculative", takes: bool = True, placement: str = "adaptive"
) -> config.LabConfig:
    save(PROFILE, tmp_path / "profile.json")
    (tmp_path / "lab.yaml").write_text(LAB % (lane, str(takes).lower(), placement, tmp_path / "profile.json"))
    return config.load(tmp_path / "lab.yaml")


def known(given: config.LabConfig, lane: str) -> LaneCost:
    cost = (lane_costs_of(given) or {})[lane]
    assert cost is not None
    return cost


def test_workloads_are_kinds_of_text_and_those_of_one_kind_their_mean(tmp_path: Path) -> None:
    cost = known(lab(tmp_path), "speculative")
    assert cost.priors[TextKind.COPY] == (0.9, 0.8)
    assert cost.priors[TextKind.GROUNDED] == pytest.approx((0.5, 0.3))
    assert set(cost.priors) == {TextKind.COPY, TextKind.GROUNDED}, "what no kind is known of says nothing"
    assert cost.share(TextKind.GROUNDED) == pytest.approx(0.6)  # 1 where it was not given
    assert cost.share(TextKind.OPEN) == pytest.approx((0.9 + 0.6) / 2)
    assert (cost.num_drafts(1), cost.num_drafts(500), cost.max_drafts) == (2, 2, 2)
    assert cost.cost.decode_step_s(1, 0, 2) == pytest.approx(0.02 + 3 * 0.002 + 0.001)


def test_a_lane_that_the_profile_lacks_is_named_with_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.profile = .*lane 'other' is not in the profile"):
        lane_costs_of(lab(tmp_path, lane="other"))
    assert set(lane_costs_of(lab(tmp_path, lane="other", takes=False)) or {}) == {"batched"}
    assert lane_costs_of(lab(tmp_path, lane="other", placement="least_outstanding")) is None
    (tmp_path / "lab.yaml").unlink()
    given = lab(tmp_path)
    (tmp_path / "profile.json").unlink()
    with pytest.raises(ConfigError, match=r"scheduler\.profile = .*cannot be read"):
        lane_costs_of(given)


def test_a_lane_of_another_model_without_a_name_takes_no_such_request_and_needs_no_profile(
    tmp_path: Path,
) -> None:
    save(PROFILE, tmp_path / "profile.json")
    given = config.LabConfig.model_validate(
        {
            "lanes": [
                {"name": "batched", "strategy": "batched"},
                {"name": "other", "strategy": "batched", "model": {"path": "other"}},
            ],
            "scheduler": {"placement": "adaptive", "profile": str(tmp_path / "profile.json")},
        }
    )
    assert set(lane_costs_of(given) or {}) == {"batched"}


@pytest.mark.parametrize(
    ("num_drafts", "fault"),
    [
        (2, None),
        (5, r"scheduler\.profile = .*lane 'speculative' drafts 5 tokens a step and was measured with 2"),
        (None, r"lane 'speculative' drafts 0 tokens"),
    ],
)
def test_a_lane_that_drafts_other_than_when_it_was_measured_is_refused(
    tmp_path: Path, num_drafts: int | None, fault: str | None
) -> None:
    save(PROFILE, tmp_path / "profile.json")
    drafting: dict[str, object] = {"name": "speculative", "strategy": "batched"}
    if num_drafts is not None:
        drafts = {"method": "ngram", "num_speculative_tokens": num_drafts}
        drafting |= {"strategy": "speculative", "speculation": drafts}
    given = config.LabConfig.model_validate(
        {
            "lanes": [{"name": "batched", "strategy": "batched"}, drafting],
            "scheduler": {"placement": "adaptive", "profile": str(tmp_path / "profile.json")},
        }
    )
    if fault is None:
        assert set(lane_costs_of(given) or {}) == {"batched", "speculative"}
        return
    with pytest.raises(ConfigError, match=fault):
        lane_costs_of(given)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    given = lab(tmp_path)
    save(structs.replace(PROFILE, model="other"), tmp_path / "profile.json")
    with pytest.raises(
        ConfigError,
        match=r"^scheduler\.profile = .*was measured on model 'other', and is used for 'smollm2-135m'",
    ):
        lane_costs_of(given)


def test_adaptive_without_a_profile_is_refused() -> None:
    data = {"lanes": [{"name": "b", "strategy": "batched"}], "scheduler": {"placement": "adaptive"}}
    with pytest.raises(ConfigError, match="'adaptive' needs profile"):
        config.from_data(data, "lab.yaml")


MAX_NUM_SEQS = 64
BATCHES = range(1, MAX_NUM_SEQS + 1)


def with_drafts(tmp_path: Path, **speculation: object) -> config.LabConfig:
    save(PROFILE, tmp_path / "profile.json")
    return config.LabConfig.model_validate(
        {
            "lanes": [
                {"name": "batched", "strategy": "batched"},
                {
                    "name": "mine",
                    "strategy": "speculative",
                    "max_num_seqs": MAX_NUM_SEQS,
                    "speculation": {"num_speculative_tokens": 2, **speculation},
                },
            ],
            "scheduler": {"placement": "adaptive", "profile": str(tmp_path / "profile.json")},
        }
    )


def test_a_lane_with_a_table_is_expected_to_draft_by_it(tmp_path: Path) -> None:
    profile = {"path": "profile.json", "lane": "speculative"}
    table = [[1, 2, 2], [4, 4, 1], [5, 1_000_000, 0]]
    given = with_drafts(
        tmp_path, method="ngram", profile=profile, num_speculative_tokens_per_batch_size=table
    )
    cost = known(given, "mine")
    assert [cost.num_drafts(batch) for batch in range(8)] == [2, 2, 2, 2, 1, 0, 0, 0]
    assert cost.priors[TextKind.COPY] == (0.9, 0.8), "of the lane that its drafts were measured on"
    assert cost.cost.decode_step_s(1, 0, 0) == pytest.approx(STEP.step_s(1, 0))


def test_a_learned_draft_has_a_pass_where_it_drafts_nothing(tmp_path: Path) -> None:
    profile = {"path": "profile.json", "lane": "speculative"}
    table = [[1, 2, 2], [3, 6, 0]]
    given = with_drafts(
        tmp_path,
        method="eagle3",
        model="auto",
        profile=profile,
        num_speculative_tokens_per_batch_size=table,
    )
    cost = known(given, "mine").cost
    assert cost.decode_step_s(4, 0, 0) == pytest.approx(STEP.step_s(4, 0) + 0.001)
    assert cost.decode_step_s(1, 0, 2) == pytest.approx(STEP.step_s(3, 0) + 0.001)


def test_a_lane_that_chooses_for_each_row_is_expected_to_draft_what_is_best_for_all(tmp_path: Path) -> None:
    given = with_drafts(
        tmp_path,
        method="adaptive",
        drafter="ngram",
        profile={"path": "profile.json", "lane": "speculative", "context_tokens": 0},
    )
    cost = known(given, "mine")
    rates = (0.7, 0.55)  # the mean of two kinds
    expected = [cost.cost.best_num_drafts(batch, 0, rates, 2, cost.share(TextKind.OPEN)) for batch in BATCHES]
    assert [cost.num_drafts(batch) for batch in BATCHES] == expected
    assert len(set(expected)) > 1, "else nothing is shown"


@pytest.mark.parametrize(
    ("lane", "fault"),
    [
        ("none", "lane 'none' is not in the profile"),
        (
            "batched",
            r"lane 'mine' drafts, and is reckoned by lane 'batched', which does not: .*profile\.lane",
        ),
    ],
)
def test_a_table_of_a_lane_that_was_not_measured_names_it(tmp_path: Path, lane: str, fault: str) -> None:
    given = with_drafts(
        tmp_path,
        method="ngram",
        profile={"path": "profile.json", "lane": lane},
        num_speculative_tokens_per_batch_size=[[1, 6, 2]],
    )
    with pytest.raises(ConfigError, match=fault):
        lane_costs_of(given)


def test_a_table_may_draft_more_than_was_measured(tmp_path: Path) -> None:
    given = with_drafts(
        tmp_path,
        method="ngram",
        num_speculative_tokens=3,
        profile={"path": "profile.json", "lane": "speculative"},
        num_speculative_tokens_per_batch_size=[[1, 6, 3]],
    )
    cost = known(given, "mine")
    assert (cost.max_drafts, len(cost.priors[TextKind.COPY])) == (3, 3)


def test_rates_of_several_kinds_go_with_the_share_of_several(tmp_path: Path) -> None:
    lane = PROFILE.lanes[1]
    measured = structs.replace(
        lane, acceptance=lane.acceptance | {"story": (0.1, 0.05)}, draft_share={"copy": 1.0, "story": 0.1}
    )
    given = with_drafts(
        tmp_path,
        method="adaptive",
        drafter="ngram",
        profile={"path": "profile.json", "lane": "speculative", "context_tokens": 0},
    )
    save(structs.replace(PROFILE, lanes=(PROFILE.lanes[0], measured)), tmp_path / "profile.json")
    cost = known(given, "mine")
    rates = tuple(fmean(each[place] for each in cost.priors.values()) for place in range(2))
    share = fmean(cost.draft_share.values())
    assert share != cost.share(TextKind.OPEN)
    expected = [cost.cost.best_num_drafts(batch, 0, rates, 2, share) for batch in BATCHES]
    assert [cost.num_drafts(batch) for batch in BATCHES] == expected
    wrong = [cost.cost.best_num_drafts(batch, 0, rates, 2, cost.share(TextKind.OPEN)) for batch in BATCHES]
    assert expected != wrong, "else nothing is shown"


def test_the_only_lane_of_a_model_needs_no_profile(tmp_path: Path) -> None:
    given = lab(tmp_path)
    lanes = [lane.model_dump(exclude_unset=True) for lane in given.lanes]
    lanes.append({"name": "other", "strategy": "batched", "model": {"name": "other", "path": "/other"}})
    several = config.LabConfig.model_validate(
        {"lanes": lanes, "scheduler": given.scheduler.model_dump(exclude_unset=True)}, strict=False
    )
    costs = lane_costs_of(several) or {}
    assert {lane: cost is not None for lane, cost in costs.items()} == {
        "batched": True,
        "speculative": True,
        "other": False,
    }
