"""How many replicas of which lane a load needs: `python -m loadtest.simulate`, which is `tandem simulate`."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from loadtest.judge.slo import parse_slo
from loadtest.judge.wording import count
from loadtest.offer.arrivals import notes, parse_load
from loadtest.offer.load import Load, TraceReplay
from loadtest.report.tables import wide_console
from loadtest.run.experiment import MAX_SEED, split_names
from loadtest.run.options import runs_dir_option
from loadtest.simulate.against import FIGURES, capacities, compare_with_run
from loadtest.simulate.lanes import BY_BATCH, Candidate, candidates, parse_text_mix
from loadtest.simulate.offered import mean_lengths, offered_by
from loadtest.simulate.picture import draw
from loadtest.simulate.plan import Fleet, PlannedFleet, Planner
from loadtest.simulate.tables import print_compared, print_fleets, print_plans, print_profile
from loadtest.simulate.verdict import refuse_unknown_metrics
from serving import config, run_directory
from serving.calibration import profile as profiles
from serving.config import SchedulerConfig
from serving.core.errors import ConfigError, TandemError
from serving.progress import progress

VERB = "simulate"
DEFAULT_MAX_REPLICAS = 1000
OPTIONS_BESIDE_A_RUN = frozenset({"profile_file", "run_dir", "config_file", "seed", "runs_dir", "as_json"})


def _a_number(context: click.Context, option: click.Parameter, value: float) -> float:
    """A range alone takes `nan` for a number within."""
    if math.isnan(value):
        raise click.BadParameter(f"{value} is no number")
    return value


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="How many replicas of which lane hold an objective under a load: simulated by a profile of the lanes, "
    "with the scheduler's own decisions. No lab is needed.",
    epilog="Exit codes: 0 done, 1 no lane holds the objective, 2 wrong usage.",
)
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(path_type=Path),
    required=True,
    help="What the lanes were measured to do: docs/simulate.md.",
)
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), help="A recorded trace to replay.")
@click.option(
    "--load", "load_text", help="A load as bench takes it: poisson:2/s,10min or trace:PATH,speed=10."
)
@click.option(
    "--speed",
    type=click.FloatRange(0, 1_000_000, min_open=True),
    default=1.0,
    show_default=True,
    callback=_a_number,
    help="Replay --trace so many times as fast.",
)
@click.option("--slo", help="Objective, such as ttft_p95<2s,tpot_p95<300ms.  [required without --against]")
@click.option(
    "--against",
    "run_dir",
    type=click.Path(path_type=Path),
    help="Simulate a measured run's own requests, and show how far off the simulation is.",
)
@click.option("--lanes", default="", help="Lanes of the profile, with commas.  [default: all]")
@click.option(
    "--text", help="Kinds of text, such as story=0.7,copy=0.3.  [default: all of the profile, alike]"
)
@click.option(
    "--replicas",
    help="So many of each lane, or a fleet such as batched=3+speculative=2.  [default: the fewest that hold]",
)
@click.option(
    "--max-replicas",
    type=click.IntRange(1, 100_000),
    default=DEFAULT_MAX_REPLICAS,
    show_default=True,
    help="Where the search ends.",
)
@click.option(
    "--cell-replicas",
    type=click.IntRange(1, 100_000),
    help="Replicas of one scheduler; more are several cells.  [default: one scheduler for all]",
)
@click.option("--shared-cores", is_flag=True, help="All replicas of a fleet take turns on the same cores.")
@click.option("--prompt-tokens", type=click.IntRange(1, 10_000_000), help="Of each request, with a rate.")
@click.option("--output-tokens", type=click.IntRange(1, 10_000_000), help="Of each answer, with a rate.")
@click.option(
    "--spread",
    type=click.FloatRange(0, 3),
    default=0.0,
    show_default=True,
    callback=_a_number,
    help="Of the logarithm of those lengths.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="A lab's config, for its scheduler's settings.  [default: those of an empty one]",
)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True)
@runs_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def main(
    profile_file: Path,
    trace_file: Path | None,
    load_text: str | None,
    speed: float,
    slo: str | None,
    run_dir: Path | None,
    lanes: str,
    text: str | None,
    replicas: str | None,
    max_replicas: int,
    cell_replicas: int | None,
    shared_cores: bool,
    prompt_tokens: int | None,
    output_tokens: int | None,
    spread: float,
    config_file: Path | None,
    seed: int,
    runs_dir: Path,
    as_json: bool,
) -> None:
    started_at_s = time.perf_counter()
    if run_dir is not None:
        _refuse_beside_a_run()
        _against(run_dir, profile_file, config_file, seed, runs_dir, as_json=as_json)
        return
    with _faults(), progress() as say:
        if slo is None:
            raise ValueError("a plan needs an objective, such as ttft_p95<2s,tpot_p95<300ms (--slo)")
        objective = parse_slo(slo)
        refuse_unknown_metrics(objective)
        profile = profiles.load(profile_file)
        if profile.doubts:
            click.echo(f"{profile_file}: {profile.doubts}", err=True)
        mix = parse_text_mix(text, profile)
        load = _load(trace_file, load_text, speed)
        say(f"reading {load.label}")
        offered = offered_by(
            load, mix, seed, prompt_tokens=prompt_tokens, output_tokens=output_tokens, spread=spread
        )
        for note in notes(load):
            click.echo(note, err=True)
        lengths = mean_lengths(offered)
        choices = candidates(profile, split_names(lanes) if lanes else (), mix, lengths)
        scheduler = _scheduler(config_file) or SchedulerConfig()
        planner = Planner(
            scheduler,
            offered,
            objective,
            say,
            cell_replicas=cell_replicas,
            seed=seed,
            text=mix.names,
            shares_cores=shared_cores,
        )
        if replicas is None:
            plans = [planner.fewest(choice, max_replicas) for choice in choices]
            fleets = [fleet for plan in plans for fleet in plan.tried]
            is_held = any(plan.enough for plan in plans)
        else:
            plans = []
            fleets = [planner.simulate(fleet) for fleet in _fleets(replicas, choices, max_replicas)]
            is_held = any(fleet.verdict.holds for fleet in fleets)
        took_s = time.perf_counter() - started_at_s
        figures = {
            "load": load.label,
            "num_requests": len(offered),
            "slo": objective.text,
            "seed": seed,
            "text": dict(zip(mix.names, mix.shares, strict=True)),
            "lengths": asdict(lengths),
            "profile": str(profile_file),
            "measured_at": profile.measured_at.isoformat(),
            "measured_on": profile.machine,
            "scheduler": scheduler.model_dump(mode="json"),
            "cell_replicas": cell_replicas,
            "lanes": {
                choice.name: {
                    "capacity_rps": choice.capacity_rps,
                    "drafts": [asdict(part) for part in choice.table],
                }
                for choice in choices
            },
            "plan": {plan.lane: plan.enough.replicas if plan.enough else None for plan in plans},
            "possible": {plan.lane: [plan.least_possible, plan.most_possible] for plan in plans},
            "fleets": [asdict(fleet) for fleet in fleets],
            "took_s": took_s,
        }
        path = run_directory.write_figures_of_own(VERB, figures, runs_dir)
        say("drawing")
        picture = draw(path.with_suffix(".png"), plans, max_replicas, profile, choices, mix, lengths)
    with _printing():
        if as_json:
            click.echo(json.dumps(figures, indent=1))
        else:
            console = wide_console()
            print_profile(console, profile, choices, lengths, mix.in_words)
            if plans:
                print_plans(console, plans, max_replicas, len(offered))
            else:
                print_fleets(console, fleets, len(offered))
            console.print(_pace(fleets, len(offered), load, took_s), markup=False, highlight=False)
        click.echo(f"figures: {path}", err=as_json)
        if picture is not None:
            click.echo(f"picture: {picture}", err=as_json)
    sys.exit(0 if is_held else 1)


def _refuse_beside_a_run() -> None:
    """Raises: click.UsageError: an option says what to simulate, which is the run's own."""
    context = click.get_current_context()
    for option in context.command.params:
        name = option.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in OPTIONS_BESIDE_A_RUN:
            raise click.UsageError(
                f"{option.opts[0]} goes with a plan: --against simulates what the run's stages were"
            )


