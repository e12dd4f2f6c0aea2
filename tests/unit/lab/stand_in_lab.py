"""A lab without Ray under the real supervisor.

`python -m tests.unit.lab.stand_in_lab MODE RUN_ID PORT TIMEOUT_S [ADDRESS]`, as if on the Ray cluster at ADDRESS.

It starts one harmless process and never ends it, so that only the sweep can.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.config import GatewayConfig, LabConfig, LaneConfig
from serving.core.errors import AlreadyRunningError, TandemError
from serving.core.lane import Strategy
from serving.core.run_mark import RUN_ID_VARIABLE
from serving.lab import shared_memory, supervisor


@dataclass(frozen=True)
class StandInLab:
    """`mode`: ready, fails, hangs, loses_a_signal (a finalizer would drop it), replaces_handler, stuck_in_stop,
    leaves_memory (its process has a segment of shared memory, and is killed by `stop`).
    """

    mode: str

    def start(self, config: LabConfig, *, on_progress: Callable[[str], None]) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
        if self.mode == "leaves_memory":
            say(f"segment {start_segment_holder().segment}")
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
        for process in psutil.Process().children() if self.mode == "leaves_memory" else []:
            process.kill()
            process.wait()


# Makes a segment that nobody tidies up: the process that would, Python's resource tracker, is told to forget it.
SEGMENT_HOLDER = """
import time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class SegmentHolder:
    """A process with a segment of shared memory that outlives it."""

    process: subprocess.Popen[str]
    segment: str

    @property
    def is_segment_there(self) -> bool:
        return (shared_memory.SHM_DIR / self.segment).exists()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_segment_holder(run_id: str | None = None) -> SegmentHolder:
    """Start one; of this run, else of that which this process is of."""
    env = os.environ | ({RUN_ID_VARIABLE: run_id} if run_id else {})
    process = subprocess.Popen(
        [sys.executable, "-c", SEGMENT_HOLDER], stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    segment = process.stdout.readline().strip()
    process.stdout.close()
    return SegmentHolder(process, segment)


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
    mode, run_id, port, timeout_s, *address = sys.argv[1:]
    shared_memory.LOOK_EVERY_S = 0.02
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
            address=address[0] if address else None,
        )
    except AlreadyRunningError as error:
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
