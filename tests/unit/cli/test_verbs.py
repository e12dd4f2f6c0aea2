"""The `tandem` command: its help, wrong usage, its two doors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from serving.cli.verbs import tandem
from serving.core.exit_codes import ExitCode
from tests.unit.cli.verb_runs import CHECKOUT, run


@pytest.mark.parametrize("code", [code.value for code in ExitCode])
def test_help_promises_every_exit_code(code: int) -> None:
    assert f"\n    {code:<3}  " in run("--help").stdout


@pytest.mark.parametrize("verb", ["up", "down", "status", "bench", "report", "prepare", "doctor", "demo"])
def test_help_lists_every_verb(verb: str) -> None:
    assert f"\n  {verb} " in run("--help").stdout


def test_help_says_each_verb_in_a_line_that_is_not_cut() -> None:
    # 78 is what click takes of a terminal of 80 columns.
    text = CliRunner().invoke(tandem, ["--help"], terminal_width=78).stdout
    assert "..." not in text.split("\nCommands:\n")[1]


@pytest.mark.parametrize(
    "arguments", [["fly"], ["up", "--fast"], ["up", "--timeout-s", "0"], ["down", "now"]]
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_python_dash_m_serving_is_tandem(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "serving", "status"], check=False, cwd=CHECKOUT)
    assert done.returncode == 3
    assert "no lab is running" in capfd.readouterr().out


def test_the_command_loads_no_engine_and_no_ray() -> None:
    """They take seconds, which `tandem status` should not cost."""
    code = "import sys, serving.cli; sys.exit(any(name in sys.modules for name in ('ray', 'torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=CHECKOUT).returncode == 0
