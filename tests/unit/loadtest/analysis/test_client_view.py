from __future__ import annotations

from dataclasses import replace

import pytest

from loadtest.analysis.client_view import achieved_per_s, offered_per_s, summarize_client
from loadtest.client.health import ClientCeiling, ClientHealth
from loadtest.client.record import RequestRecord
from loadtest.offer.load import ClosedLoop, constant_rate
from tests.unit.loadtest.runs import record

OPEN = constant_rate(10.0, 2.0, "constant")


def due_every(gap_s: float, count: int, late_s: float = 0.0, stretch: float = 1.0) -> list[RequestRecord]:
    """Requests due at even gaps; each is begun `late_s` late, and at gaps `stretch` times as wide."""
    return [
        replace(
            record("batched", number=n, scheduled_at_s=5.0 + n * gap_s),
            dispatched_at_s=5.0 + n * gap_s * stretch + late_s,
        )
        for n in range(count)
    ]


def test_a_schedule_that_was_kept() -> None:
    records = due_every(0.1, 21)
    assert offered_per_s(OPEN, records, 21) == pytest.approx(10.0)
    assert achieved_per_s(OPEN, records) == pytest.approx(10.0)


def test_a_client_that_falls_behind_achieves_less() -> None:
    records = due_every(0.1, 21, stretch=1.25)
    assert offered_per_s(OPEN, records, 21) == pytest.approx(10.0)
    assert achieved_per_s(OPEN, records) == pytest.approx(8.0)


def test_requests_that_were_never_begun_are_missing() -> None:
    records = due_every(0.1, 21)
    dropped = [replace(each, dispatched_at_s=None) if n % 2 else each for n, each in enumerate(records)]
    assert achieved_per_s(OPEN, dropped) == pytest.approx(5.0)
    # So are those without any record.
    assert offered_per_s(OPEN, records[::2], 21) == pytest.approx(10.0)
    assert achieved_per_s(OPEN, records[::2]) == pytest.approx(5.0)


def test_a_closed_loop_offers_no_rate() -> None:
    records = due_every(0.1, 21)  # the last is due at 2.0 s and takes 0.3 s
    assert offered_per_s(ClosedLoop(2), records, 21) is None
    assert achieved_per_s(ClosedLoop(2), records) == pytest.approx(21 / 2.3)


def test_no_request_is_no_rate() -> None:
    assert offered_per_s(OPEN, [], 5) is None
    assert achieved_per_s(OPEN, []) == 0
    assert achieved_per_s(OPEN, due_every(0.1, 1)) == 0


def test_the_clients_own_figures() -> None:
    records = [
        replace(
            each,
            dispatched_at_s=each.scheduled_at_s + (0.001 if number < 50 else 0.1),
            read_lag_s=0.001 if number < 50 else 0.1,
            stamped_by="kernel" if number < 51 else "process",
        )
        for number, each in enumerate(due_every(0.1, 101))
    ]
    health = [ClientHealth(0.3, 0.001, 0.01), ClientHealth(0.6, 0.001, 0.004)]
    found = summarize_client(OPEN, records, health, ClientCeiling(10, 2000.0, 50.0), 500.0)
    assert (found.dispatch_lag_p50_s, found.dispatch_lag_p99_s) == pytest.approx((0.1, 0.1))
    assert found.read_lag_p99_s == pytest.approx(0.1)
    assert found.kernel_stamped == pytest.approx(51 / 101)
    assert (found.cpu_share, found.loop_lag_p99_s, found.of_ceiling) == (0.6, 0.01, 0.25)
    closed = summarize_client(ClosedLoop(1), records, [], None, 500.0)
    assert (closed.dispatch_lag_p99_s, closed.cpu_share, closed.of_ceiling) == (None, None, None)
