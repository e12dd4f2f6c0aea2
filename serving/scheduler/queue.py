"""The waiting queue: bounded, first come first served, and anyone may leave at once from anywhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serving.core.request import SchedulingRequest


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued request and when it came; `ticket` orders all of them."""

    request: SchedulingRequest
    arrived_at_s: float
    ticket: int


@dataclass(frozen=True, slots=True)
class Line:
    """Requests that the same replicas can serve wait in one line, so a full lane never blocks another."""

    lane: str | None
    needs_plain_decoding: bool

    @classmethod
    def of(cls, request: SchedulingRequest) -> Line:
        return cls(request.lane, request.needs_plain_decoding)


class WaitingQueue:
    """Lines of waiting requests, each in order of arrival.

    Joining, leaving and taking the head are O(1) in the queue's length.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, OrderedDict[str, Waiting]] = {}
        self._line_of: dict[str, Line] = {}
        self._next_ticket = 0

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._line_of

    def __iter__(self) -> Iterator[Waiting]:
        """All waiting requests, in order of arrival."""
        everyone = [waiting for line in self._lines.values() for waiting in line.values()]
        return iter(sorted(everyone, key=lambda waiting: waiting.ticket))

    def join(self, request: SchedulingRequest, now_s: float) -> None:
        """Queue a request behind all who came before it; ids of waiting requests are unique."""
        line = Line.of(request)
        waiting = Waiting(request, now_s, self._next_ticket)
        self._next_ticket += 1
        self._lines.setdefault(line, OrderedDict())[request.request_id] = waiting
        self._line_of[request.request_id] = line

    def leave(self, request_id: str) -> Waiting | None:
        """Take a request out, wherever it stands; None when it is not here."""
        line = self._line_of.pop(request_id, None)
        if line is None:
            return None
        waiting = self._lines[line].pop(request_id)
        if not self._lines[line]:
            del self._lines[line]
        return waiting

    def head(self, can_serve: Callable[[Line], bool]) -> Waiting | None:
        """The longest-waiting request of any line that can be served now."""
        heads = [next(iter(waiting.values())) for line, waiting in self._lines.items() if can_serve(line)]
        return min(heads, key=lambda waiting: waiting.ticket, default=None)

    def overdue(self, arrived_before_s: float) -> list[Waiting]:
        """Requests that came before the instant; they stay queued."""
        found = []
        for line in self._lines.values():
            for waiting in line.values():
                if waiting.arrived_at_s >= arrived_before_s:
                    break
                found.append(waiting)
        return found

    def count_by_lane(self) -> dict[str | None, int]:
        """Waiting requests by pinned lane; None for those that leave the choice to the scheduler."""
        counts: dict[str | None, int] = {}
        for line, waiting in self._lines.items():
            counts[line.lane] = counts.get(line.lane, 0) + len(waiting)
        return counts
