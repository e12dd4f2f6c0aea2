"""The load tool's own metrics: what was due, sent and seen, stage after stage."""

from __future__ import annotations

import json
import socket
import urllib.request
from dataclasses import dataclass, replace

import pytest

from loadtest.by_hand.exporter import WorkerReport, Workers
from loadtest.run.exporter import (
    PORT_VARIABLE,
    LaneWorkload,
    LoadExporter,
    Progress,
    ProgressCounter,
    ended_request,
)
from serving.core.request import Outcome
from tests.unit.loadtest.runs import record


@dataclass
class Load:
    """A load that stands still."""

    num_dispatched: int = 0
    num_busy: int = 0
    lane_workload: LaneWorkload = ("batched", "copy")


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def value(exporter: LoadExporter, name: str, **labels: str) -> float | None:
    return exporter.registry.get_sample_value(name, labels)


PLACE = {"lane": "batched", "workload": "copy"}


def idle_exporter() -> LoadExporter:
    return LoadExporter(ProgressCounter(Clock()).read)


def test_an_open_loop_is_due_by_its_schedule_whatever_was_sent() -> None:
    clock = Clock()
    progress = ProgressCounter(clock)
    exporter = LoadExporter(progress.read)
    progress.began(Load(num_dispatched=2, num_busy=1), due_at_s=[100.0, 100.2, 100.4, 100.6])
    clock.now_s = 100.55
    assert value(exporter, "tandem_load_due_requests_total", **PLACE) == 3
    assert value(exporter, "tandem_load_sent_requests_total", **PLACE) == 2
    assert value(exporter, "tandem_load_users", **PLACE) == 1


def test_counts_go_on_over_the_stages_of_a_run() -> None:
    progress = ProgressCounter(Clock())
    exporter = LoadExporter(progress.read)
    for num_dispatched in (3, 4):
        progress.began(Load(num_dispatched, num_busy=2))
        assert value(exporter, "tandem_load_users", **PLACE) == 2
        progress.ended()
    assert value(exporter, "tandem_load_sent_requests_total", **PLACE) == 7
    assert value(exporter, "tandem_load_due_requests_total", **PLACE) == 7
    assert value(exporter, "tandem_load_users", **PLACE) is None


def test_a_schedule_that_is_stopped_makes_nothing_more_due() -> None:
    clock = Clock()
    progress = ProgressCounter(clock)
    progress.began(Load(num_dispatched=1), due_at_s=[1.0, 2.0, 3.0])
    clock.now_s = 1.5
    progress.ended()
    clock.now_s = 10.0
    assert progress.read().due == {("batched", "copy"): 1}


def test_what_workers_tell_is_added_up_and_who_left_has_no_users() -> None:
    present = {"a", "b"}
    workers, ended = Workers(lambda: present), []
    for name, busy in (("a", 2), ("b", 3)):
        progress = ProgressCounter(Clock(), is_run_active=True)
        report = WorkerReport(progress.read)
        progress.began(Load(num_dispatched=5, num_busy=busy))
        report.count(ended_request(record("batched"), "batched"))
        ended += workers.hear(name, json.loads(json.dumps(report.take())))
        assert report.take()["ended"] == [], "each request is told once"
    assert ended == [ended_request(record("batched"), "batched")] * 2
    place = ("batched", "copy")
    assert workers.read() == Progress({place: 10}, {place: 10}, {place: 5}, is_run_active=True)
    present.remove("b")
    assert workers.read() == Progress({place: 10}, {place: 10}, {place: 2}, is_run_active=True)
    present.clear()
    assert not workers.read().is_run_active


def test_a_failed_request_is_counted_and_has_no_latency() -> None:
    exporter = idle_exporter()
    exporter.count(ended_request(record("batched"), "batched"))
    failed = replace(record("batched"), outcome=Outcome.FAILED, reason="cut_off")
    exporter.count(ended_request(failed, "batched"))
    labels = {"lane": "batched", "workload": record("batched").label.workload}
    assert value(exporter, "tandem_load_requests_total", **labels, outcome="completed") == 1
    assert value(exporter, "tandem_load_requests_total", **labels, outcome="failed") == 1
    assert value(exporter, "tandem_load_ttft_seconds_count", **labels) == 1
    assert value(exporter, "tandem_load_output_tokens_total", **labels) == record("batched").output_tokens


def test_it_serves_on_the_loopback_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    progress = ProgressCounter(Clock(), is_run_active=True)
    exporter = LoadExporter(progress.read)
    exporter.serve(pytest.fail)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        assert b"tandem_load_run_active 1.0" in page.read()
    exporter.close()
    progress.is_run_active = False
    assert value(exporter, "tandem_load_run_active") == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_taken_port_is_said_and_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setenv(PORT_VARIABLE, str(holder.getsockname()[1]))
        idle_exporter().serve(said.append)
    assert len(said) == 1
    assert str(PORT_VARIABLE) in said[0]


@pytest.mark.parametrize("text", ["x", "-1", "65536", ""])
def test_what_is_no_port_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_VARIABLE, text)
    with pytest.raises(ValueError, match=r"TANDEM_LOAD_METRICS_PORT=.*65535"):
        idle_exporter().serve(pytest.fail)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
