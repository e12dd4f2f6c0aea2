"""The load tool's own metrics: what was due, sent and seen, stage after stage."""

from __future__ import annotations

import socket
import urllib.request
from dataclasses import dataclass, field, replace

import pytest

from loadtest.exporter import PORT_VARIABLE, LoadExporter
from loadtest.load import Arrival, ClosedLoop, constant_rate
from loadtest.plan import StagePlan, arrivals_of
from serving.core.request import Outcome

from .runs import record


@dataclass
class Stage:
    """As much of a stage as the exporter reads."""

    plan: StagePlan
    num_dispatched: int = 0
    in_flight: dict[int, float] = field(default_factory=dict)
    arrivals: tuple[Arrival, ...] = ()


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def value(exporter: LoadExporter, name: str, **labels: str) -> float | None:
    return exporter.registry.get_sample_value(name, labels)


PLACE = {"lane": "batched", "workload": "copy"}


def test_an_open_loop_is_due_by_its_schedule_whatever_was_sent() -> None:
    clock = Clock()
    exporter = LoadExporter(clock=clock)
    clock.now_s = 100.0
    load = constant_rate(10, 2, "constant")
    plan = StagePlan("batched", "copy", load, requests=10)
    stage = Stage(plan, arrivals=arrivals_of(plan, seed=1))
    exporter.began(stage)
    clock.now_s = 100.55
    stage.num_dispatched, stage.in_flight = 2, {0: 100.0, 1: 100.1}
    due = value(exporter, "tandem_load_due_requests_total", **PLACE)
    assert due is not None
    assert 5 <= due <= 6
    assert value(exporter, "tandem_load_sent_requests_total", **PLACE) == 2
    assert value(exporter, "tandem_load_users", **PLACE) == 2


def test_counts_go_on_over_the_stages_of_a_run() -> None:
    exporter = LoadExporter(clock=Clock())
    for num_dispatched in (3, 4):
        exporter.began(Stage(StagePlan("batched", "copy", ClosedLoop(2), requests=5), num_dispatched))
        assert value(exporter, "tandem_load_users", **PLACE) == 2
        exporter.ended()
    assert value(exporter, "tandem_load_sent_requests_total", **PLACE) == 7
    assert value(exporter, "tandem_load_due_requests_total", **PLACE) == 7
    assert value(exporter, "tandem_load_users", **PLACE) is None


def test_a_failed_request_is_counted_and_has_no_latency() -> None:
    exporter = LoadExporter(clock=Clock())
    exporter.record(record("batched"))
    exporter.record(replace(record("batched"), outcome=Outcome.FAILED, reason="cut_off"))
    labels = {"lane": "batched", "workload": record("batched").label.workload}
    assert value(exporter, "tandem_load_requests_total", **labels, outcome="completed") == 1
    assert value(exporter, "tandem_load_requests_total", **labels, outcome="failed") == 1
    assert value(exporter, "tandem_load_ttft_seconds_count", **labels) == 1
    assert value(exporter, "tandem_load_output_tokens_total", **labels) == record("batched").output_tokens


def test_it_serves_on_the_loopback_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    port = _free_port()
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    exporter = LoadExporter(clock=Clock())
    exporter.serve(pytest.fail)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        assert b"tandem_load_run_active 1.0" in page.read()
    exporter.close()
    assert value(exporter, "tandem_load_run_active") == 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_taken_port_is_said_and_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        monkeypatch.setenv(PORT_VARIABLE, str(holder.getsockname()[1]))
        LoadExporter(clock=Clock()).serve(said.append)
    assert len(said) == 1
    assert str(PORT_VARIABLE) in said[0]


@pytest.mark.parametrize("text", ["x", "-1", "65536", ""])
def test_what_is_no_port_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_VARIABLE, text)
    with pytest.raises(ValueError, match=r"TANDEM_LOAD_METRICS_PORT=.*65535"):
        LoadExporter(clock=Clock()).serve(pytest.fail)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
