"""The three verbs one after the other, on a lab that is made up."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

from loadtest.simulate.validate import call_verb, validate
from serving.calibration.profile import save
from tests.unit.loadtest.simulate.profiles import profile
from tests.unit.loadtest.simulate.test_against import records_of, written


class MadeUpLab:
    """Calibrates to the example's profile, and measures what that says; simulation is the real one."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.asked: list[list[str]] = []
        self.limits_s: list[float] = []
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def call(self, arguments: Sequence[str], limit_s: float) -> int:
        verb, *rest = arguments
        self.asked.append(list(arguments))
        self.limits_s.append(limit_s)
        self.now_s += 100.0
        if verb == "simulate":
            return call_verb(arguments, limit_s)
        out = Path(rest[rest.index("--out") + 1])
        if verb == "calibrate":
            save(profile(), out)
        else:
            written(out, records_of("batched"))
        return self.codes.get(verb, 0)

    def validate(
        self, directory: Path, users: str = "1,4,8,16", limit_s: float = 720.0, repeats: int = 1
    ) -> int:
        where = ["--base-url", "http://lab"]
        return validate(
            directory, directory, where, "", users, "copy,story", repeats, limit_s, self.call, self.clock
        )


def test_what_was_calibrated_is_measured_and_simulated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lab = MadeUpLab()
    assert lab.validate(tmp_path) == 0
    assert [asked[0] for asked in lab.asked] == ["calibrate", "bench", "simulate"]
    bench = " ".join(lab.asked[1])
    assert "--lanes batched,speculative --concurrency 1,4,8,16 --workloads copy,story" in bench
    # Of 720 s 100 are gone and 30 kept; 16 stages have 36 s each, 4 of them to begin and to end.
    assert "--repeats 1 " in bench
    assert "--max-stage-s 33 " in bench
    assert all("http://lab" in asked for asked in lab.asked[:2])
    assert lab.limits_s[:2] == [360, 620]
    assert "within 15% in 1 of 1" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("codes", "verbs", "code"),
    [
        ({"calibrate": 3}, ["calibrate"], 3),
        ({"bench": 130}, ["calibrate", "bench"], 130),
        ({"bench": 5}, ["calibrate", "bench", "simulate"], 5),
    ],
)
def test_a_verb_that_fails_is_heard(
    codes: dict[str, int], verbs: list[str], code: int, tmp_path: Path
) -> None:
    lab = MadeUpLab(**codes)
    assert lab.validate(tmp_path) == code
    assert [asked[0] for asked in lab.asked] == verbs


def test_too_little_time_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    lab = MadeUpLab()
    with pytest.raises(
        click.ClickException, match=r"16 stages have 1 s each, less than 5 s: .* \(--limit-s\)"
    ):
        lab.validate(tmp_path, limit_s=210)
    assert len(lab.asked) == 1


def test_a_verb_that_takes_too_long_is_named(tmp_path: Path) -> None:
    def call(arguments: Sequence[str], limit_s: float) -> int:
        raise subprocess.TimeoutExpired(list(arguments), limit_s)

    with pytest.raises(click.ClickException, match="tandem calibrate was not done after 360 s"):
        validate(tmp_path, tmp_path, (), "", "1", "copy", 1, 720, call)
