"""The processes of what is measured, as the kernel knows them: time, memory, niceness, scheduling group."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from serving.benchmarks.idle import title

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
UTIME, STIME, NICE = 11, 12, 16  # fields of /proc/<pid>/stat, counted behind the name
KIB = 1024
# What keeps a Ray cluster, and no request ever passes through.
HOUSEKEEPING = (
    "gcs_server", "raylet", "ray::ServeController", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE",
    "dashboard/", "_private/", "workers/", "serving", "multiprocessing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """A process and what decides how much of a processor it gets.

    Attributes:
        peer: what it belongs to.
        part: `gateway`, `engine`, `client`, or `rest`: what no request passes through.
        group: its scheduling group, as /proc/<pid>/autogroup names it; empty where there are none.
    """

    peer: str
    part: str
    pid: int
    title: str
    niceness: int
    group: str


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that come from it, those that run now."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """End a program that was started here, and what it leaves behind."""
    left = tree(process.pid)
    process.terminate()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for each in left[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def part_of(name: str, engine: str | None) -> str:
    """What a process of a Ray cluster is, by its title; one that is not known counts as part of the gateway.

    Args:
        engine: title of the engines among them.
    """
    if name == engine:
        return "engine"
    return "rest" if name.startswith(HOUSEKEEPING) else "gateway"


def titled(process: psutil.Process) -> str:
    """Its title; empty when it has ended."""
    try:
        return title(process.cmdline(), process.name())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def see(peer: str, part: str, process: psutil.Process) -> Seen | None:
    """Look at a process; None when it has ended."""
    try:
        niceness = int(_stat(process.pid)[NICE])
        group = ""
        with contextlib.suppress(OSError):
            group = Path(f"/proc/{process.pid}/autogroup").read_text().strip()
    except (OSError, IndexError):
        return None
    return Seen(peer, part, process.pid, titled(process), niceness, group)


def processor_s(pids: Iterable[int]) -> float:
    """The processor time, user and system, that processes have had so far, in seconds; one that ended has none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            stat = _stat(pid)
            total += int(stat[UTIME]) + int(stat[STIME])
    return total / TICKS_PER_S


def memory_bytes(pids: Iterable[int]) -> int:
    """The memory of processes: what they share is divided among those that share it (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += KIB * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total


def _stat(pid: int) -> list[str]:
    """The fields behind the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
