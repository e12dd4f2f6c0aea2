"""Load test: what does the client offer and see, and does the server agree?"""

from __future__ import annotations

from dashboards.spec import Dashboard, Panel, Query, Row

LOAD = '{lane=~"$lane",workload=~"$workload"}'
LANE = '{lane=~"$lane"}'


def _latency(title: str, figure: str, description: str) -> Panel:
    return Panel(
        title,
        description,
        "s",
        (
            Query(f"lane:tandem_load_{figure}_seconds:p50{LOAD}", "{{lane}} {{workload}} client p50"),
            Query(f"lane:tandem_load_{figure}_seconds:p95{LOAD}", "{{lane}} {{workload}} client p95"),
            Query(f"lane:tandem_{figure}_seconds:p50{LANE}", "{{lane}} server p50"),
            Query(f"lane:tandem_{figure}_seconds:p95{LANE}", "{{lane}} server p95"),
        ),
    )


LOAD_TEST = Dashboard(
    "load-test",
    "Load test",
    "What does the client offer and see, and does the server agree?",
    (
        Row(
            "Offered",
            (
                Panel(
                    "Offered and achieved",
                    "Requests/s that were due and that were begun; apart, the client itself is too slow.",
                    "reqps",
                    (
                        Query(
                            f"sum by (lane, workload) (rate(tandem_load_due_requests_total{LOAD}[1m]))",
                            "{{lane}} {{workload}} offered",
                        ),
                        Query(
                            f"sum by (lane, workload) (rate(tandem_load_sent_requests_total{LOAD}[1m]))",
                            "{{lane}} {{workload}} achieved",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Users",
                    "Users of a closed loop, or requests in flight of an open one; rising without end is overload.",
                    "short",
                    (Query(f"sum by (lane, workload) (tandem_load_users{LOAD})", "{{lane}} {{workload}}"),),
                    width=8,
                ),
                Panel(
                    "Run",
                    "1 while a load run is on; its start and end are marked in every panel.",
                    "short",
                    (Query("max(tandem_load_run_active)", "run"),),
                    width=8,
                ),
            ),
        ),
        Row(
            "Latency, client and server",
            (
                _latency(
                    "Time to first token",
                    "ttft",
                    "From the instant a request was due, and from its arrival at the gateway; apart, it left late.",
                ),
                _latency(
                    "Time per output token",
                    "tpot",
                    "By the client's and by the gateway's own stamps; the two should lie on each other.",
                ),
            ),
        ),
        Row(
            "Requests, client and server",
            (
                Panel(
                    "Completed requests",
                    "Completed per second, as client and gateways counted them.",
                    "reqps",
                    (
                        Query(
                            'sum by (lane) (rate(tandem_load_requests_total{lane=~"$lane",'
                            'workload=~"$workload",outcome="completed"}[1m]))',
                            "{{lane}} client",
                        ),
                        Query(
                            'sum by (lane) (rate(tandem_requests_total{lane=~"$lane",outcome="completed"}[1m]))',
                            "{{lane}} server",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Output tokens",
                    "Output tokens/s of completed requests, as client and gateways counted them.",
                    "suffix: tokens/s",
                    (
                        Query(
                            f"sum by (lane) (rate(tandem_load_output_tokens_total{LOAD}[1m]))",
                            "{{lane}} client",
                        ),
                        Query(
                            f"sum by (lane) (rate(tandem_output_tokens_total{LANE}[1m]))", "{{lane}} server"
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Not completed",
                    "Requests per second that did not complete, as the client saw them.",
                    "reqps",
                    (
                        Query(
                            "sum by (lane, outcome) (rate(tandem_load_requests_total{"
                            'lane=~"$lane",workload=~"$workload",outcome!="completed"}[1m]))',
                            "{{lane}} {{outcome}}",
                            "every request completed",
                        ),
                    ),
                    kind="stack",
                    width=8,
                ),
            ),
        ),
    ),
)
