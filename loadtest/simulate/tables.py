"""What `tandem simulate` prints: the profile it reckons with, and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.judge.wording import NOTHING, count, number, share
from loadtest.report.profile_table import GOOD_ERROR, profile_table
from loadtest.simulate.against import FIGURES, Compared, capacities
from loadtest.simulate.lanes import Candidate
from loadtest.simulate.plan import LanePlan, PlannedFleet
from serving.calibration.profile import Profile
from serving.core.speculation.cost_model import BatchRange, Lengths

MET = "met, and its\n95% interval"
PLAN_HEADINGS = (
    "replicas",
    "holds",
    MET,
    "TTFT p50 ms",
    "p95",
    "TPOT p50 ms",
    "p95",
    "tokens/s",
    "slots used",
    "refused",
)


def print_profile(
    console: Console, profile: Profile, lanes: Sequence[Candidate], lengths: Lengths, rates_of: str
) -> None:
    """The profile's lanes, and what follows for these requests."""
    console.print(profile_table(profile))
    console.print(
        Text(
            f"requests: {lengths.prompt_tokens:,.0f} tokens of prompt and {lengths.output_tokens:,.0f} of answer "
            f"on average; text: {rates_of}"
        )
    )
    for lane_choice in lanes:
        console.print(
            Text(
                f"{lane_choice.name}: {_drafts(lane_choice.table)}; a full replica serves "
                f"{number(lane_choice.capacity_rps, None)} requests/s"
            )
        )


def print_plans(console: Console, plans: Sequence[LanePlan], most: int, num_requests: int) -> None:
    """The fewest replicas of each lane, what breaks with one less, which lane needs least, and what is open."""
    made = _table("Fewest replicas that hold the objective")
    made.add_column("lane", no_wrap=True)
    _add_headings(made)
    made.add_column("one less breaks", no_wrap=True)
    for plan in plans:
        shown = plan.enough or plan.one_too_few
        assert shown is not None, "a search simulates one fleet at least"
        too_few = plan.one_too_few
        breaks = NOTHING if too_few is None else too_few.verdict.binding or NOTHING
        made.add_row(plan.lane, *_cells(shown), breaks, style="" if plan.enough else "red")
    console.print(made)
    enough = [plan.enough for plan in plans if plan.enough]
    if enough:
        fewest = min(fleet.replicas for fleet in enough)
        names = [fleet.name for fleet in enough if fleet.replicas == fewest]
        console.print(Text(f"Least: {count(fewest, 'replica')} of {' or of '.join(names)}."))
    else:
        console.print(
            Text(f"No lane holds the objective with up to {count(most, 'replica')} (--max-replicas).")
        )
    if text := unsettled(plans, num_requests):
        console.print(Text(text))


def unsettled(plans: Sequence[LanePlan], num_requests: int) -> str | None:
    """What of a plan so many requests leave open, in words; None where nothing is."""
    if not (open_plans := [plan for plan in plans if not plan.is_settled]):
        return None
    ranges = ", ".join(f"{plan.lane} may need {_range(plan)}" for plan in open_plans)
    text = f"Not settled by {count(num_requests, 'request')}, drawn once (--seed): {ranges}"
    enough = [plan.enough.replicas for plan in plans if plan.enough]
    least = [plan for plan in plans if plan.enough and plan.enough.replicas == min(enough)]
    others = [plan for plan in plans if plan not in least]
    if any(_may_need_as_few(other, plan) for other in others for plan in least):
        text += "; so which lane needs least is open"
    return f"{text}."


def _range(plan: LanePlan) -> str:
    return f"{plan.least_possible:,} " + (
        "or more" if plan.most_possible is None else f"to {plan.most_possible:,}"
    )


def _may_need_as_few(other: LanePlan, plan: LanePlan) -> bool:
    return plan.most_possible is None or other.least_possible <= plan.most_possible


def print_fleets(console: Console, fleets: Sequence[PlannedFleet], num_requests: int) -> None:
    """What given fleets do, and of one with several lanes which of them served what."""
    made = _table("Simulated")
    made.add_column("lane", overflow="fold")
    _add_headings(made)
    made.add_column("misses")
    for fleet in fleets:
        made.add_row(fleet.name, *_cells(fleet), _missed(fleet), style="" if fleet.verdict.holds else "red")
    console.print(made)
    for fleet in fleets:
        if len(fleet.lanes) > 1:
            console.print(_lane_uses(fleet))
    if names := [fleet.name for fleet in fleets if not fleet.verdict.is_settled]:
        console.print(
            Text(
                f"Not settled by {count(num_requests, 'request')}, drawn once (--seed): whether the objective "
                f"holds with {', '.join(names)}."
            )
        )