def _against(
    run_dir: Path, profile_file: Path, config_file: Path | None, seed: int, runs_dir: Path, *, as_json: bool
) -> None:
    with _faults(), progress() as say:
        profile = profiles.load(profile_file)
        left_out: list[str] = []
        warnings = [f"{profile_file}: {profile.doubts}"] if profile.doubts else []
        compared = compare_with_run(
            run_dir,
            profile,
            _scheduler(config_file),
            say,
            seed=seed,
            left_out=left_out.append,
            warn=warnings.append,
        )
        figures = {
            "run": str(run_dir),
            "profile": str(profile_file),
            "measured_at": profile.measured_at.isoformat(),
            "stages": [
                asdict(stage) | {"errors": {figure: stage.error(figure) for figure in FIGURES}}
                for stage in compared
            ],
            "capacities": [asdict(each) | {"error": each.error} for each in capacities(compared)],
            "left_out": left_out,
            "warnings": warnings,
        }
        path = run_directory.write_figures_of_own(f"{VERB}-against", figures, runs_dir)
    with _printing():
        if as_json:
            click.echo(json.dumps(figures, indent=1))
        else:
            print_compared(wide_console(), compared)
            for stage in left_out:
                click.echo(f"left out: {stage}")
        for text in warnings:
            click.echo(f"warning: {text}", err=True)
        click.echo(f"figures: {path}", err=as_json)


