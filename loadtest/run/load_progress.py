"""How far a load is at this moment: what its schedule made due, what was begun, who is busy."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Place = tuple[str, str]  # lane and workload


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests that were due and that were begun since the process started, and users now, by lane and workload."""

    due: Mapping[Place, int]
    sent: Mapping[Place, int]
    users: Mapping[Place, int]
    is_run_active: bool


class RunningLoad(Protocol):
    """What is read of a load while it is on."""

    @property
    def place(self) -> Place: ...

    @property
    def num_dispatched(self) -> int:
        """Requests begun."""

    @property
    def num_busy(self) -> int:
        """Users of a closed loop, or requests in flight of an open one."""


class ProgressCounter:
    """Adds up one load after another.

    Args:
        clock: now, in seconds.
    """

    def __init__(self, clock: Callable[[], float], *, is_run_active: bool = False) -> None:
        self.is_run_active = is_run_active
        self._clock = clock
        self._load: RunningLoad | None = None
        self._due_at_s: Sequence[float] = ()
        self._due: Counts[Place] = Counts()
        self._sent: Counts[Place] = Counts()

    def began(self, load: RunningLoad, due_at_s: Sequence[float] = ()) -> None:
        """A load starts now.

        Args:
            due_at_s: an open loop's arrivals by the clock, in order; a user of a closed loop is due when it is
                free, which is when it sends.
        """
        self._load, self._due_at_s = load, due_at_s

    def ended(self) -> None:
        """The load that began last is over."""
        self._due, self._sent = self._totals()
        self._load = None

    def read(self) -> Progress:
        due, sent = self._totals()
        users = {} if self._load is None else {self._load.place: self._load.num_busy}
        return Progress(due, sent, users, self.is_run_active)

    def _totals(self) -> tuple[Counts[Place], Counts[Place]]:
        due, sent = self._due.copy(), self._sent.copy()
        if (load := self._load) is not None:
            is_open = bool(self._due_at_s)
            due[load.place] += bisect_right(self._due_at_s, self._clock()) if is_open else load.num_dispatched
            sent[load.place] += load.num_dispatched
        return due, sent
