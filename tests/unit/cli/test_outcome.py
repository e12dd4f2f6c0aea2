"""Exit codes of errors."""

from __future__ import annotations

import pytest

from serving.core.errors import (
    AlreadyRunningError,
    ConfigError,
    NotRunningError,
    StartFailedError,
    TandemError,
)
from serving.lab import control
from tests.unit.cli.verb_runs import run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("lab.yaml: port"), 2),
        (NotRunningError("none"), 3),
        (AlreadyRunningError("one"), 4),
        (StartFailedError("lane"), 1),
        (TandemError("other"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_of_errors(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(control, "stop_running", fail)
    result = run("down")
    assert result.exit_code == code
    assert result.stdout == ""
    assert str(error) in result.stderr
