"""What the scheduler expects, learnt from requests that ended. Plain means that forget; no clock of their own."""

from __future__ import annotations

from collections import deque

FORGET = 0.1  # weight of the newest value in an exponential mean
MAX_TENANTS = 10_000


class ExponentialMean:
    """A mean that forgets; None until the first value."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + FORGET * (value - self.value)


class LaneEstimator:
    """How long requests hold a slot of a lane, and how soon they give their first token."""

    def __init__(self) -> None:
        self._held_s = ExponentialMean()
        self._first_token_s = ExponentialMean()

    def ended(self, held_s: float, first_token_s: float | None) -> None:
        """A request ended: seconds from grant to release, and from grant to first token if there was one."""
        self._held_s.add(held_s)
        if first_token_s is not None:
            self._first_token_s.add(first_token_s)

    @property
    def first_token_s(self) -> float | None:
        """Expected seconds from grant to first token; None when unknown."""
        return self._first_token_s.value

    def wait_s(self, num_ahead: int, num_slots: int) -> float | None:
        """Expected seconds until a request with so many ahead gets a slot; None when unknown.

        Slots free up one by one, one each held_s / num_slots (Little's law), however long the lab idled before.
        """
        if self._held_s.value is None or num_slots < 1:
            return None
        return (num_ahead + 1) * self._held_s.value / num_slots


class OutputPredictor:
    """Predicted output tokens: the tenant's mean so far, never above what the request allows."""

    def __init__(self) -> None:
        self._means: dict[str, ExponentialMean] = {}

    def predict(self, tenant: str, max_output_tokens: int) -> int:
        """In 1..max_output_tokens; the maximum while nothing is known."""
        mean = self._means.get(tenant)
        if mean is None or mean.value is None:
            return max_output_tokens
        return max(1, min(max_output_tokens, round(mean.value)))

    def learn(self, tenant: str, output_tokens: int) -> None:
        """A request completed with so many tokens."""
        if tenant not in self._means and len(self._means) >= MAX_TENANTS:
            del self._means[next(iter(self._means))]  # a client can invent names without end
        self._means.setdefault(tenant, ExponentialMean()).add(output_tokens)


class DrainRate:
    """Requests ended per second over the last few seconds, so that advice follows what the lab really does."""

    def __init__(self, window_s: float = 30.0, max_ends: int = 1024) -> None:
        self._window_s = window_s
        self._ended_at_s: deque[float] = deque(maxlen=max_ends)

    def record(self, now_s: float) -> None:
        """One request ended."""
        self._ended_at_s.append(now_s)

    def rps(self, now_s: float) -> float | None:
        """Mean rate within the window; None before two have ended in it."""
        while self._ended_at_s and self._ended_at_s[0] < now_s - self._window_s:
            self._ended_at_s.popleft()
        if len(self._ended_at_s) < 2 or now_s <= self._ended_at_s[0]:
            return None
        return len(self._ended_at_s) / (now_s - self._ended_at_s[0])
