"""`make bench-scheduler`: how fast the scheduler decides, by itself and as a running service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving import run_directory
from serving.benchmarks.core import SLOTS_PER_REPLICA, CoreRate, measure_core
from serving.benchmarks.service import ServiceRate, measure_service
from serving.config import ORDERS, PLACEMENTS
from serving.progress import progress

VERB = "bench-scheduler"
NUM_REPLICAS = (10, 100, 1000)
TARGET_REPLICAS = 100
TARGET_DECISIONS_PER_S = 5000
TARGET_ADMISSIONS_PER_S = 1000
NUM_WAITING = 10_000
MAX_DECISIONS = 5_000
NUM_TASKS = (16, 64, 256)
WIDTH = 120


def core_cases() -> list[tuple[str, str, int]]:
    """Order, placement and replicas of each measurement: all orders at all sizes, all placements at one."""
    orders = [(order, PLACEMENTS[0], size) for size in NUM_REPLICAS for order in ORDERS]
    return orders + [(ORDERS[0], placement, TARGET_REPLICAS) for placement in PLACEMENTS[1:]]


def verdicts(core: Sequence[CoreRate], service: Sequence[ServiceRate]) -> list[str]:
    """The targets, each met or not, with the figure that decides."""
    at_target = [rate for rate in core if rate.num_replicas == TARGET_REPLICAS]
    slowest = min(at_target, key=lambda rate: rate.decisions_per_s)
    fastest = max(service, key=lambda rate: rate.admissions_per_s)
    return [
        f"{_met(slowest.decisions_per_s >= TARGET_DECISIONS_PER_S)}: {TARGET_DECISIONS_PER_S:,} decisions/s at "
        f"{TARGET_REPLICAS} replicas: {slowest.decisions_per_s:,.0f}/s, the slowest "
        f"({slowest.order}, {slowest.placement})",
        f"{_met(fastest.admissions_per_s >= TARGET_ADMISSIONS_PER_S)}: {TARGET_ADMISSIONS_PER_S:,} admissions/s "
        f"through the service: {fastest.admissions_per_s:,.0f}/s with {fastest.num_tasks} clients",
    ]


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def _core_table(rates: Sequence[CoreRate]) -> Table:
    table = Table(
        title=f"Pure code: decisions at {NUM_WAITING:,} waiting requests, {SLOTS_PER_REPLICA} slots a replica",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("order")
    table.add_column("placement")
    for heading in ("replicas", "decisions", "per s of CPU time", "µs each", "wall s"):
        table.add_column(heading, justify="right")
    for rate in rates:
        table.add_row(
            rate.order,
            rate.placement,
            f"{rate.num_replicas:,}",
            f"{rate.decisions:,}",
            f"{rate.decisions_per_s:,.0f}",
            f"{1e6 / rate.decisions_per_s:,.0f}",
            f"{rate.elapsed_s:.1f}",
        )
    return table


def _service_table(rates: Sequence[ServiceRate]) -> Table:
    table = Table(
        title="Running service: leases granted and released over the control channel",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for heading in ("clients", "slots", "admissions", "admissions per s", "grant p50 ms", "grant p99 ms"):
        table.add_column(heading, justify="right")
    for rate in rates:
        times = [
            "–" if value is None else f"{1000 * value:.1f}" for value in (rate.grant_p50_s, rate.grant_p99_s)
        ]
        table.add_row(
            str(rate.num_tasks),
            str(rate.num_slots),
            f"{rate.admissions:,}",
            f"{rate.admissions_per_s:,.0f}",
            *times,
        )
    return table


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", default=1, show_default=True, help="Of requests, releases and ties.")
@click.option(
    "--limit-s",
    type=click.FloatRange(min=0.05, max=60),
    default=1.5,
    show_default=True,
    help="Longest time of one measurement.",
)
@click.option(
    "--runs-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=run_directory.RUNS_DIR,
    show_default=True,
)
def main(seed: int, limit_s: float, runs_dir: Path) -> None:
    """Measure decisions per second of the pure code, and admissions per second of the running service."""
    core: list[CoreRate] = []
    with progress() as say:
        for order, placement, num_replicas in core_cases():
            say(f"pure code, {num_replicas} replicas")
            core.append(
                measure_core(
                    order,
                    placement,
                    num_replicas,
                    num_waiting=NUM_WAITING,
                    max_decisions=MAX_DECISIONS,
                    limit_s=limit_s,
                    seed=seed,
                )
            )
        say("running service")
        service = measure_service(NUM_TASKS, limit_s)
    said = verdicts(core, service)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(_core_table(core))
    console.print(_service_table(service))
    for line in said:
        console.print(Text(line))
    path = run_directory.write_figures(
        VERB,
        {
            "seed": seed,
            "core": [asdict(rate) | {"decisions_per_s": rate.decisions_per_s} for rate in core],
            "service": [asdict(rate) | {"admissions_per_s": rate.admissions_per_s} for rate in service],
            "verdicts": said,
        },
        runs_dir,
    )
    console.print(Text(f"figures: {path}"))


if __name__ == "__main__":
    main()
