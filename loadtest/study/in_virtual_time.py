"""`make study-adaptive SIMULATED=1`: the study on simulated engines of several machines, in virtual time."""

from __future__ import annotations

import time
from pathlib import Path

import click

from loadtest.report.tables import wide_console
from loadtest.run.experiment import MAX_SEED
from loadtest.run.options import runs_dir_option
from loadtest.study.arms import ARMS, PLACEMENT
from loadtest.study.figures import figures_of
from loadtest.study.picture import Panel, draw
from loadtest.study.simulated import HARDWARE, setting, study
from loadtest.study.tables import lanes_in_words, print_study, print_verdicts
from loadtest.study.verdicts import verdicts
from serving import run_directory
from serving.progress import progress

VERB = "study-adaptive-simulated"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--hardware",
    "names",
    multiple=True,
    type=click.Choice(list(HARDWARE)),
    help="May be repeated.  [default: all]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Each with arrivals of its own, the same for all arms.",
)
@click.option(
    "--step-s",
    type=click.FloatRange(0.1, 3600),
    help="Simulated time of each level of load.  [default: by hardware]",
)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=1, show_default=True)
@runs_dir_option
def main(names: tuple[str, ...], repeats: int, step_s: float | None, seed: int, runs_dir: Path) -> None:
    """Compare decoding that adapts with decoding that does not, on SIMULATED engines, in virtual time."""
    started_at_s = time.perf_counter()
    console = wide_console()
    panels, found, figures = [], [], {}
    with progress() as say:
        for name in names or HARDWARE:
            hardware = HARDWARE[name]
            by_objective = {}
            for objective in hardware.objectives:
                given = setting(hardware, objective)
                judged = study(given, repeats=repeats, seed=seed, say=say, step_s=step_s)
                found += verdicts(judged, PLACEMENT, f"simulated {name}, {objective.name}")
                panels.append(Panel(objective.name, f"simulated: {name}", judged, given.capacity_rps))
                print_study(
                    console, f"SIMULATED {hardware.title}; {objective.name}: {objective.text}", judged
                )
                console.print(lanes_in_words(judged, PLACEMENT), markup=False, highlight=False)
                slots = {
                    arm: {model.name: [count, model.max_num_seqs] for model, count in fleet}
                    for arm, fleet in given.fleets.items()
                }
                by_objective[objective.name] = {
                    "text": objective.text,
                    "capacity_rps": given.capacity_rps,
                    "replicas_and_slots": slots,
                } | figures_of(judged)
            figures[name] = {
                "title": hardware.title,
                "profile": hardware.profile_file.name,
                "objectives": by_objective,
            }
        print_verdicts(console, found)
        took_s = time.perf_counter() - started_at_s
        path = run_directory.write_figures(
            VERB,
            {
                "engine": "simulated",
                "seed": seed,
                "repeats": repeats,
                "arms": ARMS,
                "hardware": figures,
                "verdicts": [str(verdict) for verdict in found],
                "took_s": took_s,
            },
            runs_dir,
        )
        say("drawing")
        picture = draw(path.with_suffix(".png"), panels)
    click.echo(f"figures: {path}\npicture: {picture}\ntook {took_s:.0f} s")


if __name__ == "__main__":
    main(prog_name=VERB)
