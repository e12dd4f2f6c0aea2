"""A profile's lanes as a table: as `tandem calibrate` measured them and `tandem simulate` reckons with them."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from loadtest.judge.wording import NOTHING, number, share
from serving.calibration.profile import LaneProfile, Profile

GOOD_ERROR = 0.15  # of what is reckoned by a profile, as a share of what was measured
HEADINGS = (
    "steps",
    "step ms",
    "+ µs a token",
    "+ ns a KV token",
    "+ ms a draft",
    "knee tokens",
    "off by, median",
    "p95",
    "slots",
)


def profile_table(profile: Profile) -> Table:
    """One line a lane: its step time, and how far that is from the measured steps."""
    title = f"Profile of {profile.model}, measured {profile.measured_at:%Y-%m-%d}"
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("lane", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for lane in profile.lanes:
        table.add_row(lane.lane, *_cells(lane))
    return table


def _cells(lane: LaneProfile) -> tuple[str, ...]:
    """In the order of `HEADINGS`."""
    step = lane.step_time
    return (
        f"{lane.residuals.num_points}",
        number(step.fixed_s, None, 1e3),
        number(step.token_s, None, 1e6),
        number(step.kv_token_s, None, 1e9),
        NOTHING if lane.draft_cost is None else number(lane.draft_cost.draft_s(1, 1), None, 1e3),
        NOTHING if step.knee_tokens == float("inf") else number(step.knee_tokens, None),
        share(lane.residuals.median_share),
        share(lane.residuals.p95_share),
        f"{lane.max_num_seqs}",
    )
