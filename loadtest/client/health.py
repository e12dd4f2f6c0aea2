"""Whether the load tool itself kept up: its processor time, its lag, and the most it can do."""

from __future__ import annotations

import time
from dataclasses import dataclass

import gevent

from serving.core.latency import percentile

LOOK_EVERY_S = 0.05


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
        tokens_per_s: tokens, each in a receive of its own, that a process with a core to itself could read.
        requests_per_s: short requests done one after another by all streams.
    """

    streams: int
    tokens_per_s: float
    requests_per_s: float


class HealthMonitor:
    """Watches this process from `start` to `stop`, by a timer in its own event loop."""

    def start(self) -> None:
        self._began_at_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._lags_s: list[float] = []
        self._watcher = gevent.spawn(self._watch)

    def stop(self) -> ClientHealth:
        """The figures since `start`. A stage shorter than a tick has a lag of 0."""
        self._watcher.kill()
        lasted_s = time.perf_counter() - self._began_at_s
        return ClientHealth(
            cpu_share=(time.process_time() - self._cpu_s) / lasted_s,
            loop_lag_p50_s=percentile(self._lags_s, 50) or 0.0,
            loop_lag_p99_s=percentile(self._lags_s, 99) or 0.0,
        )

    def _watch(self) -> None:
        while True:
            due_s = time.perf_counter() + LOOK_EVERY_S
            gevent.sleep(LOOK_EVERY_S)
            self._lags_s.append(max(0.0, time.perf_counter() - due_s))
