"""A sweep that goes on makes the probes that it would have made anyway."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.analysis.stage_summary import Repeat, make_repeat
from loadtest.judge.capacity import SearchSettings
from loadtest.judge.slo import parse_slo
from loadtest.run.plan import StagePlan, arrivals_of
from loadtest.sweep.settings import SWEEP_FILE, SweepSettings, read_settings, write_settings
from loadtest.sweep.stages import CapacitySweep, ProbeLength
from tests.unit.loadtest import runs

SETTINGS = SweepSettings(
    lanes=("batched", "speculative"),
    workload="copy",
    slo="ttft<1s",
    process="poisson",
    first_rate_per_s=2.0,
    resolution=0.3,
    repeats=2,
    probe_s=1.0,
    probe_requests=5,
    output_tokens=11,
    seed=7,
)
OPTIONS = {"workload": "--workload", "first_rate_per_s": "--first-rate", "lanes": "--lanes"}
CAPACITY_PER_S = {"batched": 3.0, "speculative": 11.0}
MINUTES = 60.0


def measured(stage: StagePlan) -> Repeat:
    """What a lane answers that keeps TTFT up to its capacity and not above it."""
    ttft_s = 5.0 if stage.load.kind == "open" and stage.load.rate_per_s > CAPACITY_PER_S[stage.lane] else 0.1
    made = [
        runs.record(stage.lane, number=number, scheduled_at_s=arrival.at_s, ttft_s=ttft_s)
        for number, arrival in enumerate(arrivals_of(stage, SETTINGS.seed))
    ]
    found = [replace(each, label=replace(each.label, stage=stage.key)) for each in made]
    return make_repeat(runs.stage_run(found, plan=stage), found)


def rest(sweep: CapacitySweep) -> list[Repeat]:
    """Every probe that is still to come, measured."""
    found: list[Repeat] = []
    while (stage := sweep.next_stage()) is not None:
        found.append(measured(stage))
        sweep.record(found[-1])
    return found


def plans(repeats: list[Repeat]) -> list[StagePlan]:
    return [repeat.stage.plan for repeat in repeats]


WHOLE = rest(SETTINGS.sweep(MINUTES))


def test_the_sweep_has_what_it_takes_to_be_stopped_anywhere() -> None:
    assert len(WHOLE) >= 10
    assert {plan.lane for plan in plans(WHOLE)} == set(SETTINGS.lanes)
    assert {plan.repeat for plan in plans(WHOLE)} == {0, 1}


@pytest.mark.parametrize("num_finished", range(len(WHOLE)))
def test_a_sweep_that_goes_on_makes_the_probes_that_were_missing(num_finished: int) -> None:
    sweep = SETTINGS.sweep(MINUTES)
    for repeat in WHOLE[:num_finished]:
        sweep.replay(repeat)
    assert plans(rest(sweep)) == plans(WHOLE[num_finished:])


def test_what_was_measured_before_takes_none_of_the_time() -> None:
    """Time for two probes of each lane goes to two more probes of each lane."""
    long = [
        make_repeat(replace(one.stage, finished_at_s=one.stage.started_at_s + 14), one.records)
        for one in WHOLE[:4]
    ]
    minutes = (2 * 30 + 30) / 60  # two lanes, 30 s each, and what a sweep takes besides
    measured_once = SETTINGS.sweep(minutes)
    for repeat in long:
        measured_once.record(repeat)
    assert measured_once.next_stage() is None, "the time is up"
    going_on = SETTINGS.sweep(minutes)
    for repeat in long:
        going_on.replay(repeat)
    assert going_on.next_stage() == WHOLE[4].stage.plan


def test_a_probe_that_the_settings_do_not_ask_for_is_refused() -> None:
    sweep = replace(SETTINGS, seed=8).sweep(MINUTES)
    with pytest.raises(ValueError, match=r"batched/copy/poisson 2 req/s .* cannot be gone through again"):
        sweep.replay(WHOLE[0])
    with pytest.raises(ValueError, match=r"asks for batched/copy/poisson 2 req/s with"):
        SETTINGS.sweep(MINUTES).replay(WHOLE[2])
    done = SETTINGS.sweep(MINUTES)
    for repeat in WHOLE:
        done.replay(repeat)
    with pytest.raises(ValueError, match=r"asks for nothing more there"):
        done.replay(WHOLE[-1])


def test_settings_survive_their_file(tmp_path: Path) -> None:
    write_settings(SETTINGS, tmp_path)
    assert read_settings(tmp_path) == SETTINGS


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sweep\.json: cannot be read: No such file"):
        read_settings(tmp_path)
    write_settings(SETTINGS, tmp_path)
    text = json.loads((tmp_path / SWEEP_FILE).read_text())
    (tmp_path / SWEEP_FILE).write_text(json.dumps(text | {"process": "odd"}))
    with pytest.raises(ValueError, match=r"sweep\.json: process: "):
        read_settings(tmp_path)


def test_other_settings_are_refused_with_both_values(tmp_path: Path) -> None:
    SETTINGS.refuse_others(tmp_path, {"workload": "copy", "lanes": SETTINGS.lanes}, OPTIONS)
    with pytest.raises(ValueError, match=r"--workload was copy, is story; --first-rate was 2\.0, is 4\.0; "):
        SETTINGS.refuse_others(tmp_path, {"workload": "story", "first_rate_per_s": 4.0}, OPTIONS)
    with pytest.raises(ValueError, match=r"--lanes was batched,speculative, is batched; "):
        SETTINGS.refuse_others(tmp_path, {"lanes": ("batched",)}, OPTIONS)


def slow_sweep(lowest_rate_per_s: float) -> CapacitySweep:
    """Begins at 0.02 requests/s, in probes of 2 s at most."""
    return CapacitySweep(
        ["batched"],
        "copy",
        parse_slo("ttft<1s"),
        SearchSettings(0.02, lowest_rate_per_s=lowest_rate_per_s),
        ProbeLength(1, 1, 2),
        process="poisson",
        output_tokens=8,
        seed=1,
    )


def test_a_low_rate_has_a_schedule_and_the_lowest_is_the_last() -> None:
    stage = slow_sweep(lowest_rate_per_s=0.02).next_stage()
    assert stage is not None
    assert stage.requests >= 1
    assert slow_sweep(lowest_rate_per_s=0.03).next_stage() is None
