"""What is said of whole stages, against servers of which the answer is known beforehand.

The servers keep their times whatever they are asked, so the steady state of each load follows from them.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from loadtest.analysis.crossover import find_crossovers
from loadtest.analysis.summary import Crossover, Verdict
from loadtest.offer.load import ClosedLoop
from loadtest.report.findings import crossing_text
from serving.core.exit_codes import ExitCode
from tests.unit.loadtest.fake_server import FakeLab, FakeLane, fake_lab
from tests.unit.loadtest.processes import run_to_end
from tests.unit.loadtest.runs import STRATEGIES
from tests.unit.loadtest.summaries import stage

TOKENS = 16
TOLERANCE = 0.05  # of rates: a few requests each, on cores that others use too


ATTEMPTS = 10


def measured(lane: FakeLane, directory: Path, *arguments: str) -> tuple[dict[str, Any], FakeLab]:
    """The only stage of a run against a lane, and the lab as it was asked.

    Other work on the cores may make a run INVALID, and it says so: that one is made again.
    """
    sizes = ("--no-ceiling", "--workloads", "copy", "--output-tokens", str(TOKENS))
    said = ""
    for attempt in range(ATTEMPTS):
        runs_dir = directory / f"{arguments[1]} {attempt}".replace("/", " ")
        with fake_lab({"lane": lane}) as (url, lab):
            command = [sys.executable, "-m", "loadtest.bench", "--base-url", url, "--runs-dir", str(runs_dir)]
            done = run_to_end([*command, *sizes, *arguments])
        said += done.stdout + done.stderr
        if done.returncode == ExitCode.INVALID:
            continue
        assert done.returncode == 0, said
        (stage,) = json.loads((runs_dir / "latest" / "summary.json").read_text())["stages"]
        return stage, lab
    raise AssertionError(f"INVALID in {ATTEMPTS} attempts: {said}")


def answer_s(lab: FakeLab) -> float:
    """What an answer took on average, by the server's own stamps."""
    return fmean(each.ttft_s + (TOKENS - 1) * each.tpot_s for each in lab.served["lane"])


def test_a_closed_loop_gives_its_steady_state(tmp_path: Path) -> None:
    """Each of 8 users has an answer under way at any time: 8 answers' tokens in the time of one."""
    stage, lab = measured(FakeLane("batched", ttft_s=0.6, gap_s=0.06), tmp_path, "--concurrency", "8")
    true_per_s = 8 * TOKENS / answer_s(lab)
    assert stage["output_tokens_per_s"]["value"] == pytest.approx(true_per_s, rel=TOLERANCE)
    # The check can fail: with the users' coming and going in it the figure is another.
    assert stage["whole_tokens_per_s"] < (1 - 2 * TOLERANCE) * true_per_s


def test_a_queue_is_measured_when_all_wait_in_it(tmp_path: Path) -> None:
    """A server with one place serves 4 users in turn: each waits for the answers of three others.

    Whoever came first waited for fewer, and whoever is left at the end too: neither counts.
    """
    lane = FakeLane("sequential", ttft_s=0.1, gap_s=0.03, max_running=1)
    stage, lab = measured(lane, tmp_path, "--concurrency", "4")
    assert stage["ttft_s"]["p50"]["value"] == pytest.approx(3 * answer_s(lab) + 0.1, rel=2 * TOLERANCE)
    assert stage["output_tokens_per_s"]["value"] == pytest.approx(TOKENS / answer_s(lab), rel=TOLERANCE)


def test_an_unhurried_server_is_no_better_for_being_asked_longer(tmp_path: Path) -> None:
    """An open loop of 10/s on answers of a second: 10 answers' tokens/s and 10 good requests/s, however long."""
    rates, goodputs, wholes = [], [], []
    for seconds in (3, 6):
        lane = FakeLane("batched", ttft_s=0.1, gap_s=0.06, max_running=99)
        load = ("--load", f"constant:10/s,{seconds}s", "--slo", "ttft<2s")
        stage, _ = measured(lane, tmp_path, *load)
        rates.append(stage["output_tokens_per_s"]["value"])
        wholes.append(stage["whole_tokens_per_s"])
        goodputs.append(stage["slo"]["goodput_per_s"]["value"])
        assert stage["slo"]["attainment"]["value"] == 1
    assert rates == pytest.approx([10 * TOKENS] * 2, rel=TOLERANCE)
    assert goodputs == pytest.approx([10] * 2, rel=TOLERANCE)
    # The check can fail: the drain makes the shorter one look worse by what it is of the whole.
    assert wholes[1] > (1 + 2 * TOLERANCE) * wholes[0]


NOISE = 0.03  # of a stage's figure, on the logarithm
TRIES = 2_000
LEVELS = (1, 4, 8)


def compared(rng: random.Random, speed_up: float, repeats: int) -> Crossover:
    """Two lanes at each level, the speculative one that much faster; each stage with a draw of the noise."""

    def noise() -> tuple[float, ...]:
        return tuple(math.exp(rng.gauss(0, NOISE)) for _ in range(repeats))

    stages = [
        replace(
            stage(lane, ClosedLoop(users)),
            repeat_tpot_p50_s=tuple(0.05 * each / factor for each in noise()),
            repeat_tokens_per_s=tuple(80.0 * each * factor for each in noise()),
        )
        for users in LEVELS
        for lane, factor in (("batched", 1.0), ("speculative", speed_up))
    ]
    (crossover,) = find_crossovers(stages, STRATEGIES)
    return crossover


@pytest.mark.parametrize("repeats", [1, 3])
def test_identical_lanes_cannot_be_told_apart(repeats: int) -> None:
    """From the repeats of stages to the sentence of the report, which may be wrong in 5 percent of runs."""
    rng = random.Random(repeats)
    runs = [compared(rng, 1.0, repeats) for _ in range(TRIES)]
    for name in ("tpot", "throughput"):
        crossings = [getattr(run, name) for run in runs]
        said = [crossing_text(crossing) for crossing in crossings]
        assert sum("pays" in text or "costs" in text for text in said) <= 0.05 * TRIES
        assert all(
            (crossing.verdict is Verdict.OPEN) == (text == "cannot be told apart at 1, 4 and 8 users")
            for crossing, text in zip(crossings, said, strict=True)
        )


def test_lanes_that_differ_are_told_apart() -> None:
    """The rule is not silence: a fifth faster at each level is said, at each level, in nearly every run."""
    rng = random.Random(4)
    runs = [compared(rng, 1.2, 3) for _ in range(TRIES // 4)]
    always = sum(crossing_text(run.tpot) == "pays at 1, 4 and 8 users" for run in runs)
    assert always > 0.9 * len(runs)
    assert not any(run.tpot.costs for run in runs)
