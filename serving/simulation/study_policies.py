"""`make study-policies`: the order policies on one simulated trace, by load. All times are simulated.

Three parts:

- `ttft`: the scheduler does not hear of deadlines, so nothing is refused for one and requests wait as long as it
  takes. TTFT is compared here, for refusal at arrival would hide the waiting of those that were refused.
- `slo`: each request tells its deadline. Those that cannot make it by the scheduler's estimate are refused at
  arrival, and those that still wait at their deadline expire.
- `fair`: two tenants offer 10:1, both more than their half, with room in the queue for all.

In all of them SLO attainment is over all arrivals: refused, expired and late requests are misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from serving import run_directory
from serving.config import ORDERS, SchedulerConfig, SimulatedProfile
from serving.progress import progress
from serving.simulation.lab import SimulatedLab
from serving.simulation.replica import ReplicaModel
from serving.simulation.results import SimulatedRun, refusals, shares, slo_attainment, ttft_summary
from serving.simulation.traffic import RequestClass, capacity_rps, poisson_trace
from serving.simulation.verdicts import (
    SJF_FAST_AGEING,
    PolicyRow,
    Verdict,
    judge_edf,
    judge_fair,
    judge_sjf,
)

VERB = "study-policies"
# Every order with its default settings, and `sjf` once more with ageing so fast that a long overload outruns it.
POLICIES: dict[str, dict[str, object]] = {
    **{order: {"order": order} for order in ORDERS},
    SJF_FAST_AGEING: {"order": "sjf", "ageing_tokens_per_s": 20},
}
LOADS = (0.7, 0.9, 1.0, 1.1, 1.2)
FAIR_LOAD = 6.6  # at 10:1 the smaller tenant then offers 0.6 of capacity, more than its half
TENANT_LOADS = {"heavy": 10.0, "light": 1.0}
NUM_REPLICAS = 4
MODEL = ReplicaModel(
    SimulatedProfile(ttft_ms=60, step_ms=20, step_ms_per_request=2.5),
    max_num_seqs=8,
    prefill_ms_per_prompt_token=0.2,
)
PREDICTION_SIGMA = 0.3
WARM_UP_SHARE = 0.1
NO_BOUND = 1_000_000
WIDTH = 160


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the study."""

    name: str
    title: str
    loads: tuple[float, ...]
    tells_deadline: bool
    has_queue_bound: bool = True


PARTS = (
    Part("ttft", "no deadlines told: requests wait, up to the queue's bound", LOADS, tells_deadline=False),
    Part("slo", "deadlines told: refused early, or expired at the deadline", LOADS, tells_deadline=True),
    Part(
        "fair",
        "tenants offer 10:1, both backlogged; no queue bound, no deadlines told",
        (FAIR_LOAD,),
        tells_deadline=False,
        has_queue_bound=False,
    ),
)


def request_classes() -> list[RequestClass]:
    """Four short requests to one long, the same mix from both tenants; short ones are in the highest band."""
    return [
        kind
        for tenant, load in TENANT_LOADS.items()
        for kind in (
            RequestClass("short", tenant, 0.8 * load, 120, 30, band=0, ttft_slo_s=1.0),
            RequestClass("long", tenant, 0.2 * load, 400, 400, band=2, ttft_slo_s=10.0),
        )
    ]


def run_policy(part: Part, policy: str, load: float, num_requests: int, seed: int) -> PolicyRow:
    """One policy at one load; the same seed gives all of them the same requests."""
    classes = request_classes()
    # Lengths do not depend on the rate, so one trace tells the capacity for all.
    capacity = capacity_rps(
        MODEL, NUM_REPLICAS, poisson_trace(classes, num_requests=num_requests, rate_rps=1, seed=seed)
    )
    trace = poisson_trace(
        classes,
        num_requests=num_requests,
        rate_rps=load * capacity,
        seed=seed,
        prediction_sigma=PREDICTION_SIGMA,
        tells_deadline=part.tells_deadline,
    )
    settings = POLICIES[policy] | {"seed": seed}
    if not part.has_queue_bound:
        settings |= {"max_waiting_requests": NO_BOUND, "max_waiting_tokens": NO_BOUND * 2048}
        settings |= {"max_queue_wait_s": 3600}
    config = SchedulerConfig.model_validate(settings)
    return _row(policy, load, SimulatedLab(config, MODEL, NUM_REPLICAS, trace).run())


