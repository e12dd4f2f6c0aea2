from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from loadtest.calibrate.__main__ import main
from loadtest.calibrate.design import drafted_cells, plain_cells
from loadtest.calibrate.measure import Calibration, calibrate, default_lanes
from loadtest.calibrate.picture import draw
from loadtest.calibrate.tables import print_calibration
from loadtest.client.traced_lab import Question, Traced, TracedLabError
from serving.calibration import profile as profiles
from tests.unit.loadtest.calibrate.made_up_lab import (
    AFTER_S,
    BEFORE_S,
    DRAFT_COST,
    NUM_DRAFTS,
    RATES,
    STEP_TIME,
    MadeUpLab,
    made_up_lab,
)

NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def made() -> Calibration:
    said: list[str] = []
    calibration = calibrate(made_up_lab(), ["speculative", "batched"], NOW, said.append)
    assert len(said) > 10, "each cell is told"
    return calibration


def test_step_time_is_found_again(made: Calibration) -> None:
    lane = made.profile.lane("batched")
    assert lane.step_time.fixed_s == pytest.approx(STEP_TIME.fixed_s, rel=0.01)
    assert lane.step_time.token_s == pytest.approx(STEP_TIME.token_s, rel=0.01)
    assert lane.step_time.kv_token_s == pytest.approx(STEP_TIME.kv_token_s, rel=0.01)
    assert lane.residuals.median_share < 0.001


def test_the_time_outside_of_steps_is_that_of_requests_that_are_alone(made: Calibration) -> None:
    for lane in made.profile.lanes:
        assert lane.overhead_s == pytest.approx(BEFORE_S + AFTER_S)


@dataclass(frozen=True, slots=True)
class _SlowerAtFirst(MadeUpLab):
    """Half as fast while the first lane is measured for the first time."""

    asked: list[int]

    def ask(self, questions: Sequence[Question]) -> Traced:
        traced = MadeUpLab.ask(self, questions)
        self.asked.append(len(questions))
        if len(self.asked) > 1 + len(plain_cells("batched", 16, 2048)):  # the first is to warm up
            return traced
        return Traced(
            traced.answers,
            tuple(
                replace(step, ended_ns=2 * step.ended_ns - step.started_ns, started_ns=step.started_ns)
                for step in traced.steps
            ),
        )


def test_each_lane_is_measured_again_after_the_others() -> None:
    lab = made_up_lab()
    slow = _SlowerAtFirst(lab.base_url, lab.description, lab.lanes, [])
    lane = calibrate(slow, ["batched", "speculative"], NOW, lambda _: None).profile.lane("batched")
    seconds = {round(point.seconds, 6) for point in lane.points if (point.tokens, point.kv_tokens) == (1, 32)}
    assert seconds == {round(times * STEP_TIME.step_s(1, 32), 6) for times in (1, 2)}


def test_what_drafts_cost_and_how_many_are_accepted_is_found_again(made: Calibration) -> None:
    lane = made.profile.lane("speculative")
    assert lane.num_drafts == NUM_DRAFTS
    assert lane.draft_cost is not None
    assert lane.draft_cost.draft_s(NUM_DRAFTS, 4) == pytest.approx(
        DRAFT_COST.draft_s(NUM_DRAFTS, 4), rel=0.05
    )
    assert set(lane.acceptance) == {"copy", "story", "chat"}
    for rates in lane.acceptance.values():
        assert rates == pytest.approx(RATES, abs=0.06)
    assert lane.draft_share == {"copy": 1.0, "story": 1.0, "chat": 1.0}


def test_what_the_profile_reckons_is_shown_beside_what_was_measured(made: Calibration) -> None:
    assert {each.cell.batch for each in made.compared if each.cell.lane == "batched"} == {1, 2, 4, 8, 16}
    assert all(abs(each.error) < 0.01 for each in made.compared if each.cell.lane == "batched")
    assert all(abs(each.error) < 0.15 for each in made.compared)


def test_the_profile_can_be_read_again_and_is_shown(made: Calibration, tmp_path: Path) -> None:
    profiles.save(made.profile, tmp_path / "profile.json")
    assert profiles.load(tmp_path / "profile.json") == made.profile
    console = Console(record=True, width=140)
    print_calibration(console, made)
    text = console.export_text()
    assert "Profile of tiny" in text
    assert "+ ms a draft" in text
    assert f"{len(made.compared)} of {len(made.compared)} within 15%" in text
    picture = draw(tmp_path / "profile.png", made.profile)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def _attached() -> MadeUpLab:
    lab = made_up_lab()
    lab.description["config"]["lanes"][0]["urls"] = ["http://127.0.0.1:2"]
    return lab


def test_lanes_that_cannot_be_calibrated_are_refused() -> None:
    for lab, lanes, reason in (
        (made_up_lab(), ["fast"], "there is no lane 'fast'; the lab has batched, speculative"),
        (made_up_lab(replicas=2), ["batched"], "lane 'batched' has 2 replicas; calibration needs 1"),
        (
            made_up_lab(),
            ["speculative"],
            "speculative draft: what drafts cost is told from a lane of that model w",
        ),
        (made_up_lab(), ["batched", "batched"], "lane 'batched' is named 2 times"),
        (made_up_lab(), [], "there is no lane to calibrate"),
        (
            _attached(),
            ["batched"],
            "lane 'batched' is a server that somebody else runs, which records no steps",
        ),
    ):
        asked = _Heard(lab.base_url, lab.description, lab.lanes, [])
        with pytest.raises(TracedLabError, match=reason):
            calibrate(asked, lanes, NOW, lambda _: None)
        assert not asked.bodies, "it is known before anything is measured"
    assert default_lanes(made_up_lab()) == ["batched", "speculative"]
    assert default_lanes(made_up_lab(replicas=2)) == []


