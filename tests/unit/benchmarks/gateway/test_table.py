"""The tables show every gateway, those that could not be measured with the reason, and mark what went wrong."""

from __future__ import annotations

from dataclasses import replace

from serving.benchmarks.gateway import table
from serving.benchmarks.gateway.figures import FirstTokens, Idle, Measured
from serving.benchmarks.gateway.names import DIRECT, OURS, PEERS, ROUTER
from serving.benchmarks.gateway.peers import NotStarted, Peer, lab_config
from serving.benchmarks.processes import Seen
from serving.config import from_data
from serving.engines.make import make_engine
from serving.engines.simulated.prepared import PreparedEngine
from tests.unit.benchmarks.gateway.test_judge import sample

WITH_US = [
    Peer(DIRECT, "2 engines", ("a", "b")),
    Peer(OURS, "0.1", ("c",), 1),
    Peer(ROUTER, "0.1.17", ("d",), 2),
]


def row(text: str, *starts: str) -> list[str]:
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    (one,) = [cells for cells in found if cells[: len(starts)] == list(starts)]
    return one


def test_a_row_has_the_median_its_range_and_the_ratio_of_the_same_repeat() -> None:
    samples = [
        sample(peer, 64, repeat, tokens=8 * per_s)
        for peer, rates in ((OURS, (1500, 1000, 1200)), (ROUTER, (1000, 2000, 1000)))
        for repeat, per_s in enumerate(rates, start=1)
    ]
    text = table.levels_table(Measured(samples, [], []), WITH_US[1:], [64])
    cells = row(text, OURS, "64")
    assert cells[2:4] == ["1,200 (1,000..1,500)", "1.20 (0.50..1.50)"]
    assert cells[6:8] == ["0.083 (0.067..0.100)", "12,000 (10,000..15,000)"]


def test_a_gateway_that_did_not_start_is_there_with_the_reason() -> None:
    text = table.levels_table(Measured([], [], []), [NotStarted("smg", "ended: no | such\nfile")], [1, 64])
    assert "smg: not measured, ended: no / such file" in text


def test_failures_and_a_saturated_client_are_marked() -> None:
    samples = [
        sample(OURS, 64, starved=2),
        sample(ROUTER, 64, client_lag_p99_ms=21.0),
        sample(ROUTER, 128, client_share=0.9),
        sample(OURS, 128),
    ]
    text = table.levels_table(Measured(samples, [], []), WITH_US[1:], [64, 128])
    assert row(text, OURS, "64")[8] == "2 FAILED"
    assert row(text, OURS, "128")[8:] == ["0", "30%, lag 1 ms"]
    assert row(text, ROUTER, "64")[9] == "30%, lag 21 ms SATURATED"
    assert row(text, ROUTER, "128")[9] == "90%, lag 1 ms SATURATED"


def test_no_gateway_has_no_processor_time_of_one() -> None:
    text = table.levels_table(Measured([sample(DIRECT, 1, gateway_cpu_s=0.0)], [], []), WITH_US[:1], [1])
    assert row(text, DIRECT, "1")[6:8] == ["-", "-"]


def test_what_a_gateway_adds_and_what_an_idle_stream_takes() -> None:
    probes = [
        FirstTokens(peer, repeat, 100, ttft_ms, {})
        for repeat, direct_ms in ((1, 20.0), (2, 21.0))
        for peer, ttft_ms in ((DIRECT, direct_ms), (OURS, direct_ms + repeat))
    ]
    idle = [Idle(OURS, 100, 100, 5_000, 3_005_000), Idle(ROUTER, 100, 40, 0, 1)]
    text = table.once_table(Measured([], probes, idle), WITH_US)
    assert row(text, OURS) == [OURS, "0.1", "1.50 (1.00..2.00)", "30.0"]
    assert row(text, ROUTER)[3] == "40 of 100 opened"
    assert row(text, DIRECT)[2:] == ["-", "-"]


def test_failures_are_listed_by_kind() -> None:
    one = sample(OURS, 64, 2)
    failed = Measured([replace(one, failures={"status 503": 4}, starved=1)], [], [])
    assert table.failures_list(failed) == (
        f"- {OURS}, 64 streams, repeat 2: 4 x status 503; 1 streams without a token in the window"
    )
    assert table.failures_list(Measured([one], [], [])) == "None."


def test_processes_that_do_not_compete_as_equals_are_told() -> None:
    one = Seen(OURS, "gateway", 1, "g", 0, "/autogroup-1 nice 0")
    assert table.equality([one, one]).startswith("All 2 processes have niceness 0 and one")
    for other in (
        Seen(ROUTER, "gateway", 2, "r", 5, one.group),
        Seen(ROUTER, "gateway", 2, "r", 0, "/autogroup-2"),
    ):
        assert table.equality([one, other]).startswith("NOT EQUAL")
    assert row(table.processes_table([one]), OURS)[4:] == ["0", "/autogroup-1 nice 0"]


def test_the_labs_that_are_measured_are_labs_of_two_prepared_engines() -> None:
    for number in (1, 2):
        lab = from_data(lab_config(number), "a test")
        assert (lab.gateway.replicas, lab.processor.engines_yield) == (number, False)
        (lane,) = lab.lanes
        assert lane.replicas == 2
        engine = make_engine(lane, lab.model, ["m"])
        assert isinstance(engine, PreparedEngine)
        engine.close()


def test_all_gateways_have_names_of_their_own() -> None:
    assert len(set(PEERS)) == len(PEERS) == 7
