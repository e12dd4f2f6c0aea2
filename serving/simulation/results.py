"""What became of the requests of a simulated run, and the figures made of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.core.errors import Reason
from serving.core.latency import RequestTimeline, percentile, ttft_s
from serving.core.request import Outcome
from serving.simulation.traffic import Arrival


@dataclass(slots=True)
class SimulatedRequest:
    """One request: its instants in virtual seconds, `None` until they happen, and its outcome.

    Attributes:
        reason: why it was refused; None for those that were not.
    """

    arrival: Arrival
    granted_at_s: float | None = None
    first_token_at_s: float | None = None
    finished_at_s: float | None = None
    outcome: Outcome | None = None
    reason: Reason | None = None

    def end(self, outcome: Outcome, reason: Reason | None = None) -> None:
        """Give the outcome.

        Raises:
            RuntimeError: it has one already.
        """
        if self.outcome is not None:
            raise RuntimeError(
                f"{self.arrival.request.request_id}: {outcome} after {self.outcome}; a request ends once"
            )
        self.outcome = outcome
        self.reason = reason

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, in seconds; None when there was none."""
        if self.first_token_at_s is None:
            return None
        return ttft_s(RequestTimeline(self.arrival.at_s, chunk_at_s=(self.first_token_at_s,)))

    @property
    def meets_slo(self) -> bool:
        """Completed, with the first token in time. Refused, expired and late requests do not."""
        slo_s = self.arrival.kind.ttft_slo_s
        if self.outcome is not Outcome.COMPLETED or self.ttft_s is None:
            return False
        return slo_s is None or self.ttft_s <= slo_s


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A whole run.

    Attributes:
        requests: in order of arrival.
        served_while_all_wait: prompt and output tokens by tenant, of the steps in which every tenant had
            requests waiting.
    """

    requests: tuple[SimulatedRequest, ...]
    served_while_all_wait: Mapping[str, int]

    def after_warm_up(self, share: float) -> tuple[SimulatedRequest, ...]:
        """The requests but for the first `share` of them, which met an empty lab."""
        return self.requests[int(len(self.requests) * share) :]


@dataclass(frozen=True, slots=True)
class TtftSummary:
    """TTFT of the requests that got a first token, in seconds; None where none did."""

    served: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None


def ttft_summary(requests: Sequence[SimulatedRequest]) -> TtftSummary:
    """TTFT percentiles; refused requests have no TTFT and are not in it."""
    values = [request.ttft_s for request in requests if request.ttft_s is not None]
    return TtftSummary(len(values), *(percentile(values, q) for q in (50, 95, 99)))


def slo_attainment(requests: Sequence[SimulatedRequest]) -> float | None:
    """Share of all arrivals that met their SLO, 0 to 1: refused, expired and late ones count as misses."""
    return sum(request.meets_slo for request in requests) / len(requests) if requests else None


def refusals(requests: Sequence[SimulatedRequest]) -> dict[str, int]:
    """Refused and expired requests by reason."""
    return dict(Counter(str(request.reason) for request in requests if request.reason is not None))


def shares(tokens: Mapping[str, int]) -> dict[str, float] | None:
    """Each tenant's part of the tokens, 0 to 1; None when there were none."""
    total = sum(tokens.values())
    return {tenant: count / total for tenant, count in sorted(tokens.items())} if total else None
