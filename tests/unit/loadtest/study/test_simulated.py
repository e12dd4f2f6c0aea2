from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from loadtest.study import in_virtual_time
from loadtest.study.analysis import Study
from loadtest.study.arms import ARMS, BATCHED, PLACEMENT, PLUG_IN, SPECULATIVE, TABLE
from loadtest.study.reckon import drafts_of_kinds, tpots_s
from loadtest.study.schedule import KINDS, LEVELS
from loadtest.study.simulated import HARDWARE, Hardware, setting, study
from loadtest.study.verdicts import verdicts
from serving.calibration import profile as profiles
from serving.core.speculation.cost_model import Lengths

CPU = HARDWARE["cpu-2-cores"]
# Tokens/s on one H200 with 256 tokens in and 192 out, by how many ran at once: what the profiles were made from.
AT_ONCE = (1, 16, 64, 128, 256)
PLAIN = (200, 2771, 7524, 10288, 12052)
HEAD = (384, 4619, 9424, 10425, 9809)
DRAFT_MODEL = (164, 1704, 5825, 7031, 8674)


def run(hardware: Hardware, name: str = "relaxed", stand_ins: dict[str, str] | None = None) -> Study:
    (objective,) = [each for each in hardware.objectives if each.name == name]
    return study(
        setting(hardware, objective),
        repeats=1,
        seed=5,
        say=lambda text: None,
        step_s=6.0,
        stand_ins=stand_ins,
    )


@pytest.mark.parametrize(
    ("name", "lane", "measured", "error"),
    [
        ("h200", "batched", PLAIN, 0.05),
        ("h200", "speculative", HEAD, 0.16),
        ("costly-draft", "speculative", DRAFT_MODEL, 0.21),
    ],
)
def test_a_profile_gives_the_tokens_per_s_that_it_was_made_from(
    name: str, lane: str, measured: tuple[int, ...], error: float
) -> None:
    found = profiles.load(HARDWARE[name].profile_file).lane(lane)
    for batch, tokens_per_s in zip(AT_ONCE, measured, strict=True):
        # All were measured with the acceptance that the profile has for stories.
        reckoned = found.cost_model.serve(
            batch, Lengths(256, 192), found.num_drafts, found.acceptance.get("story", ())
        )
        assert reckoned.tokens_per_s == pytest.approx(tokens_per_s, rel=error)


@pytest.mark.parametrize(
    ("k", "measured_ms"),
    [(0, (27.4, 28.9, 31.7)), (1, (18.7, 20.9, 26.8)), (2, (17.1, 19.2, 25.6)), (3, (14.9, 18.1, 26.9))],
)
def test_the_profile_of_two_cores_gives_the_tpot_that_it_was_made_from(
    k: int, measured_ms: tuple[float, ...]
) -> None:
    lanes = profiles.load(CPU.profile_file)
    found = lanes.lane("speculative" if k else "batched")
    for batch, tpot_ms in zip((1, 4, 8), measured_ms, strict=True):
        reckoned = found.cost_model.decode(batch, 0, k, found.acceptance.get("story", ()))
        assert 1000 * reckoned.tpot_s == pytest.approx(tpot_ms, rel=0.1)


@pytest.mark.parametrize("hardware", HARDWARE.values(), ids=list(HARDWARE))
def test_slots_keep_every_kind_of_text_within_the_objective(hardware: Hardware) -> None:
    profile = profiles.load(hardware.profile_file)
    assert profile.machine["simulated"] is True
    for objective in hardware.objectives:
        given = setting(hardware, objective)
        limits_s = [slo.limits[1].limit_s for slo in objective.of_kinds]
        for arm in (BATCHED, SPECULATIVE, TABLE, PLUG_IN):
            ((model, _),) = given.fleets[arm]
            found_s = tpots_s(
                profile.lane(model.name),
                model.max_num_seqs,
                hardware.lengths,
                model.drafts_at(model.max_num_seqs),
            )
            assert all(
                tpot_s <= 1.001 * limit_s / 1.2 for tpot_s, limit_s in zip(found_s, limits_s, strict=True)
            )
        assert given.capacity_rps > 0


def test_the_plug_in_drafts_for_the_kind_that_is_accepted_where_drafts_are_dear() -> None:
    lane = profiles.load(HARDWARE["h200"].profile_file).lane("speculative")
    copy, story = drafts_of_kinds(lane, 352)
    assert (copy[1], story[1]) == (3, 3)
    assert copy[256] > story[256]
    assert all(of_copy >= of_story for of_copy, of_story in zip(copy, story, strict=True))


def test_the_same_seed_gives_the_same_figures_and_all_arms_the_same_requests() -> None:
    first, second = run(CPU), run(CPU)
    assert first == second
    offered = {tuple(step.offered for step in runs[0]) for runs in first.arms.values()}
    assert len(offered) == 1
    assert list(first.arms) == list(ARMS)


def test_a_bad_policy_that_is_called_adaptive_is_found_out() -> None:
    # Drafts of a large model never pay: who always drafts and calls it adaptive loses, and the real one does not.
    costly = HARDWARE["costly-draft"]
    bad = run(replace(costly, step_s=2.0), stand_ins={PLACEMENT: SPECULATIVE})
    worst = max(bad.regret(PLACEMENT, level).value for level in LEVELS)
    assert worst > 0.1
    assert [verdict.is_met for verdict in verdicts(bad, PLACEMENT, "here")] == [False, False]
    assert bad.best_fixed() == BATCHED


def test_requests_of_the_adaptive_arm_are_served_by_both_lanes_or_the_better_one() -> None:
    found = run(CPU)
    shares = found.lane_shares(PLACEMENT, found.steps_of(None))
    assert set(shares) == set(range(len(KINDS)))
    assert {lane for own in shares.values() for lane in own} <= {"batched", "speculative"}
    assert set(found.lane_shares(BATCHED, found.steps_of(None))[0]) == {"batched"}


def test_the_verb_prints_what_it_writes_and_draws_it(tmp_path: Path) -> None:
    options = ["--hardware", "cpu-2-cores", "--repeats", "2", "--step-s", "3", "--runs-dir", str(tmp_path)]
    done = CliRunner().invoke(in_virtual_time.main, options)
    assert done.exit_code == 0, done.output
    latest = tmp_path / "latest"
    written = json.loads((latest / "study-adaptive-simulated.json").read_text())
    assert (latest / "study-adaptive-simulated.png").stat().st_size > 10_000
    assert list(written["hardware"]["cpu-2-cores"]["objectives"]) == ["relaxed", "fast", "by kind"]
    assert "SIMULATED 2-core CPU" in done.output
    words = " ".join(done.output.split())
    assert len(written["verdicts"]) == 6
    for verdict in written["verdicts"]:
        assert " ".join(verdict.split()) in words
