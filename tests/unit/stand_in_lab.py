"""A lab without Ray under the real supervisor: `python -m tests.unit.stand_in_lab MODE RUN_ID PORT TIMEOUT_S`.

It starts one harmless process and never ends it, so that only the sweep can.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serving import lab_state, supervisor
from serving.config import GatewayConfig, LabConfig, LaneConfig
from serving.core.errors import TandemError
from serving.core.lane import Strategy


@dataclass(frozen=True)
class StandInLab:
    """`mode`: ready, fails, hangs, loses_a_signal (a finalizer would drop it), replaces_handler, stuck_in_stop."""

    mode: str

    def start(self, config: LabConfig, *, on_progress: Callable[[str], None]) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        if self.mode == "fails":
            raise TandemError("lane batched: no such model")
        if self.mode == "hangs":
            on_progress("hanging")
            _pause()
        if self.mode == "loses_a_signal":
            on_progress("losing a signal")
            with suppress(KeyboardInterrupt):
                _pause()
            on_progress("lost it")
        if self.mode == "replaces_handler":
            # As `ray.init` does.
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
            say("handler replaced")
            _pause()

    def stop(self) -> None:
        if self.mode == "stuck_in_stop":
            say("stuck")
            _pause()


def _pause() -> None:
    while True:
        signal.pause()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def show() -> Iterator[Callable[[str], None]]:
    yield say


def main() -> int:
    mode, run_id, port, timeout_s = sys.argv[1:]
    config = LabConfig(
        gateway=GatewayConfig(port=int(port)),
        lanes=(LaneConfig(name="batched", strategy=Strategy.BATCHED),),
    )
    try:
        supervisor.supervise(
            config,
            config_path=Path("lab.yaml"),
            run_id=run_id,
            load_lab=lambda: StandInLab(mode),
            start_timeout_s=float(timeout_s),
            show=show,
            announce=say,
        )
    except lab_state.AlreadyRunningError as error:
        say(f"error: {error}")
        return 4
    except TandemError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
