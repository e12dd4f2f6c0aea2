"""A breaker per replica: after failures in a row, no requests for a while; then one, as a probe.

Only what the replica did counts: connections refused, timeouts, 5xx. A client's mistake (4xx) says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """`closed` lets requests through, `open` none, `half_open` one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """State machine without a clock.

    Args:
        max_failures: failures in a row that open it, >= 1.
        cooldown_s: how long it stays open before a probe.
    """

    max_failures: int
    cooldown_s: float
    failures: int = 0
    opened_at_s: float | None = None
    is_probing: bool = False

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
        return not self.is_probing and self.state(now_s) is BreakerState.HALF_OPEN

    def sent(self, now_s: float) -> None:
        """A request was sent: while half open, it is the probe."""
        if self.opened_at_s is not None:
            self.is_probing = True

    def succeeded(self) -> None:
        """The replica answered, whatever it answered to a client's mistake."""
        self.failures = 0
        self.opened_at_s = None
        self.is_probing = False

    def failed(self, now_s: float) -> None:
        """The replica could not be reached, fell silent, or answered 5xx."""
        self.failures += 1
        self.is_probing = False
        if self.opened_at_s is not None or self.failures >= self.max_failures:
            self.opened_at_s = now_s

    def untold(self) -> None:
        """A request ended without saying anything of the replica: the client left. A probe may be tried again."""
        self.is_probing = False
