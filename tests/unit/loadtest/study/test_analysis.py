from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from loadtest.study.analysis import Answers, StepTally, Study, by_step, objectives, tally, together
from loadtest.study.schedule import (
    AROUND_S,
    LEVELS,
    PARTS,
    offered_load,
    offered_part,
    part_of,
    rise_and_fall,
)
from loadtest.study.verdicts import verdicts

NUM_STEPS = len(rise_and_fall())
STEP_S = 10.0
TOP = LEVELS[-1]


def steps(met: int | Sequence[int], offered: int = 100) -> tuple[StepTally, ...]:
    """A repeat: so many of the offered requests met the objective in each step."""
    each = [met] * NUM_STEPS if isinstance(met, int) else met
    return tuple(StepTally(offered, count, Counter({"failed": offered - count})) for count in each)


def by_level(low: int, high: int) -> list[int]:
    """Met at loads of up to 0.8 of capacity, and above."""
    return [low if level <= 0.8 else high for level in rise_and_fall()]


def study(**arms: Sequence[tuple[StepTally, ...]]) -> Study:
    return Study(arms, ("plain", "drafts"), STEP_S)


def test_the_load_rises_once_and_falls_again() -> None:
    levels = rise_and_fall()
    assert levels == tuple(reversed(levels))
    assert (levels[0], max(levels), levels.count(TOP)) == (0.2, 1.3, 1)
    load = offered_load(50.0, 4.0)
    assert load.duration_s == 4.0 * len(levels)
    assert [segment.from_per_s for segment in load.segments] == [50.0 * level for level in levels]


def test_a_part_by_itself_is_between_the_loads_around_it_and_all_parts_are_the_whole() -> None:
    whole = offered_load(50.0, 4.0).segments
    steps = [step for first, end in PARTS for step in range(first, end)]
    assert steps == list(range(len(whole)))
    for part, (first, end) in enumerate(PARTS):
        load = offered_part(part, 50.0, 4.0)
        lead, *own, after = load.segments
        assert (lead.duration_s, lead.from_per_s) == (AROUND_S, whole[max(0, first - 1)].from_per_s)
        assert (after.duration_s, after.from_per_s) == (AROUND_S, whole[min(end, 12)].from_per_s)
        assert tuple(own) == whole[first:end]
        assert part_of(load.label) == part
        # What changes the offer is in its name.
        assert (
            len({load.label, offered_part(part, 51.0, 4.0).label, offered_part(part, 50.0, 5.0).label}) == 3
        )
    assert part_of("poisson 4 req/s") is None


def test_regret_is_against_the_arm_that_is_best_at_that_load() -> None:
    found = study(
        plain=[steps(by_level(50, 80))], drafts=[steps(by_level(90, 40))], adapts=[steps(by_level(81, 76))]
    )
    assert found.best_fixed(0.2) == "drafts"
    assert found.best_fixed(TOP) == "plain"
    assert found.regret("adapts", 0.2).value == pytest.approx(1 - 81 / 90)
    assert found.regret("adapts", TOP).value == pytest.approx(1 - 76 / 80)
    assert found.goodput_rps("adapts", found.steps_of(0.2)).value == pytest.approx(8.1)


def test_gain_is_over_the_best_single_one_for_the_whole_run() -> None:
    low, high = 8, 5  # steps of the run: 0.2 to 0.8 twice, above 0.8 five times
    assert by_level(1, 0).count(1) == low
    found = study(
        plain=[steps(by_level(50, 80))], drafts=[steps(by_level(90, 40))], adapts=[steps(by_level(90, 80))]
    )
    assert found.best_fixed() == "drafts"
    assert found.gain("adapts").value == pytest.approx((90 * low + 80 * high) / (90 * low + 40 * high))


def test_a_bad_arm_that_is_called_adaptive_has_regret_and_no_verdict_is_met() -> None:
    found = study(plain=[steps(80)] * 3, drafts=[steps(60)] * 3, adapts=[steps(60)] * 3)
    assert all(found.regret("adapts", level).value == pytest.approx(0.25) for level in LEVELS)
    regret, gain = verdicts(found, "adapts", "here")
    assert not regret.is_met
    assert not gain.is_met
    assert "failed: 40% of its requests, 20% of plain's" in str(regret)


def test_targets_are_met_by_an_arm_that_is_as_good_everywhere_and_better_over_all() -> None:
    arms = {"plain": [steps(by_level(50, 80))], "drafts": [steps(by_level(80, 40))]}
    good = study(**arms, adapts=[steps(by_level(77, 80))])
    assert [verdict.is_met for verdict in verdicts(good, "adapts", "here")] == [True, True]
    worse = study(**arms, adapts=[steps(by_level(75, 80))])
    assert [verdict.is_met for verdict in verdicts(worse, "adapts", "here")] == [False, True]
    assert "More at 0.2, 0.4, 0.6, 0.8" in str(verdicts(worse, "adapts", "here")[0])


def test_repeats_are_drawn_for_all_arms_alike() -> None:
    # Repeats differ much, arms within a repeat by the same share: nothing is uncertain of the ratio.
    found = study(
        plain=[steps(20), steps(50), steps(80)],
        drafts=[steps(10), steps(25), steps(40)],
        adapts=[steps(18), steps(45), steps(72)],
    )
    regret, gain = found.regret("adapts", 0.2), found.gain("adapts")
    assert (regret.value, regret.low, regret.high) == pytest.approx((0.1, 0.1, 0.1))
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.9, 0.9, 0.9))
    goodput = found.goodput_rps("plain", found.steps_of(TOP))
    assert goodput.low is not None
    assert goodput.high is not None
    assert goodput.low <= 2.0 < 5.0 < 8.0 <= goodput.high


