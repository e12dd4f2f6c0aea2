"""Locust as a library: users that each do their part of a stage, and Locust's own count of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.client.record import RequestRecord
from loadtest.run.locust_stats import report_to_locust


class Crowd:
    """The users of one stage. `crowd` makes one."""

    def __init__(self) -> None:
        # A fault of ours in a user must end the user, not send its share a second time.
        self._environment = Environment(user_classes=[_user(self._do_part)], catch_exceptions=False)
        self._runner = self._environment.create_local_runner()
        self._part: Callable[[], None] = _nothing

    def start(self, num_users: int, part: Callable[[], None]) -> None:
        """Start them all at once; each does its part and leaves."""
        self._part = part
        self._runner.start(num_users, spawn_rate=num_users)

    def stop(self) -> None:
        """End those that have not left."""
        self._runner.stop()

    def quit(self) -> None:
        """End Locust's own greenlets."""
        self._runner.quit()

    def count(self, record: RequestRecord) -> None:
        """A request of the stage ended."""
        report_to_locust(self._environment, record.label.stage, record)

    def counted(self, stage: str) -> tuple[int, int]:
        """Requests and failures of a stage, by Locust's count."""
        entry = self._environment.stats.get("E2E", stage)
        return entry.num_requests, entry.num_failures

    def _do_part(self) -> None:
        self._part()


@contextmanager
def crowd() -> Iterator[Crowd]:
    """A crowd for one stage; it is gone when the block is left."""
    made = Crowd()
    try:
        yield made
    finally:
        made.quit()


def _nothing() -> None:
    pass


def _user(do_part: Callable[[], None]) -> type[User]:
    class StageUser(User):  # type: ignore[misc]
        wait_time = constant(0)

        @task  # type: ignore[untyped-decorator]
        def do_part_and_leave(self) -> None:
            do_part()
            raise StopUser

    return StageUser
