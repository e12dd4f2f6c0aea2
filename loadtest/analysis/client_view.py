"""Whether the load tool offered what was planned, and how well it kept up."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.analysis.summary import ClientSummary
from loadtest.client.health import ClientCeiling, ClientHealth
from loadtest.client.record import RequestRecord
from loadtest.offer.load import ClosedLoop, Load
from serving.core.latency import percentile

SHORTEST_SPAN_S = 2.0


def offered_per_s(load: Load, records: Sequence[RequestRecord], planned: int) -> float | None:
    """Requests/s of the schedule, from its first due instant to its last.

    None in a closed loop, and where all were due within `SHORTEST_SPAN_S`.

    Args:
        planned: how many should have a record; the records themselves when the stage was cut.
    """
    span_s = _span_s([record.scheduled_at_s for record in records])
    # Of a shorter stretch the rate says nothing: a millisecond would be a percent of it.
    if isinstance(load, ClosedLoop) or span_s < SHORTEST_SPAN_S:
        return None
    return (planned - 1) / span_s


def achieved_per_s(load: Load, records: Sequence[RequestRecord]) -> float:
    """Requests/s that the tool began, over the same stretch; in a closed loop, up to the last answer."""
    begun_s = [record.dispatched_at_s for record in records if record.dispatched_at_s is not None]
    if not begun_s:
        return 0.0
    first_due_s = min(record.scheduled_at_s for record in records)
    if isinstance(load, ClosedLoop):
        span_s = max(record.finished_at_s for record in records) - first_due_s
        return len(begun_s) / span_s if span_s else 0.0
    # Being early by rounding is no merit.
    span_s = max(max(begun_s), max(record.scheduled_at_s for record in records)) - first_due_s
    return (len(begun_s) - 1) / span_s if span_s else 0.0


def summarize_client(
    load: Load,
    records: Sequence[RequestRecord],
    health: Sequence[ClientHealth],
    ceiling: ClientCeiling | None,
    tokens_per_s: float | None,
) -> ClientSummary:
    """The tool's own figures over a stage or several repeats of it.

    Args:
        health: one of each repeat that measured it; the worst counts.
        tokens_per_s: output tokens received per second.
    """
    lags_s = [
        record.dispatched_at_s - record.scheduled_at_s
        for record in records
        if record.dispatched_at_s is not None and not isinstance(load, ClosedLoop)
    ]
    answered = [record for record in records if record.chunk_at_s]
    return ClientSummary(
        dispatch_lag_p50_s=percentile(lags_s, 50),
        dispatch_lag_p99_s=percentile(lags_s, 99),
        read_lag_p99_s=percentile([r.read_lag_s for r in answered if r.read_lag_s is not None], 99),
        kernel_stamped=(
            sum(record.stamped_by == "kernel" for record in answered) / len(answered) if answered else 0.0
        ),
        cpu_share=max((each.cpu_share for each in health), default=None),
        loop_lag_p99_s=max((each.loop_lag_p99_s for each in health), default=None),
        of_ceiling=None if ceiling is None or tokens_per_s is None else tokens_per_s / ceiling.tokens_per_s,
    )


def _span_s(instants_s: Sequence[float]) -> float:
    return max(instants_s) - min(instants_s) if instants_s else 0.0
