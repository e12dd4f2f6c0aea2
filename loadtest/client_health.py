"""Whether the load tool itself kept up: its processor time, its lag, and the most it can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """What the load tool cost and how late it was over one stage.

    Attributes:
        cpu_share: processor time of its processes / (duration x processes); 1 is a whole core each.
        loop_lag_p50_s, loop_lag_p99_s: how much later than asked a timer of its event loop fired.
        processes: load-generating processes.
    """

    cpu_share: float
    loop_lag_p50_s: float
    loop_lag_p99_s: float
    processes: int = 1


@dataclass(frozen=True, slots=True)
class ClientCeiling:
    """The most this client reads from a server that does nothing but send, on this machine, now.

    Attributes:
        streams: how many were open at once.
        tokens_per_s: tokens read when the server sends as fast as it is read.
        requests_per_s: short requests done one after another by all streams.
    """

    streams: int
    tokens_per_s: float
    requests_per_s: float