@pytest.mark.parametrize(
    ("speculation", "why"),
    [
        ({"method": "adaptive", "drafter": "ngram"}, "chooses how many tokens it drafts"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}, "chooses how many"),
        ({"method": "oracle"}, "drafts with the acceptance that its config asks for"),
    ],
)
def test_a_lane_whose_acceptance_at_one_k_cannot_be_measured_is_refused(
    speculation: dict[str, object], why: str
) -> None:
    lab = made_up_lab()
    lab.description["config"]["lanes"][1]["speculation"] |= speculation
    assert default_lanes(lab) == ["batched"]
    with pytest.raises(TracedLabError, match=f"lane 'speculative' {why}"):
        calibrate(lab, ["batched", "speculative"], NOW, lambda _: None)


def test_a_replica_says_how_much_its_engine_takes(made: Calibration) -> None:
    assert (made.profile.lane("batched").max_step_tokens, made.profile.lane("batched").kv_tokens) == (
        2048,
        None,
    )
    lab = made_up_lab()
    lab.description["replicas"][0] |= {"max_step_tokens": 8192, "kv_tokens": 23_296}
    lane = calibrate(lab, ["batched"], NOW, lambda _: None).profile.lane("batched")
    assert (lane.max_step_tokens, lane.kv_tokens) == (8192, 23_296)


@pytest.mark.parametrize(("method", "passes"), [("eagle3", 1), ("ngram", 0)])
def test_a_learned_draft_is_known_to_have_a_pass_in_every_step(method: str, passes: int) -> None:
    lab = made_up_lab()
    lab.description["config"]["lanes"][1]["speculation"]["method"] = method
    cost = (
        calibrate(lab, ["batched", "speculative"], NOW, lambda _: None).profile.lane("speculative").draft_cost
    )
    assert cost is not None
    assert cost.least_passes == passes


@dataclass(frozen=True, slots=True)
class _Heard(MadeUpLab):
    """Remembers what it was asked."""

    bodies: list[str]

    def ask(self, questions: Sequence[Question]) -> Traced:
        self.bodies.extend(str(each.body) for each in questions)
        return MadeUpLab.ask(self, questions)


def test_no_prompt_is_asked_twice() -> None:
    """A lane that drafts from earlier answers would know it."""
    lab = made_up_lab()
    heard = _Heard(lab.base_url, lab.description, lab.lanes, [])
    calibrate(heard, ["batched", "speculative"], NOW, lambda _: None)
    texts = [body for body in heard.bodies if "messages" in body]
    assert len(texts) > 100
    assert len(set(texts)) == len(texts)


def test_an_iterative_lane_has_drafts_too() -> None:
    lab = made_up_lab(lanes=("iterative", "batched"))
    assert default_lanes(lab) == ["iterative", "batched"]
    calibration = calibrate(lab, default_lanes(lab), NOW, lambda _: None)
    assert calibration.profile.lane("iterative").num_drafts == NUM_DRAFTS


def test_a_profile_is_of_one_model() -> None:
    lab = made_up_lab()
    lab.description["config"]["lanes"][1]["model"] = {"name": "tuned", "path": "/tuned"}
    with pytest.raises(
        TracedLabError, match="lanes batched, speculative serve /tiny and /tuned: a profile is of one"
    ):
        calibrate(lab, ["batched", "speculative"], NOW, lambda _: None)
    assert default_lanes(lab) == ["batched"]
    lab.description["config"]["lanes"][0]["model"] = {"name": "tuned", "path": "/tuned"}
    assert calibrate(lab, ["batched"], NOW, lambda _: None).profile.model == "tuned"


def test_no_cell_asks_for_more_than_a_lane_holds() -> None:
    cells = plain_cells("a", max_running=6, max_model_len=200)
    assert {cell.batch for cell in cells} == {1, 2, 4}
    assert all(cell.prompt_tokens + cell.output_tokens < 200 for cell in cells)
    assert len({cell.prompt_tokens for cell in cells}) == 3
    assert {cell.batch for cell in drafted_cells("a", max_running=6)} == {1, 4}


@dataclass(frozen=True, slots=True)
class _Disturbed(MadeUpLab):
    """Something else takes the cores in half of its steps."""

    rng: random.Random

    def ask(self, questions: Sequence[Question]) -> Traced:
        traced = MadeUpLab.ask(self, questions)
        steps = tuple(
            replace(step, ended_ns=step.started_ns + 20 * (step.ended_ns - step.started_ns))
            if self.rng.random() < 0.5
            else step
            for step in traced.steps
        )
        return Traced(traced.answers, steps)


@pytest.mark.parametrize(("is_disturbed", "code"), [(False, 0), (True, 5)])
def test_a_profile_that_fits_badly_is_written_and_said_to_be_useless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_disturbed: bool, code: int
) -> None:
    lab = made_up_lab()
    if is_disturbed:
        lab = _Disturbed(lab.base_url, lab.description, lab.lanes, random.Random(1))
    monkeypatch.setattr("loadtest.calibrate.__main__.find_lab", lambda _: lab)
    out = tmp_path / "p.json"
    result = CliRunner().invoke(main, ["--out", str(out), "--runs-dir", str(tmp_path)])
    assert result.exit_code == code, result.output
    assert bool(profiles.load(out).doubts) is is_disturbed
    assert ("calibrate again" in result.output) is is_disturbed


def test_where_a_profile_cannot_go_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    for out in (tmp_path / "gone" / "p.json", tmp_path / ("x" * 254)):
        result = CliRunner().invoke(main, ["--out", str(out), "--base-url", "http://127.0.0.1:1"])
        assert result.exit_code == 2
        assert "--out" in result.output
