"""Scheduler: who waits, for how long, who is refused, and is the load even?"""

from __future__ import annotations

from dashboards.spec import Dashboard, Panel, Query, Row

LANE = '{lane=~"$lane"}'
REPLICA = '{lane=~"$lane",replica=~"$replica"}'
TENANT = '{tenant=~"$tenant"}'

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
                        Query("sum by (band) (tandem_waiting_by_band_requests)", "{{band}}"),
                        Query("max(tandem_waiting_limit_requests)", "limit"),
                    ),
                ),
                Panel(
                    "Waiting by tenant",
                    "Requests in the queue by tenant; one tenant must not fill it alone.",
                    "short",
                    (
                        Query(
                            f"sum by (tenant) (tandem_waiting_by_tenant_requests{TENANT})",
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
                    (Query("band:tandem_queue_wait_seconds:p95", "{{band}}"),),
                ),
                Panel(
                    "Wait by tenant, p95",
                    "The same wait by tenant; under order fair it evens out by weight.",
                    "s",
                    (
                        Query(
                            "histogram_quantile(0.95, sum by (tenant, le) "
                            f"(rate(tandem_tenant_queue_wait_seconds_bucket{TENANT}[1m])))",
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
                        Query(f"sum(rate(tandem_queue_wait_seconds_count{LANE}[1m]))", "granted"),
                        Query(
                            'sum(rate(tandem_refusals_total{lane=~"$lane|any"}[1m]))',
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
                            'sum by (reason) (rate(tandem_refusals_total{lane=~"$lane|any"}[1m])) > 0',
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
                    (
                        Query(
                            'sum by (lane) (rate(tandem_refusals_total{lane=~"$lane|any"}[1m]))', "{{lane}}"
                        ),
                    ),
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
                    (Query(f"tandem_outstanding_tokens{REPLICA}", "{{replica}}"),),
                ),
                Panel(
                    "Imbalance",
                    "Most over mean outstanding tokens of a lane's replicas; 1 is even.",
                    "suffix: x",
                    (
                        Query(
                            f"max by (lane) (tandem_outstanding_tokens{LANE}) / "
                            f"(avg by (lane) (tandem_outstanding_tokens{LANE}) > 0)",
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
                            f"tandem_running_requests{REPLICA} / tandem_running_limit_requests{REPLICA}",
                            "{{replica}}",
                        ),
                    ),
                ),
                Panel(
                    "Breakers",
                    "0 closed, 1 half open with one probe, 2 open: nothing is sent there.",
                    "short",
                    (Query(f"tandem_breaker_state{REPLICA}", "{{replica}}"),),
                    thresholds=((1, "orange"), (2, "red")),
                    width=6,
                ),
                Panel(
                    "Reroutes",
                    "Requests tried on a second replica because the first broke, by how that ended.",
                    "reqps",
                    (
                        Query(
                            f"sum by (outcome) (rate(tandem_reroutes_total{LANE}[1m]))",
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
                            f"sum by (tenant) (rate(tandem_tenant_output_tokens_total{TENANT}[1m]))",
                            "{{tenant}}",
                        ),
                    ),
                    kind="stack",
                ),
                Panel(
                    "Requests by tenant",
                    "Requests ended by tenant, whatever became of them.",
                    "reqps",
                    (
                        Query(
                            f"sum by (tenant) (rate(tandem_tenant_requests_total{TENANT}[1m]))", "{{tenant}}"
                        ),
                    ),
                    kind="stack",
                ),
            ),
        ),
    ),
)
