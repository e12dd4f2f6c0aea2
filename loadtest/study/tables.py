"""What the study prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.judge.wording import NOTHING
from loadtest.study.analysis import Study
from loadtest.study.schedule import KINDS, LEVELS
from loadtest.study.verdicts import in_percent, in_times
from serving.simulation.verdicts import Verdict

MIXED = (0.6, 1.0)  # loads at which it is told where requests went


def print_study(console: Console, title: str, study: Study) -> None:
    """Goodput by load, TPOT at the lowest, and the whole run; below it the regret of what adapts."""
    made = _table("arm", f"{title}: requests that met it, % of offered, by load over capacity")
    for heading in (
        *(f"{level:g}" for level in LEVELS),
        "all",
        "req/s",
        "gain over the best fixed",
        "TPOT ms at 0.2",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    whole, lowest = study.steps_of(None), study.steps_of(LEVELS[0])
    for arm in study.arms:
        tpot_s = study.tpot_p50_s(arm, lowest)
        made.add_row(
            arm,
            *(_met(study, arm, study.steps_of(level)) for level in (*LEVELS, None)),
            f"{study.goodput_rps(arm, whole).value:.3g}",
            in_times(study.gain(arm)),
            NOTHING if tpot_s is None else f"{1000 * tpot_s:.3g}",
        )
    console.print(made)
    made = _table(
        "load", "regret: % of the best fixed arm's goodput at that load that it did not give (95 % interval)"
    )
    for arm in study.adaptive:
        made.add_column(arm, justify="right", no_wrap=True)
    for level in LEVELS:
        made.add_row(f"{level:g}", *(in_percent(study.regret(arm, level)) for arm in study.adaptive))
    console.print(made)


def lanes_in_words(study: Study, arm: str) -> str:
    """Where an arm's requests went, by kind of text; one line."""
    parts = []
    for level in MIXED:
        shares = study.lane_shares(arm, study.steps_of(level))
        by_kind = "; ".join(
            f"{KINDS[kind]} " + ", ".join(f"{lane} {share:.0%}" for lane, share in lanes.items())
            for kind, lanes in shares.items()
        )
        parts.append(f"at {level:g} of capacity: {by_kind}")
    return f"{arm} served " + ". ".join(parts)


def print_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    for verdict in found:
        console.print(str(verdict), markup=False, highlight=False)


def _met(study: Study, arm: str, steps: Sequence[int]) -> str:
    offered = sum(run[step].offered for run in study.arms[arm] for step in steps)
    met = sum(run[step].met for run in study.arms[arm] for step in steps)
    return f"{100 * met / offered:.1f}" if offered else NOTHING


def _table(first: str, title: str) -> Table:
    made = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column(first, no_wrap=True)
    return made
