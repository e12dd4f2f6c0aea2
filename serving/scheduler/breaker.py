"""A breaker per replica: after failures in a row, no requests for a while; then one, as a probe.

Only what the replica did counts: connections refused, timeouts, 5xx. A client's mistake (4xx) says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class BreakerState(StrEnum):
    """`closed` lets requests through, `open` none, `half_open` one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """State machine without a clock.

    While it is open only the probe's end counts: requests that were sent before say nothing new.

    Args:
        max_failures: failures in a row that open it, >= 1.
        cooldown_s: how long it stays open before a probe.
        replica_id: whose it is.
        not_closed: replicas of a fleet whose breakers are open or half open; kept by the breakers themselves.
    """

    max_failures: int
    cooldown_s: float
    failures: int = 0
    opened_at_s: float | None = None
    probe: str | None = None  # id of the one request that was let through while half open
    replica_id: str = ""
    not_closed: set[str] = field(default_factory=set)

    def state(self, now_s: float) -> BreakerState:
        if self.opened_at_s is None:
            return BreakerState.CLOSED
        if now_s - self.opened_at_s < self.cooldown_s:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def lets_through(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        if self.opened_at_s is None:
            return True
        return self.probe is None and self.state(now_s) is BreakerState.HALF_OPEN

    def sent(self, request_id: str) -> None:
        """A request was sent: while half open, it is the probe."""
        if self.opened_at_s is not None:
            self.probe = request_id

    def succeeded(self, request_id: str) -> None:
        """The replica answered, whatever it answered to a client's mistake."""
        if self._counts(request_id):
            self.failures = 0
            self.opened_at_s = None
            self.probe = None
            self.not_closed.discard(self.replica_id)

    def failed(self, request_id: str, now_s: float, *, is_dead: bool = False) -> None:
        """The replica could not be reached, fell silent, or answered 5xx; one that died opens it at once."""
        if self._counts(request_id):
            self.failures += 1
            self.probe = None
            if is_dead or self.opened_at_s is not None or self.failures >= self.max_failures:
                self.opened_at_s = now_s
                self.not_closed.add(self.replica_id)

    def untold(self, request_id: str) -> None:
        """A request ended without saying anything of the replica: the client left. A probe may be tried again."""
        if request_id == self.probe:
            self.probe = None

    def _counts(self, request_id: str) -> bool:
        return self.opened_at_s is None or request_id == self.probe
