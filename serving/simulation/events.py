"""Virtual time: a heap of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventLoop:
    """Runs actions in order of their instants; those of one instant in the order they were asked for."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0
        self.now_s = 0.0

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Run `action` at an instant of virtual time.

        Raises:
            ValueError: the instant has passed.
        """
        if at_s < self.now_s:
            raise ValueError(f"at_s={at_s} has passed: it is {self.now_s} s")
        heapq.heappush(self._heap, (at_s, self._num_asked, action))
        self._num_asked += 1

    def run(self) -> None:
        """Run until nothing is left to happen."""
        while self._heap:
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
