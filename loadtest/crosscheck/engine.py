"""The processes around a tool: the engine that it measures, and busy ones that take its processor away.

Each is the leader of a session, so that the kernel shares the processors between the tool and them, and not within
one group, where it makes a group of each session.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.crosscheck.cases import Profile
from loadtest.crosscheck.tools import SERVED_NAME

STOP_LIMIT_S = 10
MAX_STREAMS = 1024  # in the engine's batch: none ever waits in it
FIRST = -10  # the engine's niceness, where this user may set it

# It ends by itself, also when whoever started it is gone.
BUSY = """
import os, sys, time
parent, until_s = os.getppid(), time.monotonic() + float(sys.argv[1])
while time.monotonic() < until_s and os.getppid() == parent:
    pass
"""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A simulated engine.

    Attributes:
        is_first: it goes before the processes of other sessions; else it competes with them.
    """

    url: str
    process: psutil.Process
    is_first: bool

    def processor_s(self) -> float:
        """The processor time that it has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def running_engine(profile: Profile) -> Iterator[RunningEngine]:
    """A simulated engine in a process of its own, put before others where that is allowed.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "serving.engines.simulated.server", "--model", SERVED_NAME]
    command += ["--ttft-ms", str(profile.ttft_ms), "--step-ms", str(profile.step_ms)]
    command += ["--tokens-per-chunk", str(profile.tokens_per_chunk), "--max-num-seqs", str(MAX_STREAMS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError("the simulated engine did not start; its error is above")
            yield RunningEngine(url, psutil.Process(process.pid), _put_first(process.pid))
        finally:
            process.terminate()
            process.wait(STOP_LIMIT_S)


def _put_first(pid: int) -> bool:
    """Whether the process and the group of its session could be given priority, which takes rights."""
    group = Path(f"/proc/{pid}/autogroup")
    try:
        os.setpriority(os.PRIO_PROCESS, pid, FIRST)
        if group.exists():
            group.write_text(str(FIRST))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def busy_processes(count: int, limit_s: float) -> Iterator[None]:
    """So many processes that do nothing but take processor time, at ordinary priority, for the block.

    Args:
        limit_s: they end by then, whatever becomes of this process.
    """
    command = [sys.executable, "-c", BUSY, str(limit_s)]
    with contextlib.ExitStack() as started:
        for _ in range(count):
            process = subprocess.Popen(command, start_new_session=True)
            started.callback(process.wait)
            started.callback(process.kill)
        yield
