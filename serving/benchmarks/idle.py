"""`make bench-idle`: the processor time that the running lab takes, by process: its cost while nobody uses it.

It sends no request. Time of processes that begin or end meanwhile is left out. On a busy machine a lab that yields
wakes up late, hence less often, and takes less than it would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import click
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from serving.core.exit_codes import ExitCode
from serving.lab import state as lab_state
from serving.lab.cleanup import processes_of
from serving.progress import progress

DEFAULT_S = 60.0


@dataclass(frozen=True)
class Sample:
    """What a process is, and the seconds of processor time it has had since it began."""

    title: str
    cpu_s: float


@dataclass(frozen=True)
class Group:
    """All processes of one title, and the percent of one core that they took together."""

    title: str
    num_processes: int
    percent: float


def title(command_line: Sequence[str], name: str) -> str:
    """What to call a process: the title it gave itself, its module or its script, else its name.

    Args:
        command_line: as the kernel has it; a process that gave itself a title has it in the first part.
        name: the kernel's name of it.
    """
    first, *rest = command_line or [name]
    if first.startswith("ray::"):
        return first.split()[0].split(".")[0]  # after a dot: the method it happens to run
    if rest[:1] == ["-m"] and len(rest) > 1:
        return rest[1]
    scripts = [Path(part) for part in rest if part.endswith(".py")]
    return f"{scripts[0].parent.name}/{scripts[0].name}" if scripts else name


def groups(before: Mapping[int, Sample], after: Mapping[int, Sample], lasted_s: float) -> list[Group]:
    """The costliest first. A process that is not in both is in no group."""
    members: dict[str, list[float]] = defaultdict(list)
    for pid in before.keys() & after.keys():
        members[after[pid].title].append(after[pid].cpu_s - before[pid].cpu_s)
    found = [Group(name, len(spent), 100 * sum(spent) / lasted_s) for name, spent in members.items()]
    return sorted(found, key=lambda group: (-group.percent, group.title))


def sample(processes: Iterable[psutil.Process]) -> dict[int, Sample]:
    """Of those that still run."""
    found = {}
    for process in processes:
        try:
            with process.oneshot():
                times = process.cpu_times()
                found[process.pid] = Sample(
                    title(process.cmdline(), process.name()), times.user + times.system
                )
        except psutil.NoSuchProcess:
            continue
    return found


def _table(found: Sequence[Group]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("processes")
    table.add_column("number", justify="right")
    table.add_column("% of a core", justify="right")
    for group in found:
        table.add_row(group.title, str(group.num_processes), f"{group.percent:.2f}")
    total = sum(group.percent for group in found)
    table.add_section()
    table.add_row("all", str(sum(group.num_processes for group in found)), f"{total:.2f}")
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=DEFAULT_S,
    show_default=True,
    help="How long to look.",
)
def main(seconds: float) -> None:
    """Say what the running lab takes of the processors, by process. Leave it alone meanwhile."""
    state = lab_state.read(lab_state.state_dir())
    if state is None or not state.is_alive:
        click.echo("no lab is running", err=True)
        click.get_current_context().exit(ExitCode.NOT_RUNNING)
    processes = processes_of(state.run_id)
    began_s, before = monotonic(), sample(processes)
    with progress() as say:
        say(f"looking at {len(before)} processes for {seconds:g} s")
        sleep(seconds)
    lasted_s = monotonic() - began_s
    console = Console()
    console.print(_table(groups(before, sample(processes), lasted_s)))


if __name__ == "__main__":
    main()