def _row(policy: str, load: float, run: SimulatedRun) -> PolicyRow:
    counted = run.after_warm_up(WARM_UP_SHARE)
    short, long = (
        ttft_summary([request for request in counted if request.arrival.kind.name == name])
        for name in ("short", "long")
    )
    return PolicyRow(
        policy,
        load,
        len(counted),
        short,
        long,
        slo_attainment(counted),
        run.served_while_all_wait,
        refusals(counted),
    )


def judge(rows: dict[str, list[PolicyRow]]) -> list[Verdict]:
    """All expectations, each on the part that can tell."""
    return [*judge_sjf(rows["ttft"]), judge_fair(rows["fair"]), *judge_edf(rows["slo"])]


def _table(part: Part, rows: Sequence[PolicyRow]) -> Table:
    table = Table(
        title=f"Simulated: {part.title}", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("load", "policy"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        *(f"{kind} TTFT {q} s" for kind in ("short", "long") for q in ("p50", "p95", "p99")),
        "SLO met %",
        "heavy : light %",
    ):
        table.add_column(heading, justify="right")
    table.add_column("refused, of all counted", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row.load):
            table.add_section()
        previous = row.load
        table.add_row(*_cells(row))
    return table


def _cells(row: PolicyRow) -> list[str]:
    times = [
        value for ttft in (row.short_ttft, row.long_ttft) for value in (ttft.p50_s, ttft.p95_s, ttft.p99_s)
    ]
    served = shares(row.served_while_all_wait)
    return [
        f"{row.load:g}",
        row.policy,
        *("–" if value is None else f"{value:.2f}" for value in times),
        "–" if row.slo_attainment is None else f"{100 * row.slo_attainment:.1f}",
        "–" if served is None else f"{100 * served['heavy']:.0f} : {100 * served['light']:.0f}",
        ", ".join(f"{reason} {count}" for reason, count in sorted(row.refusals.items()))
        + (f" of {row.requests}" if row.refusals else "none"),
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seed", default=1, show_default=True, help="Of the trace, and of ties in placement.")
@click.option(
    "--requests",
    "num_requests",
    type=click.IntRange(min=100),
    default=3000,
    show_default=True,
    help="In each trace; the first tenth is not counted.",
)
@click.option(
    "--runs-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=run_directory.RUNS_DIR,
    show_default=True,
)
def main(seed: int, num_requests: int, runs_dir: Path) -> None:
    """Compare the order policies on one simulated trace of short and long requests, by load."""
    rows: dict[str, list[PolicyRow]] = {}
    with progress() as say:
        for part in PARTS:
            rows[part.name] = []
            for load in part.loads:
                say(f"part {part.name}, load {load:g}: {', '.join(POLICIES)}")
                rows[part.name] += [run_policy(part, policy, load, num_requests, seed) for policy in POLICIES]
    verdicts = judge(rows)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for part in PARTS:
        console.print(_table(part, rows[part.name]))
    console.print(
        "TTFT is of requests that got a first token. SLO: first token within 1 s (short) or 10 s (long)."
    )
    console.print(
        "heavy : light is of prompt and output tokens served while both tenants had requests waiting."
    )
    for verdict in verdicts:
        console.print(Text(str(verdict)))
    path = run_directory.write_figures(
        VERB,
        {
            "seed": seed,
            "settings": _settings(num_requests),
            "parts": {name: [asdict(row) for row in part_rows] for name, part_rows in rows.items()},
            "verdicts": [asdict(verdict) for verdict in verdicts],
        },
        runs_dir,
    )
    console.print(Text(f"figures: {path}"))


def _settings(num_requests: int) -> dict[str, object]:
    return {
        "engine": "simulated",
        "num_requests": num_requests,
        "warm_up_share": WARM_UP_SHARE,
        "num_replicas": NUM_REPLICAS,
        "max_num_seqs": MODEL.max_num_seqs,
        "profile": MODEL.profile.model_dump(),
        "prefill_ms_per_prompt_token": MODEL.prefill_ms_per_prompt_token,
        "prediction": f"class mean times log-normal noise, sigma {PREDICTION_SIGMA}",
        "policies": POLICIES,
        "scheduler": SchedulerConfig().model_dump(exclude={"order", "seed"}),
        "classes": [asdict(kind) for kind in request_classes()],
        "parts": [asdict(part) for part in PARTS],
    }


if __name__ == "__main__":
    main()
