"""What `tandem calibrate` prints."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from loadtest.calibrate.measure import Calibration
from loadtest.judge.wording import NOTHING, number, share
from serving.calibration.profile import LaneProfile

GOOD_ERROR = 0.15


def print_calibration(console: Console, made: Calibration) -> None:
    """A line a lane, acceptance by workload, and reckoned beside measured tokens/s."""
    console.print(_lanes(made))
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


def _lanes(made: Calibration) -> Table:
    table = _table(f"Profile of {made.profile.model}")
    table.add_column("lane", no_wrap=True)
    for heading in ("steps", "step ms", "+ µs a token", "+ ns a KV token", "+ ms a draft", "knee tokens"):
        table.add_column(heading, justify="right")
    for heading in ("off by, median", "p95"):
        table.add_column(heading, justify="right")
    for lane in made.profile.lanes:
        step = lane.step_time
        table.add_row(
            lane.lane,
            f"{lane.residuals.num_points}",
            number(step.fixed_s, None, 1e3),
            number(step.token_s, None, 1e6),
            number(step.kv_token_s, None, 1e9),
            NOTHING if lane.draft_cost is None else number(lane.draft_cost.draft_s(1, 1), None, 1e3),
            _knee(lane),
            share(lane.residuals.median_share),
            share(lane.residuals.p95_share),
        )
    return table


def _knee(lane: LaneProfile) -> str:
    """Tokens of a step from which on its arithmetic takes longer than reading the weights."""
    return NOTHING if lane.roofline is None else number(lane.roofline.knee_tokens, None)


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
