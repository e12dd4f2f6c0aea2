"""One schedule shared out among Locust's workers: who is done with its share, and whose share is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Shares:
    """What the master knows of the shares of one test.

    A worker that is not there holds up nobody: its share is lost, until it is there again.

    Attributes:
        lost: arrivals in the shares of workers that are gone, by worker.

    Args:
        sizes: arrivals of each worker's share.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.total = sum(sizes.values())
        self.lost: dict[str, int] = {}
        self._pending = dict(sizes)

    @property
    def is_over(self) -> bool:
        """Nothing more is to be waited for."""
        return not self._pending

    def done(self, worker: str) -> None:
        """A worker has sent its share and has all answers."""
        self._pending.pop(worker, None)
        self.lost.pop(worker, None)

    def look(self, present: Collection[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Compare with the workers that are there now.

        Returns:
            The shares that were lost since the last look, and those that came back, by worker.
        """
        gone = {worker: size for worker, size in self._pending.items() if worker not in present}
        back = {worker: size for worker, size in self.lost.items() if worker in present}
        for worker in gone:
            self.lost[worker] = self._pending.pop(worker)
        for worker in back:
            self._pending[worker] = self.lost.pop(worker)
        return gone, back
