from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadtest.analysis.summary import Agreement, ClientSummary
from loadtest.analysis.validity import invalid_reasons

GOOD = ClientSummary(
    dispatch_lag_p50_s=0.001,
    dispatch_lag_p99_s=0.050,
    read_lag_p99_s=0.020,
    kernel_stamped=0.0,
    cpu_share=0.90,
    loop_lag_p99_s=0.05,
    of_ceiling=0.80,
)


def reasons(
    offered_per_s: float | None = 10.0,
    achieved_per_s: float = 9.8,
    ttft_p50_s: float | None = 0.2,
    unreached: float = 0.10,
    agreements: tuple[Agreement, ...] = (),
    **client: Any,
) -> tuple[str, ...]:
    return invalid_reasons(
        replace(GOOD, **client),
        offered_per_s=offered_per_s,
        achieved_per_s=achieved_per_s,
        ttft_p50_s=ttft_p50_s,
        agreements=agreements,
        unreached=unreached,
    )


def test_a_client_at_each_of_its_limits_is_good() -> None:
    assert reasons() == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unreached": 0.11}, "11% of requests got no connection, the limit 10%"),
        ({"achieved_per_s": 9.79}, "it began 9.79 requests/s of 10 offered, 97.9%, below 98%"),
        ({"dispatch_lag_p99_s": 0.0511}, "dispatch lag p99 is 51 ms, the limit 50 ms"),
        ({"cpu_share": 0.91}, "91% of a core per process, the limit 90%"),
        ({"read_lag_p99_s": 0.0211}, "read lag p99 is 21 ms, the limit 20 ms"),
        ({"read_lag_p99_s": 0.6, "kernel_stamped": 1.0}, "read lag p99 is 600 ms, the limit 500 ms"),
        ({"read_lag_p99_s": 0.1, "kernel_stamped": 0.9}, "the limit 20 ms"),
        ({"of_ceiling": 0.81}, "81% of the tokens/s it can read, the limit 80%"),
        (
            {"agreements": (Agreement("output tokens", 100, 101, 0, agrees=False),)},
            "client and server disagree on output tokens: 100 and 101, tolerance 0",
        ),
    ],
)
def test_each_fault_of_the_client_is_named(change: dict[str, Any], reason: str) -> None:
    found = reasons(**change)
    assert len(found) == 1
    assert reason in found[0]


def test_a_slow_server_is_no_fault_of_the_client() -> None:
    # Saturated: TTFT of a minute. The lag allowed grows with it, and nothing else looks at the server.
    assert reasons(ttft_p50_s=60.0, dispatch_lag_p99_s=2.9) == ()
    assert "lag p99 is 3100 ms, the limit 3000 ms" in reasons(ttft_p50_s=60.0, dispatch_lag_p99_s=3.1)[0]
    assert reasons(ttft_p50_s=None) == ()


def test_a_closed_loop_offers_no_rate_to_miss() -> None:
    assert reasons(offered_per_s=None, achieved_per_s=0.1) == ()


def test_what_was_not_measured_is_no_fault() -> None:
    unknown: dict[str, Any] = {"read_lag_p99_s": None, "cpu_share": None, "of_ceiling": None}
    assert reasons(dispatch_lag_p99_s=None, **unknown) == ()


def test_kernel_stamps_make_a_late_read_harmless() -> None:
    assert reasons(read_lag_p99_s=0.5, kernel_stamped=0.999) == ()


def test_an_agreement_that_holds_is_no_reason() -> None:
    assert reasons(agreements=(Agreement("requests", 5, 5, 0, agrees=True),)) == ()
