"""Cleaning up after a lab: its processes, their shared memory, their sockets, its ports, its state file.

Every process of a lab carries TANDEM_RUN_ID in its environment; the sweep knows them from all others by it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Set
from pathlib import Path

import psutil

from serving.core.errors import TandemError
from serving.core.run_mark import RUN_ID_VARIABLE
from serving.lab import shared_memory, sockets
from serving.lab import state as lab_state
from serving.lab.shared_memory import Segment
from serving.lab.state import LabState
from serving.machine import port_fault
from serving.progress import Say

GRACE_S = 5.0  # from SIGTERM to SIGKILL
KILL_LIMIT_S = 5.0
ZOMBIE_LIMIT_S = 2.0
PORT_LIMIT_S = 10.0
POLL_S = 0.1
ROUNDS = 5


class SweepError(TandemError):
    """Something of the lab outlived the sweep."""


def clean_up(
    directory: Path, state: LabState, say: Say, grace_s: float = GRACE_S, *, is_stopped: bool = True
) -> None:
    """Sweep up a run that nobody supervises any more, remove the state file, wait for the ports.

    Args:
        is_stopped: False where a lab on a Ray cluster, out of a sweep's reach, may run on. Then the state file
            stays, for `tandem down`.

    Raises:
        SweepError: a process survived (the state file stays), or a port is still in use on one machine.
    """
    say("stopping: ending what is left of the lab")
    for name in sweep(state.run_id, grace_s, shared_memory.recorded(directory, state.run_id)):
        say(f"stopping: ended {name}")
    shared_memory.forget(directory)
    sockets.remove_left(state.temp_dirs, state.pid, state.run_id)
    if not is_stopped and state.address is not None:
        return
    lab_state.remove(directory)
    _wait_for_ports(state, say)


def _wait_for_ports(state: LabState, say: Say) -> None:
    say("stopping: waiting for the ports to be free")
    give_up_at_s = time.monotonic() + PORT_LIMIT_S
    while taken := [port for port in state.ports if port_fault(state.host, port)]:
        if time.monotonic() > give_up_at_s:
            if state.address is not None:
                # The gateways belong to the cluster, which ends them in its own time.
                say(
                    f"port {taken[0]} is in use still: Ray Serve on the cluster at {state.address} is stopping, "
                    "or another program has it"
                )
                return
            raise SweepError(
                f"every process of the lab has ended, yet port {taken[0]} is in use after {PORT_LIMIT_S:g} s: "
                "another program has it (`ss -ltnp` shows which)"
            )
        time.sleep(POLL_S)


def clear_stale(directory: Path, say: Say) -> None:
    """Clean up after a supervisor that died without a stop. The caller holds the lock.

    Raises:
        SweepError: its lab was on a Ray cluster, out of a sweep's reach, and is forgotten with the state file.
    """
    if (state := lab_state.read(directory)) is not None:
        if state.address is not None:
            # Who listens on its port says nothing of whose lab is there; to ask the cluster takes Ray.
            raise SweepError(
                f"the lab's supervisor (pid {state.pid}) died, and its lab may still run on the Ray cluster at "
                f"{state.address}; `tandem down` looks there and stops it"
            )
        say(f"cleaning up after a lab whose supervisor (pid {state.pid}) died")
        clean_up(directory, state, say)


def processes_of(run_id: str) -> list[psutil.Process]:
    """This user's processes, this one excepted, whose environment says they belong to the run."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and _belongs(process, run_id)
    ]


def _belongs(process: psutil.Process, run_id: str) -> bool:
    try:
        return process.uids().real == os.getuid() and process.environ().get(RUN_ID_VARIABLE) == run_id
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def pids_of(run_id: str) -> list[int]:
    return [process.pid for process in processes_of(run_id)]


def sweep(run_id: str, grace_s: float = GRACE_S, segments: Set[Segment] = frozenset()) -> list[str]:
    """End what is left of a run: SIGTERM, then SIGKILL after `grace_s` seconds. Nothing else is signalled.

    When all have ended, the shared memory is removed that they had mapped.

    Args:
        segments: what those had mapped that have ended already.

    Returns:
        What was ended, as "name (pid)".

    Raises:
        SweepError: something survived SIGKILL.
    """
    ended: dict[int, str] = {}
    swept: list[psutil.Process] = []
    mapped = set(segments)
    # A dying process may have started another a moment ago: look again until nothing is found.
    for _ in range(ROUNDS):
        running = processes_of(run_id)
        if not running:
            break
        swept += running
        mapped |= shared_memory.segments_of(process.pid for process in running)
        for process in running:
            _signal(process, signal.SIGTERM, ended)
        alive = _wait(running, grace_s)
        for process in alive:
            _signal(process, signal.SIGKILL, ended)
        _wait(alive, KILL_LIMIT_S)
    if left := pids_of(run_id):
        raise SweepError(f"processes of the lab are still there after SIGKILL: {', '.join(map(str, left))}")
    # A moment for their new parent to collect them: a process list then shows none, not even a zombie.
    psutil.wait_procs(swept, timeout=ZOMBIE_LIMIT_S)
    shared_memory.remove_left(mapped)
    return list(ended.values())


def _wait(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still run after at most `limit_s` seconds."""
    give_up_at_s = time.monotonic() + limit_s
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < give_up_at_s:
        time.sleep(POLL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        # A zombie whose threads are still ending holds its sockets; one without is as good as gone, and in a
        # container perhaps nobody ever collects it.
        if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
            return process.is_running()
        process.wait(timeout=0)  # collects it if it is a child of this process
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return False
    return False


def _signal(process: psutil.Process, number: signal.Signals, ended: dict[int, str]) -> None:
    try:
        ended[process.pid] = f"{process.name()} ({process.pid})"
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
