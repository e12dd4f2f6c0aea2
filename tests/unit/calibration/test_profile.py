from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from serving.calibration import profile as profiles
from serving.calibration.fit import Residuals, StepPoint
from serving.calibration.profile import FORMAT, LaneProfile, Profile, measured_lane
from serving.core.errors import ConfigError, TandemError
from serving.core.speculation.step_time import DraftCost, LinearStepTime, RooflineStepTime

LANE = LaneProfile(
    lane="speculative",
    max_num_seqs=16,
    step_time=LinearStepTime(0.02, 0.001, 1e-6),
    residuals=Residuals(24, 0.01, 0.03, 0.2, 1),
    roofline=RooflineStepTime(0.02, 0.001, 1e-6),
    num_drafts=3,
    draft_cost=DraftCost(0.003, 0.001, 0.0004),
    acceptance={"story": (0.66, 0.45, 0.29), "copy": (0.77, 0.63, 0.48)},
    points=(StepPoint(8, 800, 0.03), StepPoint(32, 800, 0.06, 3, 8)),
)
PROFILE = Profile(
    FORMAT, datetime(2026, 3, 1, tzinfo=UTC), "smollm2-135m", {"cores": 2}, {"vllm": "0.32.0"}, (LANE,)
)


def written(path: Path, **changes: Any) -> Path:
    file = path / "profile.json"
    profiles.save(PROFILE, file)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    profiles.save(PROFILE, tmp_path / "p.json")
    assert profiles.load(tmp_path / "p.json") == PROFILE
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]
    model = PROFILE.lane("speculative").cost_model
    assert model.decode_step_s(8, 100, 3) == pytest.approx(0.02 + 0.032 + 0.0008 + 0.003 + 3 * 0.0042)


def test_a_lane_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="lane 'batched' is not in the profile; it has speculative"):
        PROFILE.lane("batched")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"format": 2}, "is a profile of format 2; this tandem reads format 1: calibrate again"),
        ({"lanes": []}, "there is no lane in it"),
        ({"measured_at": "2026-03-01T00:00:00"}, "must have a time zone"),
        ({"speed": 3}, "unknown field `speed`"),
        ({"model": 3}, "Expected `str`, got `int` - at `$.model`"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    file = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        profiles.load(file)
    assert str(file) in str(refused.value)
    assert fault in str(refused.value)


RESIDUALS = asdict(LANE.residuals)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"step_time": {"fixed_s": -1, "token_s": 0, "kv_token_s": 0}}, "fixed_s=-1 must be"),
        ({"acceptance": {"story": [0.4, 0.6]}}, "acceptance at position 2 is 0.6, must be in 0..0.4"),
        ({"step_time": {"fixed_s": 0, "token_s": 0, "kv_token_s": 0}}, "a token's step takes 0 s"),
        ({"step_time": {"fixed_s": 0, "token_s": 0, "kv_token_s": 1e-9}}, "must be above 0"),
        ({"step_time": {"fixed_s": 1e308, "token_s": 1e308, "kv_token_s": 0}}, "at most 3600 s"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be in 1..4096"),
        ({"max_num_seqs": 2**70}, "must be in 1..4096"),
        ({"kv_tokens": 0}, "kv_tokens is 0, must be in 1..1000000000"),
        ({"lane": "[/red]"}, "lane '[/red]' is no name of a lane"),
        ({"draft_share": {"story": 1.1}}, "draft_share of 'story' is 1.1, must be in 0..1"),
        ({"num_drafts": -1}, "num_drafts is -1, must be in 0..64"),
        ({"num_drafts": 65}, "num_drafts is 65, must be in 0..64"),
        ({"residuals": RESIDUALS | {"noise": -5}}, "residuals.noise is -5, must be in 0..10"),
        ({"residuals": RESIDUALS | {"noise": 1e308}}, "residuals.noise is 1e+308, must be in 0..10"),
    ],
)
def test_an_impossible_lane_is_refused(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    file = written(tmp_path)
    data = json.loads(file.read_text())
    data["lanes"][0] |= changes
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as refused:
        profiles.load(file)
    assert fault in str(refused.value)


DEEP = b'{"x": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b'{"format": "x"}', b"\xff\xfe", b'{"format": 1}', DEEP]
)
def test_what_is_no_profile_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"p\.json: is no profile: "):
        profiles.load(tmp_path / "p.json")


