"""What sends an open loop: a schedule that is kept, and connections that are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import gevent
from gevent.event import Event
from gevent.pool import Group

from loadtest.client.record import ClientReason
from loadtest.client.sse_client import StreamingClient
from loadtest.offer.load import Arrival

HEAD_START_S = 0.002  # for a request to be on its connection, before the next is made

_T = TypeVar("_T")


class Connections:
    """One for each request in flight, as many as are needed; those that are free stay open for the next."""

    def __init__(self, connect: Callable[[], StreamingClient]) -> None:
        self._connect = connect
        self._all: set[StreamingClient] = set()
        self._free: list[StreamingClient] = []

    def take(self) -> StreamingClient:
        """The one that was free for the shortest time, or a new one."""
        if self._free:
            return self._free.pop()
        client = self._connect()
        self._all.add(client)
        return client

    def give_back(self, client: StreamingClient) -> None:
        self._free.append(client)

    def cancel(self, reason: ClientReason) -> None:
        """End every request in flight; none of these connections is of use after that."""
        for client in list(self._all):
            client.cancel(reason)

    def withdraw(self, reason: ClientReason) -> None:
        """End every request whose answer has not begun."""
        for client in self._all.difference(self._free):
            client.withdraw(reason)

    def close(self) -> None:
        """Close those that are free."""
        for client in self._free:
            client.close()
        self._all.difference_update(self._free)
        self._free.clear()


def keep_schedule(
    arrivals: Iterable[tuple[int, Arrival]],
    started_at_s: float,
    clock: Callable[[], float],
    stopped: Event,
    make: Callable[[int, Arrival], _T],
    serve: Callable[[_T, float], None],
) -> None:
    """Call `serve(made, due_at_s)` for each arrival in a greenlet of its own, and wait until all ended.

    The schedule is absolute: a greenlet that starts late moves none after it.

    Args:
        arrivals: each with its number.
        started_at_s: when the schedule's 0 was or is, by `clock`.
        stopped: no more greenlets are started once it is set.
        make: what to serve, made while its instant is waited for: the time that takes is in no latency.
    """
    requests = Group()
    for number, arrival in arrivals:
        due_at_s = started_at_s + arrival.at_s
        # The one before goes out first, and whoever else has to run does: greenlets do when this one waits.
        if (left_s := due_at_s - clock()) > 0:
            stopped.wait(min(left_s, HEAD_START_S))
        else:
            gevent.sleep(0)
        if stopped.is_set():
            break
        made = make(number, arrival)
        while (left_s := due_at_s - clock()) > 0 and not stopped.is_set():
            stopped.wait(left_s)
        if stopped.is_set():
            break
        requests.spawn(serve, made, due_at_s)
    requests.join(raise_error=True)
