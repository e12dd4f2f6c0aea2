"""What the tests of verbs share: a verb run in this process, a lab that only its state file knows of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from click.testing import CliRunner, Result

from serving.cli.verbs import tandem
from serving.lab import state as lab_state
from serving.lab.state import LabPhase, LabState

CHECKOUT = Path(__file__).parents[3]
LAB = """\
gateway: {port: 18999}
lanes:
  - {name: batched, strategy: batched}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(tandem, arguments)


def write_state(phase: LabPhase = LabPhase.READY, *, alive: bool = True) -> LabState:
    ticks = lab_state.process_start_ticks(os.getpid())
    assert ticks is not None
    state = LabState(
        pid=os.getpid(),
        pid_start_ticks=ticks if alive else ticks - 1,
        run_id="0123",
        config_path="/lab.yaml",
        url="http://127.0.0.1:18999",
        host="127.0.0.1",
        ports=(18999,),
        log_path=None,
        phase=phase,
        progress="batched: starting engine",
        started_at_s=0.0,
    )
    lab_state.state_dir().mkdir(exist_ok=True)
    lab_state.write(lab_state.state_dir(), state)
    return state


class Modules:
    """Stands for `run_module`: notes what was run, prints, returns or raises."""

    def __init__(self, outcome: int | BaseException = 0, output: str = "") -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self._outcome = outcome
        self._output = output

    def __call__(self, module: str, arguments: Sequence[str], *, stdout: IO[str] | None = None) -> int:
        self.calls.append((module, tuple(arguments)))
        if stdout is not None:
            stdout.write(self._output)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