def _lane_uses(fleet: PlannedFleet) -> Table:
    made = _table("Where its requests went")
    made.add_column("lane", no_wrap=True)
    kinds = list(fleet.lanes[0].by_text)
    for heading in ("replicas", "requests", "share", *kinds, "slots used"):
        made.add_column(Text(heading), justify="right")
    num_served = sum(use.num_requests for use in fleet.lanes)
    for use in fleet.lanes:
        made.add_row(
            use.lane,
            f"{use.replicas:,}",
            f"{use.num_requests:,}",
            share(use.num_requests / num_served if num_served else None),
            *(f"{use.by_text[kind]:,}" for kind in kinds),
            share(use.slots_share),
        )
    return made


def print_compared(console: Console, compared: Sequence[Compared]) -> None:
    """Each figure as simulated and measured, with the error; then the errors of all stages in a sentence."""
    made = _table("Simulated / measured, and the simulation's error")
    for heading in ("lane", "workload", "load"):
        made.add_column(heading, no_wrap=True)
    for heading in ("requests", "TTFT p50 ms", "error", "TTFT p95 ms", "error", "TPOT p50 ms", "error"):
        made.add_column(heading, justify="right")
    made.add_column("tokens/s", justify="right")
    made.add_column("error", justify="right")
    for stage in compared:
        cells = []
        for figure in FIGURES:
            scale = 1000 if figure.endswith("_s") and not figure.endswith("per_s") else 1
            pair = (number(figures[figure], None, scale) for figures in (stage.simulated, stage.measured))
            cells += [" / ".join(pair), _signed(stage.error(figure))]
        made.add_row(stage.lane, stage.workload, stage.load, f"{stage.num_requests:,}", *cells)
    console.print(made)
    spreads = {figure: [each.spread[figure] for each in compared if each.spread] for figure in FIGURES}
    for figure, name in zip(FIGURES, ("TTFT p50", "TTFT p95", "TPOT p50", "tokens/s"), strict=True):
        errors = sorted(abs(error) for stage in compared if (error := stage.error(figure)) is not None)
        if not errors:
            continue
        within = sum(error <= GOOD_ERROR for error in errors)
        text = (
            f"{name}: error {share(errors[len(errors) // 2])} in the median stage, {share(errors[-1])} in the "
            f"worst; within {100 * GOOD_ERROR:.0f}% in {within} of {len(errors)}"
        )
        if spreads[figure]:
            text += f"; measured repeats of a stage differ by {share(median(spreads[figure]))} in the median stage"
        console.print(Text(text))

    most = [abs(each.error) for each in capacities(compared) if each.error is not None]
    console.print(
        Text(
            "capacity, the most tokens/s of any load: "
            + "; ".join(
                f"{each.lane} on {each.workload} {number(each.simulated_tokens_per_s, None)} / "
                f"{number(each.measured_tokens_per_s, None)}, {_signed(each.error)}"
                for each in capacities(compared)
            )
            + f"; within {100 * GOOD_ERROR:.0f}% in {sum(error <= GOOD_ERROR for error in most)} of {len(most)}"
        )
    )


def _signed(error: float | None) -> str:
    return NOTHING if error is None else f"{100 * error:+.0f}%"


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _add_headings(table: Table) -> None:
    for heading in PLAN_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=heading == MET)


def _cells(fleet: PlannedFleet) -> list[str]:
    met = share(fleet.verdict.attainment).replace(" [", "\n[")
    if fleet.was_given_up:
        # Most of the requests were not reached: their figures would say nothing of the load.
        return [f"{fleet.replicas:,}", "no", *([NOTHING] * (len(PLAN_HEADINGS) - 2))]
    return [
        f"{fleet.replicas:,}",
        "yes" if fleet.verdict.holds else "no",
        met,
        *(number(value_s, None, 1000) for value_s in (*fleet.ttft_s, *fleet.tpot_s)),
        number(fleet.output_tokens_per_s, None),
        share(fleet.slots_share),
        f"{fleet.num_refused:,}",
    ]


def _missed(fleet: PlannedFleet) -> str:
    binding = fleet.verdict.binding
    return NOTHING if binding is None else f"{binding}: {count(fleet.verdict.misses[binding], 'request')}"


def _drafts(table: Sequence[BatchRange]) -> str:
    if len(table) == 1:
        return f"k = {table[0].num_drafts}" if table[0].num_drafts else "no drafts"
    return ", ".join(
        f"k = {part.num_drafts} at {part.first}" + (f" to {part.last}" if part.last > part.first else "")
        for part in table
    )
