"""Load test: what does the client offer and see, and does the server agree?"""

from __future__ import annotations

from dashboards.spec import LANE, Dashboard, Panel, Query, Row, per_second
from serving.metrics import names
from serving.metrics.names import Metric

LOAD = '{lane=~"$lane",workload=~"$workload"}'


def _latency(title: str, client: Metric, server: Metric, description: str) -> Panel:
    return Panel(
        title,
        description,
        "s",
        (
            Query(f"lane:{client.name}:p50{LOAD}", "{{lane}} {{workload}} client p50"),
            Query(f"lane:{client.name}:p95{LOAD}", "{{lane}} {{workload}} client p95"),
            Query(f"lane:{server.name}:p50{LANE}", "{{lane}} server p50"),
            Query(f"lane:{server.name}:p95{LANE}", "{{lane}} server p95"),
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
                            per_second(names.LOAD_DUE.name, LOAD, "lane, workload"),
                            "{{lane}} {{workload}} offered",
                        ),
                        Query(
                            per_second(names.LOAD_SENT.name, LOAD, "lane, workload"),
                            "{{lane}} {{workload}} achieved",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Users",
                    "Users of a closed loop, or requests in flight of an open one; rising without end is overload.",
                    "short",
                    (
                        Query(
                            f"sum by (lane, workload) ({names.LOAD_USERS.name}{LOAD})",
                            "{{lane}} {{workload}}",
                        ),
                    ),
                    width=8,
                ),
                Panel(
                    "Run",
                    "1 while a load run is on; its start and end are marked in every panel.",
                    "short",
                    (Query(f"max({names.LOAD_RUN_ACTIVE.name})", "run"),),
                    width=8,
                ),
            ),
        ),
        Row(
            "Latency, client and server",
            (
                _latency(
                    "Time to first token",
                    names.LOAD_TTFT,
                    names.TTFT,
                    "From the instant a request was due, and from its arrival at the gateway; apart, it left late.",
                ),
                _latency(
                    "Time per output token",
                    names.LOAD_TPOT,
                    names.TPOT,
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
                            per_second(
                                names.LOAD_REQUESTS.name,
                                '{lane=~"$lane",workload=~"$workload",outcome="completed"}',
                                "lane",
                            ),
                            "{{lane}} client",
                        ),
                        Query(
                            per_second(names.REQUESTS.name, '{lane=~"$lane",outcome="completed"}', "lane"),
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
                            per_second(names.LOAD_OUTPUT_TOKENS.name, LOAD, "lane"),
                            "{{lane}} client",
                        ),
                        Query(per_second(names.OUTPUT_TOKENS.name, LANE, "lane"), "{{lane}} server"),
                    ),
                    width=8,
                ),
                Panel(
                    "Not completed",
                    "Requests per second that did not complete, as the client saw them.",
                    "reqps",
                    (
                        Query(
                            per_second(
                                names.LOAD_REQUESTS.name,
                                '{lane=~"$lane",workload=~"$workload",outcome!="completed"}',
                                "lane, outcome",
                            ),
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
