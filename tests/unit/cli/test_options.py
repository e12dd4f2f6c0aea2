"""Options that several verbs take."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.cli.options import find_config
from serving.core.exit_codes import ExitCode
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
