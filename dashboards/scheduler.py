"""Scheduler: who waits, for how long, who is refused, and is the load even?"""

from __future__ import annotations

from dashboards.spec import LANE, REPLICA, Dashboard, Panel, Query, Row, per_second
from serving.metrics import names

TENANT = '{tenant=~"$tenant"}'
LANE_OR_ANY = '{lane=~"$lane|any"}'

SCHEDULER = Dashboard(
    "scheduler",
    "Scheduler",
    "Who waits, for how long, who is refused, and is the load even?",
    (
        Row(
            "The queue",
            (
                Panel(
                    "Waiting by band",
                    "Requests in the queue by priority band; the line is the most that may wait.",
                    "short",
                    (
                        Query(f"sum by (band) ({names.WAITING_BY_BAND.name})", "{{band}}"),
                        Query(f"max({names.WAITING_LIMIT.name})", "limit"),
                    ),
                ),
                Panel(
                    "Waiting by tenant",
                    "Requests in the queue by tenant; one tenant must not fill it alone.",
                    "short",
                    (
                        Query(
                            f"sum by (tenant) ({names.WAITING_BY_TENANT.name}{TENANT})",
                            "{{tenant}}",
                            "no request has had to wait yet",
                        ),
                    ),
                    kind="stack",
                ),
                Panel(
                    "Wait by band, p95",
                    "Arrival at the scheduler to the grant of a lease; higher bands should wait less.",
                    "s",
                    (Query(f"band:{names.QUEUE_WAIT.name}:p95", "{{band}}"),),
                ),
                Panel(
                    "Wait by tenant, p95",
                    "The same wait by tenant; under order fair it evens out by weight.",
                    "s",
                    (
                        Query(
                            "histogram_quantile(0.95, sum by (tenant, le) "
                            f"(rate({names.TENANT_QUEUE_WAIT.name}_bucket{TENANT}[1m])))",
                            "{{tenant}}",
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Decisions",
            (
                Panel(
                    "Decisions per second",
                    "Leases granted and requests refused; together all that was decided.",
                    "reqps",
                    (
                        Query(per_second(f"{names.QUEUE_WAIT.name}_count", LANE), "granted"),
                        Query(
                            per_second(names.REFUSALS.name, LANE_OR_ANY),
                            "refused",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Refusals by reason",
                    "Requests that the scheduler turned away, and why.",
                    "reqps",
                    (
                        Query(
                            f"{per_second(names.REFUSALS.name, LANE_OR_ANY, 'reason')} > 0",
                            "{{reason}}",
                            "nothing was refused",
                        ),
                    ),
                    kind="stack",
                    width=8,
                ),
                Panel(
                    "Refusals by lane",
                    "Requests turned away by the lane they pinned; any stands for those that pinned none.",
                    "reqps",
                    (Query(per_second(names.REFUSALS.name, LANE_OR_ANY, "lane"), "{{lane}}"),),
                    kind="stack",
                    width=8,
                ),
            ),
        ),
        Row(
            "Replicas",
            (
                Panel(
                    "Outstanding tokens",
                    "Tokens reserved by the leases of each replica; those of a lane should run together.",
                    "suffix: tokens",
                    (Query(f"{names.OUTSTANDING_TOKENS.name}{REPLICA}", "{{replica}}"),),
                ),
                Panel(
                    "Imbalance",
                    "Most over mean outstanding tokens of a lane's replicas; 1 is even.",
                    "suffix: x",
                    (
                        Query(
                            f"max by (lane) ({names.OUTSTANDING_TOKENS.name}{LANE}) / "
                            f"(avg by (lane) ({names.OUTSTANDING_TOKENS.name}{LANE}) > 0)",
                            "{{lane}}",
                            "no token is outstanding at this instant",
                        ),
                    ),
                ),
                Panel(
                    "Slots taken",
                    "Live leases over those that a replica may have; at 100 % requests wait.",
                    "percentunit",
                    (
                        Query(
                            f"{names.RUNNING.name}{REPLICA} / {names.RUNNING_LIMIT.name}{REPLICA}",
                            "{{replica}}",
                        ),
                    ),
                ),
                Panel(
                    "Breakers",
                    "0 closed, 1 half open with one probe, 2 open: nothing is sent there.",
                    "short",
                    (Query(f"{names.BREAKER.name}{REPLICA}", "{{replica}}"),),
                    thresholds=((1, "orange"), (2, "red")),
                    width=6,
                ),
                Panel(
                    "Reroutes",
                    "Requests tried on a second replica because the first broke, by how that ended.",
                    "reqps",
                    (
                        Query(
                            per_second(names.REROUTES.name, LANE, "outcome"),
                            "{{outcome}}",
                        ),
                    ),
                    width=6,
                ),
            ),
        ),
        Row(
            "Tenants",
            (
                Panel(
                    "Tokens per second by tenant",
                    "Output tokens of completed requests; what each tenant was served.",
                    "suffix: tokens/s",
                    (
                        Query(
                            per_second(names.TENANT_OUTPUT_TOKENS.name, TENANT, "tenant"),
                            "{{tenant}}",
                        ),
                    ),
                    kind="stack",
                ),
                Panel(
                    "Requests by tenant",
                    "Requests ended by tenant, whatever became of them.",
                    "reqps",
                    (Query(per_second(names.TENANT_REQUESTS.name, TENANT, "tenant"), "{{tenant}}"),),
                    kind="stack",
                ),
            ),
        ),
    ),
)
