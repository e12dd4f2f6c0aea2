"""Options that several verbs take."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.cli.options import find_config, load_lab
from serving.core.errors import ConfigError
from serving.core.exit_codes import ExitCode
from serving.core.speculation.step_time import DraftCost, LinearStepTime
from tests.profiles import lane_profile, write_profile
from tests.unit.cli.verb_runs import CHECKOUT, run


def test_the_config_is_the_given_one_then_the_local_one_then_the_packaged_one(checkout: Path) -> None:
    given = checkout / "mine.yaml"
    assert find_config(given) == given
    assert find_config(None) == Path("deploy/lab.yaml")
    (checkout / "deploy" / "lab.yaml").unlink()
    assert find_config(None) in (
        CHECKOUT / "deploy" / "lab.yaml",
        CHECKOUT / "serving" / "defaults" / "lab.yaml",
    )


@pytest.mark.parametrize(
    "arguments", [("up", "--timeout-s", "nan"), ("down", "--timeout-s", "nan"), ("trace", "--seconds", "nan")]
)
def test_no_number_is_wrong_usage(arguments: tuple[str, ...], starts: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert "'nan' is not a number" in result.stderr
    assert starts == []


TABLE = """\
lanes:
  - {name: batched, strategy: batched}
  - name: table
    strategy: speculative
    speculation: {num_speculative_tokens_per_batch_size: auto, profile: {path: p.json, lane: fast}}
"""


def test_a_lab_is_read_with_the_profile_beside_its_config(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(TABLE)
    with pytest.raises(ConfigError) as caught:
        load_lab(tmp_path / "lab.yaml")
    where = f"{tmp_path}/lab.yaml: lanes[table].speculation.profile: {tmp_path}/p.json: cannot be read: "
    assert str(caught.value).startswith(where)
    measured = lane_profile(
        "fast", LinearStepTime(0.02, 0.001, 0), DraftCost(), {"copy": (0.8, 0.6, 0.4, 0.2)}
    )
    write_profile(tmp_path / "p.json", measured)
    speculation = load_lab(tmp_path / "lab.yaml").lane("table").speculation
    assert speculation is not None
    assert isinstance(speculation.num_speculative_tokens_per_batch_size, tuple)


def test_the_schedulers_profile_is_beside_the_config_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "labs").mkdir()
    text = "scheduler: {placement: adaptive, profile: ../p.json}\nlanes: [{name: fast, strategy: batched}]\n"
    (tmp_path / "labs" / "lab.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    lab = load_lab(Path("labs/lab.yaml"))
    assert lab.scheduler.profile == str(tmp_path / "p.json"), "whole, for it is read elsewhere"
