"""Locust's traffic for Prometheus: every process that sends counts, and the one without a master exports.

A worker's counts travel in the report that Locust sends to the master every 3 s.
"""

from __future__ import annotations

import logging
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from loadtest.run.exporter import EndedRequest, LaneWorkload, LoadExporter, Progress, metrics_port

logger = logging.getLogger(__name__)

REPORT = "tandem_load"  # key in Locust's report of a worker

Count = Callable[[EndedRequest], None]


def export(environment: Any, read: Callable[[], Progress]) -> Count:
    """Export this process's load, or give it to the master.

    Args:
        read: how far this process's own load is; not asked in a master, which sends nothing.

    Returns:
        what to call with each request that ended.

    Raises:
        ValueError: as `metrics_port`.
    """
    # Locust patches the interpreter when it is imported: only who runs it may.
    from locust.runners import MasterRunner, WorkerRunner

    runner, events = environment.runner, environment.events
    if isinstance(runner, WorkerRunner):
        report = WorkerReport(read)
        events.report_to_master.add_listener(lambda data, **_: data.update({REPORT: report.take()}))
        return report.count
    workers = Workers(lambda: workers_present(runner)) if isinstance(runner, MasterRunner) else None
    metrics_port()  # before prometheus-client stumbles over what it would name less well
    exporter = LoadExporter(read if workers is None else workers.read)
    if workers is not None:

        def hear(client_id: str, data: dict[str, Any], **_: Any) -> None:
            for ended in workers.hear(client_id, data[REPORT]):
                exporter.count(ended)

        events.worker_report.add_listener(hear)
    exporter.serve(logger.warning)
    events.quit.add_listener(lambda **_: exporter.close())
    return exporter.count


def workers_present(master: Any) -> set[str]:
    """Ids of the workers that the master hears of. Locust keeps one that is missing in its list for a minute."""
    clients = master.clients
    return {str(worker.id) for worker in (*clients.ready, *clients.spawning, *clients.running)}


class WorkerReport:
    """What a worker tells: its totals, and each request that ended since it last told."""

    def __init__(self, read: Callable[[], Progress]) -> None:
        self._read = read
        self._ended: list[EndedRequest] = []

    def count(self, ended: EndedRequest) -> None:
        self._ended.append(ended)

    def take(self) -> dict[str, Any]:
        """In the types of Locust's messages, which have no keys but texts."""
        progress, ended, self._ended = self._read(), self._ended, []
        return {
            "due": _rows(progress.due),
            "sent": _rows(progress.sent),
            "users": _rows(progress.users),
            "is_run_active": progress.is_run_active,
            "ended": [list(request) for request in ended],
        }


class Workers:
    """What all workers have told, added up.

    Args:
        present: gives the ids of the workers that are there now; of the others only what they have sent counts.
    """

    def __init__(self, present: Callable[[], Collection[str]]) -> None:
        self._present = present
        self._last: dict[str, Progress] = {}

    def hear(self, worker: str, report: dict[str, Any]) -> list[EndedRequest]:
        """The requests in a worker's report; its totals are kept."""
        due, sent, users = (_counts(report[key]) for key in ("due", "sent", "users"))
        self._last[worker] = Progress(due, sent, users, bool(report["is_run_active"]))
        return [EndedRequest(*request) for request in report["ended"]]

    def read(self) -> Progress:
        present = self._present()
        here = [progress for worker, progress in self._last.items() if worker in present]
        ever = self._last.values()
        return Progress(
            due=_sum(progress.due for progress in ever),
            sent=_sum(progress.sent for progress in ever),
            users=_sum(progress.users for progress in here),
            is_run_active=any(progress.is_run_active for progress in here),
        )


def _sum(counts: Iterable[Mapping[LaneWorkload, int]]) -> Counts[LaneWorkload]:
    total: Counts[LaneWorkload] = Counts()
    for each in counts:
        total.update(each)
    return total


def _rows(counts: Mapping[LaneWorkload, int]) -> list[list[Any]]:
    return [[*lane_workload, number] for lane_workload, number in counts.items()]


def _counts(rows: list[list[Any]]) -> dict[LaneWorkload, int]:
    return {(lane, workload): number for lane, workload, number in rows}
