"""What the policy study expects, and whether its figures say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.simulation.results import TtftSummary

SJF_MAX_RATIO = 0.5
FAIR_MAX_RATIO = 1.2
SJF_LOAD = 1.2
SJF_FAST_AGEING = "sjf, ageing 20"
EDF_LOADS = (0.9, 1.0, 1.1)


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Figures of one policy at one load.

    Attributes:
        policy: an order with its default settings, or `SJF_FAST_AGEING`.
        load: offered requests over capacity.
        slo_attainment: share of all arrivals with the first token in time, 0 to 1; refused, expired and late
            requests are misses.
        served_while_all_wait: prompt and output tokens by tenant, of the steps in which all tenants waited.
        refusals: by reason, expiry in the queue included.
    """

    policy: str
    load: float
    requests: int
    short_ttft: TtftSummary
    long_ttft: TtftSummary
    slo_attainment: float | None
    served_while_all_wait: Mapping[str, int]
    refusals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """An expectation, whether it is met, the figures that decide it, and what to think of when it is not."""

    expectation: str
    is_met: bool
    figures: str
    explanation: str

    def __str__(self) -> str:
        said = f"{'met' if self.is_met else 'NOT MET'}: {self.expectation}: {self.figures}"
        return said if self.is_met else f"{said}. {self.explanation}"


def judge_sjf(rows: Sequence[PolicyRow]) -> list[Verdict]:
    """`sjf` halves the short requests' median TTFT in overload; without told deadlines, so all wait alike."""
    fcfs_s = _row(rows, "fcfs", SJF_LOAD).short_ttft.p50_s
    verdicts = []
    for policy in ("sjf", SJF_FAST_AGEING):
        sjf_s = _row(rows, policy, SJF_LOAD).short_ttft.p50_s
        verdicts.append(
            Verdict(
                f"[{policy}] cuts the p50 TTFT of short requests by half or more against fcfs at {SJF_LOAD} of "
                "capacity",
                fcfs_s is not None and sjf_s is not None and sjf_s <= SJF_MAX_RATIO * fcfs_s,
                f"{_seconds(sjf_s)} against {_seconds(fcfs_s)}",
                "Ageing: a long request passes short ones that arrive more than (its predicted tokens - theirs) / "
                "ageing_tokens_per_s after it, so in an overload that lasts longer sjf comes close to fcfs",
            )
        )
    return verdicts


def judge_fair(rows: Sequence[PolicyRow]) -> Verdict:
    """`fair` serves two backlogged tenants alike, whatever they offer."""
    (row,) = [row for row in rows if row.policy == "fair"]
    tokens = sorted(row.served_while_all_wait.values())
    ratio = tokens[-1] / tokens[0] if len(tokens) > 1 and tokens[0] else None
    return Verdict(
        f"fair serves tenants that offer 10:1 within {FAIR_MAX_RATIO}:1 in tokens while both are backlogged",
        ratio is not None and ratio <= FAIR_MAX_RATIO,
        "they were never backlogged at once" if ratio is None else f"{ratio:.2f}:1",
        "Counters charge what the order weighs (an output token as two input tokens); a short backlog, or a mix "
        "that differs between tenants, leaves the plain count uneven",
    )


def judge_edf(rows: Sequence[PolicyRow]) -> list[Verdict]:
    """`edf` meets more deadlines than `fcfs` around capacity, where there is something to gain."""
    verdicts = []
    for load in EDF_LOADS:
        fcfs, edf = (_row(rows, order, load).slo_attainment for order in ("fcfs", "edf"))
        verdicts.append(
            Verdict(
                f"edf raises SLO attainment over fcfs at {load} of capacity",
                fcfs is not None and edf is not None and edf > fcfs,
                f"{_percent(edf)} against {_percent(fcfs)}",
                "Where no queue forms all orders are the same; where one lasts, edf spends its slots on "
                "requests that are nearly late, and refusal at arrival decides more than order",
            )
        )
    return verdicts


def _row(rows: Sequence[PolicyRow], policy: str, load: float) -> PolicyRow:
    (row,) = [row for row in rows if (row.policy, row.load) == (policy, load)]
    return row


def _seconds(value: float | None) -> str:
    return "none served" if value is None else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"