def test_the_best_fixed_arm_is_chosen_within_each_draw() -> None:
    # In each repeat one of the fixed arms is as good as the adaptive one: only both repeats together are not.
    found = study(plain=[steps(80), steps(40)], drafts=[steps(40), steps(80)], adapts=[steps(80), steps(80)])
    regret = found.regret("adapts", TOP)
    assert regret.value == pytest.approx(1 - 80 / 60)
    assert (regret.low, regret.high) == pytest.approx((1 - 80 / 60, 0.0))


def test_repeats_of_what_ran_in_one_piece_are_drawn_together() -> None:
    arms = {"plain": [steps(80), steps(40)], "drafts": [steps(0)] * 2, "adapts": [steps(80)] * 2}
    in_one, in_parts = Study(arms, ("plain",), STEP_S), Study(arms, ("plain",), STEP_S, PARTS)
    single = Study(arms, ("plain",), STEP_S, tuple((step, step + 1) for step in range(NUM_STEPS)))
    assert (in_one.gain("adapts").low, in_one.gain("adapts").high) == pytest.approx((1.0, 2.0))
    widths = []
    for found in (in_one, in_parts, single):
        goodput = found.goodput_rps("plain", found.steps_of(None))
        assert goodput.value == pytest.approx(6.0)
        assert goodput.low is not None
        assert goodput.high is not None
        widths.append(goodput.high - goodput.low)
    assert widths[0] == pytest.approx(4.0)
    assert widths[0] >= widths[1] > 1.5 * widths[2] > 0


def test_one_repeat_has_no_interval() -> None:
    found = study(plain=[steps(80)], drafts=[steps(40)], adapts=[steps(80)])
    assert (found.gain("adapts").low, found.regret("adapts", 1.0).high) == (None, None)


def test_where_no_fixed_arm_gives_anything_nothing_is_lost() -> None:
    found = study(plain=[steps(0)] * 2, drafts=[steps(0)] * 2, adapts=[steps(0)] * 2, other=[steps(1)] * 2)
    assert found.regret("adapts", 1.0).value == 0
    assert found.gain("other").value == math.inf
    assert "no fixed arm has any" in str(verdicts(found, "adapts", "here")[1])


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ({"plain": [steps(1)] * 2, "drafts": [steps(1)]}, "equally many repeats"),
        ({"plain": [], "drafts": []}, "one at least"),
        ({"plain": [steps(1)]}, "fixed arms .*drafts.* are none of plain"),
    ],
)
def test_what_cannot_be_compared_is_refused(arms: dict[str, list[tuple[StepTally, ...]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        study(**arms)


def test_runs_of_one_study_are_read_as_one() -> None:
    one = study(plain=[steps(60)], drafts=[steps(50)], adapts=[steps(90)])
    other = study(plain=[steps(40)], drafts=[steps(50)], adapts=[steps(10)])
    both = together([one, other])
    assert both.num_repeats == 2
    assert both.gain("adapts").value == pytest.approx(1.0)
    assert both.regret("adapts", TOP).low == pytest.approx(-0.5)
    for unlike in ({"step_s": STEP_S + 1}, {"parts": PARTS}):
        with pytest.raises(ValueError, match="are not of one study"):
            together([one, replace(other, **unlike)])
    with pytest.raises(ValueError, match=r"plain, drafts, adapts .* and of plain, drafts with"):
        together([one, study(plain=[steps(40)], drafts=[steps(50)])])


def test_requests_fall_into_the_step_in_which_they_were_due_and_keep_the_limits_of_their_kind() -> None:
    _, _, by_kind = objectives(1.0, 0.050, 0.020)
    answers = Answers(
        due_s=np.array([0.0, 9.9, 10.0, 10.0, 10.0, 129.9, 130.0]),
        kind=np.array([0, 1, 0, 1, 0, 0, 0]),
        ttft_s=np.array([0.1, 0.1, 0.1, 1.5, math.inf, 0.1, 0.1]),
        tpot_s=np.array([0.01, 0.03, 0.03, 0.03, math.inf, 0.01, 0.01]),
        e2e_s=np.array([1.0, 1.0, 1.0, 1.0, math.inf, 1.0, 1.0]),
        lane=np.array([0, 1, 1, 1, -1, 0, 0]),
        lanes=("plain", "drafts"),
    )
    found = [tally(step, by_kind) for step in by_step(answers, STEP_S, NUM_STEPS)]
    assert [(step.offered, step.met) for step in found] == [(2, 2), (3, 0), *[(0, 0)] * 10, (1, 1)]
    # A copy that is as slow as a story may be, a story with a late first token, and one that was refused.
    assert found[1].misses == {"tpot<20ms": 1, "ttft<1s": 1, "failed": 1}
    assert found[1].tpots_s == (0.03, 0.03)
    assert found[1].lanes == {(0, "drafts"): 1, (1, "drafts"): 1}
    assert by_kind.text == "copy ttft<1s,tpot<20ms; story ttft<1s,tpot<50ms"


def test_where_requests_went_is_told_by_kind_of_text() -> None:
    def went(lanes: Counter[tuple[int, str]]) -> tuple[StepTally, ...]:
        return tuple(StepTally(10, 10, lanes=lanes) for _ in range(NUM_STEPS))

    runs = [went(Counter({(0, "drafts"): 3, (0, "plain"): 1, (1, "plain"): 6}))]
    found = study(plain=runs, drafts=runs, adapts=runs)
    assert found.lane_shares("adapts", found.steps_of(None)) == {
        0: {"drafts": 0.75, "plain": 0.25},
        1: {"plain": 1.0},
    }
    assert found.tpot_p50_s("adapts", (0,)) is None
