"""Tension: what does more throughput cost in latency, lane by lane?"""

from __future__ import annotations

from dashboards.spec import LANE, Dashboard, Panel, Query, Row, per_second
from serving.metrics import names
from serving.metrics.names import Metric


def _quantiles(metric: Metric) -> tuple[Query, ...]:
    return tuple(Query(f"lane:{metric.name}:{q}{LANE}", f"{{{{lane}}}} {q}") for q in ("p50", "p95"))


def _limit(figure: str) -> Query:
    return Query(f'max({names.SLO_LIMIT.name}{{figure="{figure}"}})', "limit of the SLO")


TENSION = Dashboard(
    "tension",
    "Tension",
    "What does more throughput cost in latency, lane by lane?",
    (
        Row(
            "Throughput",
            (
                Panel(
                    "Tokens per second",
                    "Tokens that the engines generated; it stops rising where a lane is full.",
                    "suffix: tokens/s",
                    (Query(f"lane:tandem_generated_tokens:rate1m{LANE}", "{{lane}}"),),
                ),
                Panel(
                    "Requests running",
                    "Requests on the replicas; more of them share each step.",
                    "short",
                    (Query(f"sum by (lane) ({names.RUNNING.name}{LANE})", "{{lane}}"),),
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    "Time to first token",
                    "TTFT at the gateway, waiting included; it runs away where requests wait.",
                    "s",
                    (*_quantiles(names.TTFT), _limit("ttft")),
                ),
                Panel(
                    "Time per output token",
                    "TPOT at the gateway; it grows with the batch, which is the price of throughput.",
                    "s",
                    (*_quantiles(names.TPOT), _limit("tpot")),
                ),
            ),
        ),
        Row(
            "Objective",
            (
                Panel(
                    "Goodput",
                    "Streams per second that met every limit of the SLO; more load beyond its peak serves fewer.",
                    "reqps",
                    (Query(f"lane:tandem_goodput:rate1m{LANE}", "{{lane}}"),),
                    width=8,
                ),
                Panel(
                    "Attainment",
                    "Share of judged streams that met the SLO, beside the share that should.",
                    "percentunit",
                    (
                        Query(f"lane:tandem_slo:attainment_1m{LANE}", "{{lane}}"),
                        Query(f"max({names.SLO_OBJECTIVE.name})", "objective"),
                    ),
                    width=8,
                ),
                Panel(
                    "Burn of the error budget",
                    "Misses over those that the objective allows, in the last 5 minutes; above 1 it will not hold.",
                    "suffix: x",
                    (Query(f"lane:tandem_slo:burn_5m{LANE}", "{{lane}}"),),
                    thresholds=((1, "orange"), (14.4, "red")),
                    width=8,
                ),
            ),
        ),
        Row(
            "Now",
            (
                Panel(
                    "Replicas ready",
                    "Replicas that take requests, by lane.",
                    "short",
                    (Query(f"lane:tandem_replicas_ready:count{LANE}", "{{lane}}"),),
                    kind="stat",
                    width=8,
                ),
                Panel(
                    "Waiting",
                    "Requests in the scheduler's queue; those that leave the choice to it count as any.",
                    "short",
                    (
                        Query(f"sum by (lane) ({names.WAITING.name}{LANE})", "{{lane}}"),
                        Query(f'sum by (lane) ({names.WAITING.name}{{lane="any"}})', "{{lane}}"),
                    ),
                    kind="stat",
                    width=8,
                ),
                Panel(
                    "Requests ended, by outcome",
                    "All requests of the gateways; failed ones are the lab's fault, rejected ones rarely.",
                    "reqps",
                    (
                        Query(
                            per_second(names.REQUESTS.name, '{lane=~"$lane|"}', "outcome"),
                            "{{outcome}}",
                        ),
                    ),
                    kind="stack",
                    width=8,
                ),
            ),
        ),
    ),
)