def _scheduler(config_file: Path | None) -> SchedulerConfig | None:
    return config.load(config_file).scheduler if config_file else None


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except (ValueError, ConfigError) as error:
        raise click.UsageError(str(error)) from None
    except TandemError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(
            f"{error.filename or 'the figures'}: {error.strerror} (--runs-dir)"
        ) from None


@contextmanager
def _printing() -> Iterator[None]:
    """Raises: click.ClickException: what is printed cannot be written. A pipe that nobody reads is click's."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        # What is left of it would fail once more where the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"what is printed cannot be written: {error.strerror}") from None


def _load(trace_file: Path | None, load_text: str | None, speed: float) -> Load:
    if (trace_file is None) == (load_text is None):
        raise ValueError("one of --trace and --load says what is asked for, and only one")
    if load_text is not None:
        if speed != 1:
            raise ValueError("--speed is for --trace; a load says it itself: trace:PATH,speed=10")
        return parse_load(load_text)
    return TraceReplay(str(trace_file), speed)


def _fleets(text: str, choices: Sequence[Candidate], most: int) -> list[Fleet]:
    """Fleets that `--replicas` asks for: `4` of each lane, or one such as `batched=3+speculative=2`.

    Raises:
        ValueError: it is neither; the text names the part and what there is.
    """
    if text.isdecimal():
        return [((choice, _count(text, text, most)),) for choice in choices]
    by_name = {choice.name: choice for choice in choices}
    fleet = []
    for part in text.split("+"):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in by_name:
            raise ValueError(
                f"--replicas {text!r}: {part.strip()!r} is no lane of the profile and a number; "
                f"{_lanes_in_words(list(by_name))}"
            )
        fleet.append((by_name[name], _count(value, text, most)))
    return [tuple(fleet)]


def _count(value: str, text: str, most: int) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= most:
        raise ValueError(
            f"--replicas {text!r}: {value!r} must be a whole number in 1..{most} (--max-replicas)"
        )
    return int(value)


def _lanes_in_words(names: Sequence[str]) -> str:
    words = f"there are {', '.join(names)}, such as {names[0]}=2 (of --config only the scheduler is read)"
    for name in names:
        if name.endswith(BY_BATCH):
            words += (
                f"; {name} is {name.removesuffix(BY_BATCH)} with the number of drafts that is best for each number "
                "of sequences, as a lane with num_speculative_tokens_per_batch_size: auto has it"
            )
    return words


def _pace(fleets: Sequence[PlannedFleet], num_requests: int, load: Load, took_s: float) -> str:
    ended, simulated_s = sum(fleet.num_ended for fleet in fleets), sum(fleet.took_s for fleet in fleets)
    pace: Any = f"{ended / simulated_s:,.0f}" if simulated_s else "-"
    return (
        f"{load.label}: {count(num_requests, 'request')}; {count(len(fleets), 'simulation')} of {ended:,} in all, "
        f"{pace} a second; {took_s:.1f} s"
    )


if __name__ == "__main__":
    main(prog_name="tandem simulate")