def test_a_profile_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        profiles.load(tmp_path / "none.json")
    with pytest.raises(TandemError, match="cannot be written: No such file"):
        profiles.save(PROFILE, tmp_path / "gone" / "p.json")


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "p.json").symlink_to(tmp_path / "kept" / "real.json")
    profiles.check_writable(tmp_path / "p.json")
    profiles.save(PROFILE, tmp_path / "p.json")
    assert (tmp_path / "p.json").is_symlink()
    assert profiles.load(tmp_path / "kept" / "real.json") == PROFILE
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["real.json"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path()):
        for write in (profiles.check_writable, lambda path: profiles.save(PROFILE, path)):
            with pytest.raises(TandemError, match="cannot be written: it is there, and is no file"):
                write(path)
    assert not (tmp_path / "pipe").is_file()


def test_where_it_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (
        tmp_path / "gone" / "p.json",
        tmp_path / ("x" * 254),
        tmp_path / ("x" * 300),
        tmp_path / "loop",
    ):
        with pytest.raises(TandemError, match="cannot be written"):
            profiles.check_writable(path)
        with pytest.raises(TandemError, match="cannot be written"):
            profiles.save(PROFILE, path)
    (tmp_path / "loop").unlink()
    profiles.check_writable(tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("share", "is_doubtful"), [(0.088, False), (0.3, False), (0.685, True)])
def test_a_fit_that_is_far_off_its_own_steps_is_doubtful(share: float, is_doubtful: bool) -> None:
    lane = structs.replace(LANE, residuals=replace(LANE.residuals, median_share=share))
    assert lane.is_doubtful is is_doubtful
    doubts = structs.replace(PROFILE, lanes=(lane,)).doubts
    assert bool(doubts) is is_doubtful
    assert not is_doubtful or "speculative 68% (above 30%)" in doubts


def test_a_profile_is_of_its_model() -> None:
    PROFILE.check_model("smollm2-135m")
    with pytest.raises(ConfigError, match="was measured on model 'smollm2-135m', and is used for 'other'"):
        PROFILE.check_model("other")


def test_a_lane_s_profile_is_made_of_its_steps() -> None:
    form, cost = LinearStepTime(0.02, 0.001, 1e-6), DraftCost(pass_s=0.002)
    plain_points = [
        StepPoint(batch, batch * context, form.step_s(batch, batch * context))
        for batch in (1, 4, 16)
        for context in (0, 100, 900)
    ]
    drafted_points = [
        StepPoint(4 * batch, 0, form.step_s(4 * batch, 0) + cost.draft_s(3, batch), 3, batch)
        for batch in (1, 4, 16)
    ]
    plain = measured_lane("batched", plain_points, max_num_seqs=16, max_step_tokens=2048)
    assert plain.step_time.token_s == pytest.approx(0.001)
    assert (plain.draft_cost, plain.residuals.num_points, plain.points) == (None, 9, tuple(plain_points))
    assert plain.roofline is not None
    drafting = measured_lane(
        "speculative",
        drafted_points,
        max_num_seqs=16,
        max_step_tokens=2048,
        num_drafts=3,
        plain=plain,
        acceptance={"copy": (0.9, 0.8, 0.7)},
        draft_share={"copy": 0.8},
    )
    assert drafting.step_time == plain.step_time
    assert drafting.draft_cost is not None
    assert drafting.draft_cost.draft_s(3, 4) == pytest.approx(0.006)
    assert drafting.residuals.max_share < 1e-6
    assert drafting.draft_share == {"copy": 0.8}
    with pytest.raises(ValueError, match="lane 'speculative' drafts: what its drafts cost is told from"):
        measured_lane("speculative", drafted_points, max_num_seqs=1, max_step_tokens=1, num_drafts=3)
