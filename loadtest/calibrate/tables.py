"""What `tandem calibrate` prints."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.calibrate.measure import Calibration
from loadtest.judge.wording import NOTHING, number, share
from loadtest.report.profile_table import GOOD_ERROR, profile_table


def print_calibration(console: Console, made: Calibration) -> None:
    """A line a lane, acceptance by workload, and reckoned beside measured tokens/s."""
    console.print(profile_table(made.profile))
    for lane in made.profile.lanes:
        for workload, rates in lane.acceptance.items():
            shown = " ".join(f"{rate:.2f}" for rate in rates)
            console.print(
                f"{lane.lane}, {workload}: accepted by position {shown}; drafts are "
                f"{share(lane.draft_share.get(workload))} of their full length on average",
                markup=False,
                highlight=False,
            )
    console.print(_compared(made))
    good = sum(abs(each.error) <= GOOD_ERROR for each in made.compared)
    console.print(f"{good} of {len(made.compared)} within {GOOD_ERROR:.0%}", markup=False, highlight=False)


def _compared(made: Calibration) -> Table:
    table = _table("Decoding: tokens/s as measured, and as the profile reckons")
    table.add_column("lane", no_wrap=True)
    table.add_column("text")
    for heading in ("at once", "context", "measured", "reckoned", "error"):
        table.add_column(heading, justify="right")
    for each in made.compared:
        table.add_row(
            each.cell.lane,
            each.cell.workload or NOTHING,
            f"{each.cell.batch}",
            f"{each.context_tokens:.0f}",
            number(each.measured_tokens_per_s, None),
            number(each.expected.tokens_per_s, None),
            f"{100 * each.error:+.1f}%",
            style="" if abs(each.error) <= GOOD_ERROR else "red",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)
