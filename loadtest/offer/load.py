"""What load is offered: users in a closed loop, arrivals at a rate, or a recorded trace.

`loadtest.offer.arrivals` turns the last two into instants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Process = Literal["constant", "poisson", "gamma"]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Users that each send, read the answer to its end, think, and send again.

    Attributes:
        users: how many, >= 1.
        think_time_s: pause of a user between an answer and its next request.
    """

    users: int
    think_time_s: float = 0.0
    kind: Literal["closed"] = "closed"

    def __post_init__(self) -> None:
        if self.users < 1:
            raise ValueError(f"users={self.users} must be at least 1")
        _check("think_time_s", self.think_time_s, lowest=0)

    @property
    def label(self) -> str:
        """What names the load in a table, a chart and a stage's key."""
        think = f", {self.think_time_s:g} s think time" if self.think_time_s else ""
        return f"{self.users} user{'s' if self.users > 1 else ''}{think}"


@dataclass(frozen=True, slots=True)
class RateSegment:
    """A stretch of time over which the rate goes in a straight line from one value to another.

    Attributes:
        from_per_s, to_per_s: requests/s at its start and end; equal for a constant rate.
    """

    duration_s: float
    from_per_s: float
    to_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.duration_s) and self.duration_s > 0):
            raise ValueError(f"duration_s={self.duration_s} must be above 0")
        _check("from_per_s", self.from_per_s, lowest=0)
        _check("to_per_s", self.to_per_s, lowest=0)

    @property
    def requests(self) -> float:
        """Requests expected over the segment."""
        return self.duration_s * (self.from_per_s + self.to_per_s) / 2


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that arrive whether or not earlier ones have been answered.

    Attributes:
        segments: the rate over time: one for a constant rate, several for steps, ramps and spikes.
        process: gaps between arrivals: equal, exponential, or gamma-distributed.
        burstiness: shape of the gamma: 1 is Poisson, below 1 comes in bursts, above 1 is more even.
        name: how the load is called; made from the rate when empty.
    """

    segments: tuple[RateSegment, ...]
    process: Process = "poisson"
    burstiness: float = 1.0
    name: str = ""
    kind: Literal["open"] = "open"

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError("an open loop needs at least one segment")
        if not (math.isfinite(self.burstiness) and self.burstiness > 0):
            raise ValueError(f"burstiness={self.burstiness} must be above 0")
        if self.requests <= 0:
            raise ValueError("an open loop whose rate is 0 throughout offers nothing")

    @property
    def duration_s(self) -> float:
        return sum(segment.duration_s for segment in self.segments)

    @property
    def requests(self) -> float:
        """Requests expected over the whole load."""
        return sum(segment.requests for segment in self.segments)

    @property
    def rate_per_s(self) -> float:
        """Mean requests/s."""
        return self.requests / self.duration_s

    @property
    def label(self) -> str:
        return self.name or f"{self.process} {self.rate_per_s:.3g} req/s"


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """Arrivals and lengths of a recorded trace.

    Attributes:
        path: CSV or JSONL, in a layout that `loadtest.offer.recorded_trace` knows.
        speed: 2 replays it twice as fast.
        max_duration_s: of the replay, after `speed`; None for the whole trace.
        from_s: where in the trace it begins, in seconds after its first request.
        unit: of the trace's time, where its layout leaves that open.
    """

    path: str
    speed: float = 1.0
    max_duration_s: float | None = None
    from_s: float = 0.0
    unit: Literal["", "us", "ms", "s"] = ""
    kind: Literal["trace"] = "trace"

    def __post_init__(self) -> None:
        for name, value in (("speed", self.speed), ("max_duration_s", self.max_duration_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be above 0")
        _check("from_s", self.from_s, lowest=0)

    @property
    def label(self) -> str:
        begin = f" from {self.from_s:g} s" if self.from_s else ""
        speed = f" x{self.speed:g}" if self.speed != 1 else ""
        # Less of a trace is other requests, not the same for a shorter time.
        length = "" if self.max_duration_s is None else f", {self.max_duration_s:g} s"
        return f"trace {self.path.rsplit('/', 1)[-1]}{begin}{speed}{length}"


Load = ClosedLoop | OpenLoop | TraceReplay


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an open loop.

    Attributes:
        at_s: when it is due, in seconds since the start of the stage.
        prompt_tokens, output_tokens: lengths from a trace; None where the workload decides.
    """

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def constant_rate(rate_per_s: float, duration_s: float, process: Process = "poisson") -> OpenLoop:
    """An open loop at one rate."""
    return OpenLoop((RateSegment(duration_s, rate_per_s, rate_per_s),), process)


def _check(name: str, value: float, lowest: float) -> None:
    if not (math.isfinite(value) and value >= lowest):
        raise ValueError(f"{name}={value} must be a number of at least {lowest:g}")
