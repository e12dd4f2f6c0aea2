"""Whether a stage's figures may be used: rules on the client, none on the server.

A server that is too slow is a result. A client that could not offer the load, or did not see it right, is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.analysis.summary import Agreement, ClientSummary
from loadtest.judge.wording import exact_or_rounded

MIN_ACHIEVED = 0.98  # of offered

# A request that is begun late was not offered when the schedule says. Latencies count from the schedule,
# so lag stands in each TTFT: it may be a small part of it, or what a person does not notice.
MAX_DISPATCH_LAG_S = 0.050
MAX_DISPATCH_LAG_OF_TTFT = 0.05

# Above, a process waits for its core again and again, and stamps late.
MAX_CPU_SHARE = 0.9

# Where this process stamps arrivals, read lag stands in each of them; where the kernel does, none of it does,
# and only a client that falls ever further behind is at fault.
MAX_READ_LAG_S = 0.020
MAX_READ_LAG_KERNEL_S = 0.5

MAX_OF_CEILING = 0.8

# A lab that is gone answers nobody: that says nothing of what it can do.
MAX_UNREACHED = 0.1

# The share of arrivals that must carry the kernel's stamp for the larger limit.
ALL_KERNEL = 0.999


def invalid_reasons(
    client: ClientSummary,
    *,
    offered_per_s: float | None,
    achieved_per_s: float,
    ttft_p50_s: float | None,
    agreements: Sequence[Agreement] = (),
    unreached: float = 0.0,
) -> tuple[str, ...]:
    """Why a stage's figures may not be used, each with value and bound; empty when they may.

    Args:
        unreached: share of requests that got no connection.
        offered_per_s: None in a closed loop, whose users wait for the server by design.
    """
    reasons = []
    if unreached > MAX_UNREACHED:
        reasons.append(
            f"the lab could not be reached: {unreached:.0%} of requests got no connection, "
            f"the limit {MAX_UNREACHED:.0%}"
        )
    if offered_per_s is not None and achieved_per_s < MIN_ACHIEVED * offered_per_s:
        reasons.append(
            f"the client was too slow: it began {achieved_per_s:.3g} requests/s of {offered_per_s:.3g} offered, "
            f"{achieved_per_s / offered_per_s:.1%}, below {MIN_ACHIEVED:.0%}"
        )
    limit_s = max(MAX_DISPATCH_LAG_S, MAX_DISPATCH_LAG_OF_TTFT * (ttft_p50_s or 0))
    if client.dispatch_lag_p99_s is not None and client.dispatch_lag_p99_s > limit_s:
        reasons.append(
            f"the client was late: dispatch lag p99 is {_ms(client.dispatch_lag_p99_s)}, the limit {_ms(limit_s)}"
        )
    if client.cpu_share is not None and client.cpu_share > MAX_CPU_SHARE:
        reasons.append(
            f"the client was short of processor: {client.cpu_share:.0%} of a core per process, "
            f"the limit {MAX_CPU_SHARE:.0%}"
        )
    limit_s = MAX_READ_LAG_KERNEL_S if client.kernel_stamped >= ALL_KERNEL else MAX_READ_LAG_S
    if client.read_lag_p99_s is not None and client.read_lag_p99_s > limit_s:
        reasons.append(
            f"the client read late: read lag p99 is {_ms(client.read_lag_p99_s)}, the limit {_ms(limit_s)}"
        )
    if client.of_ceiling is not None and client.of_ceiling > MAX_OF_CEILING:
        reasons.append(
            f"the client was near its ceiling: {client.of_ceiling:.0%} of the tokens/s it can read, "
            f"the limit {MAX_OF_CEILING:.0%}"
        )
    reasons += [
        f"client and server disagree on {each.quantity}: {exact_or_rounded(each.client)} and "
        f"{exact_or_rounded(each.server)}, tolerance {each.tolerance:.3g}"
        for each in agreements
        if not each.agrees
    ]
    return tuple(reasons)


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1000:.0f} ms"
