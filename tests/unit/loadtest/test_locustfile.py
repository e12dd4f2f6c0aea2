"""The locustfile under Locust's own command, from another directory, as someone without the package has it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from loadtest.by_hand import charts as locust_charts
from loadtest.client.openai_server import Server, ServerError, find_server
from loadtest.offer.request_body import Dialect
from loadtest.run.exporter import OFF, PORT_VARIABLE
from tests.unit.loadtest.fake_server import FakeLane, fake_lab

LOCUSTFILE = Path(__file__).parents[3] / "loadtest" / "locustfile.py"
TIMEOUT_S = 200
QUICK = FakeLane("batched", ttft_s=0.01, gap_s=0.004)
SLOW = FakeLane("batched", ttft_s=0.06, gap_s=0.016)


@contextmanager
def started(directory: Path, *arguments: str, metrics_port: int = OFF) -> Iterator[subprocess.Popen[str]]:
    """Locust in a process of its own, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=directory,
        env={**os.environ, PORT_VARIABLE: str(metrics_port)},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def locust(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run Locust to its end; exit code, and what it said on one line."""
    with started(directory, *arguments) as process:
        out, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, re.sub(r"\s+", " ", out)


def said_by(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open() as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_users_in_a_closed_loop_until_stopped(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK, "slow": SLOW}) as (url, lab):
        # So many take two users three seconds, in which Locust has written its CSV, as it does each second.
        enough = lab.after(60)
        lane = ("--users", "2", "--lane", "slow", "--output-tokens", "4")
        with started(tmp_path, "--host", url, "--headless", *lane, "--csv", "out") as process:
            assert enough.wait(TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
    rows = rows_of(tmp_path / "out_stats.csv")
    assert {key for key in rows if key[1] not in ("Aggregated", "cut off")} == {
        ("slow/copy", name) for name in ("TTFT", "TPOT", "ICL max", "E2E")
    }
    assert float(rows["slow/copy", "TTFT"]["Min Response Time"]) >= 60
    # The median: a first chunk that a busy machine brings late makes the rest of one answer look short.
    assert float(rows["slow/copy", "TPOT"]["Median Response Time"]) >= 16
    assert float(rows["slow/copy", "E2E"]["Min Response Time"]) >= 60 + 3 * 16
    # A request counts once in Locust's totals, not once in each of its rows.
    assert rows["", "Aggregated"]["Request Count"] == rows["slow/copy", "E2E"]["Request Count"]


def test_an_open_loop_ends_by_itself(tmp_path: Path) -> None:
    with fake_lab({"quick": QUICK}) as (url, lab):
        arguments = ("--lane", "quick", "--load", "constant:20/s,2s", "--output-tokens", "4", "--csv", "out")
        html = ("--html", "out.html")
        code, out = locust(
            tmp_path, "--host", f"{url}/v1", "--headless", *arguments, *html
        )  # as many write it
    assert code == 0, out
    assert "schedule done: 40 requests" in out
    assert lab.num_requests["quick"] == 40
    assert rows_of(tmp_path / "out_stats.csv")["quick/copy", "E2E"]["Request Count"] == "40"
    assert "quick/copy" in (tmp_path / "out.html").read_text()


def test_the_rows_hold_the_latencies_of_completed_requests_only(tmp_path: Path) -> None:
    with fake_lab({"flaky": FakeLane("batched", ttft_s=0.05, gap_s=0.1, fail_every=2)}) as (url, _):
        arguments = ("--lane", "flaky", "--load", "constant:10/s,2s", "--output-tokens", "4", "--csv", "out")
        code, out = locust(tmp_path, "--host", url, "--headless", *arguments)
    assert code == 1, out  # Locust's, for failures
    rows = rows_of(tmp_path / "out_stats.csv")
    e2e = rows["flaky/copy", "E2E"]
    assert (e2e["Request Count"], e2e["Failure Count"]) == ("20", "10")
    # A failed one breaks off after two chunks; a whole answer has two gaps more.
    assert float(e2e["Min Response Time"]) >= 50 + 3 * 100
    assert {rows["flaky/copy", name]["Request Count"] for name in ("TTFT", "TPOT", "ICL max")} == {"10"}


@pytest.mark.parametrize("load", [("--users", "3"), ("--load", "constant:50/s,60s")])
def test_what_the_end_of_a_test_cuts_off_is_told_and_no_fault_of_the_server(
    load: tuple[str, ...], tmp_path: Path
) -> None:
    with fake_lab({"slow": FakeLane("batched", ttft_s=0.01, gap_s=30.0)}) as (url, lab):
        under_way = lab.after(3)
        arguments = ("--lane", "slow", "--output-tokens", "4", "--csv", "out")
        with started(tmp_path, "--host", url, "--headless", *arguments, *load) as process:
            assert under_way.wait(TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
    told = re.search(r"(\d+) requests under way at the end of the test: cut off", out)
    rows = rows_of(tmp_path / "out_stats.csv")
    assert told, out
    assert int(told[1]) == int(rows["slow/copy", "cut off"]["Request Count"]) >= 3
    assert rows["", "Aggregated"]["Request Count"] == rows["", "Aggregated"]["Failure Count"] == "0"


def test_a_stop_timeout_lets_an_open_loop_end_what_is_under_way(tmp_path: Path) -> None:
    with fake_lab({"slow": FakeLane("batched", ttft_s=0.5, gap_s=0.5)}) as (url, lab):
        under_way = lab.after(3)
        arguments = ("--lane", "slow", "--output-tokens", "4", "--csv", "out", "--stop-timeout", "60")
        load = ("--load", "constant:20/s,60s")
        with started(tmp_path, "--host", url, "--headless", *arguments, *load) as process:
            assert under_way.wait(TIMEOUT_S)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
    assert "cut off" not in out
    assert (
        3
        <= lab.num_requests["slow"]
        == int(rows_of(tmp_path / "out_stats.csv")["slow/copy", "E2E"]["Request Count"])
    )


def test_workers_share_one_schedule(tmp_path: Path) -> None:
    port = str(free_port())
    worker = ("--worker", "--master-port", port)
    with (
        fake_lab({"quick": QUICK}) as (url, lab),
        started(tmp_path, *worker) as one,
        started(tmp_path, *worker) as other,
    ):
        arguments = ("--lane", "quick", "--load", "constant:20/s,2s", "--output-tokens", "4", "--csv", "out")
        bind = ("--master-bind-port", port, "--master-bind-host", "127.0.0.1")
        master = ("--host", url, "--headless", "--master", *bind, "--expect-workers", "2", *arguments)
        metrics_port = free_port()
        with started(tmp_path, *master, metrics_port=metrics_port) as process:
            # The workers' last reports come in while Locust waits for them.
            all_told = 'tandem_load_requests_total{lane="quick",outcome="completed",workload="copy"} 40.0'
            exported = read_until(f"http://127.0.0.1:{metrics_port}/metrics", all_told)
            out, _ = process.communicate(timeout=TIMEOUT_S)
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in (one, other)]
    assert process.returncode == 0, out
    for name in ("due_requests_total", "sent_requests_total", "ttft_seconds_count"):
        assert f'tandem_load_{name}{{lane="quick",workload="copy"}} 40.0' in exported, exported
    assert 'tandem_load_output_tokens_total{lane="quick",workload="copy"} 160.0' in exported
    assert all("schedule done: 20 requests" in out for out in said), said
    assert lab.num_requests["quick"] == 40
    assert rows_of(tmp_path / "out_stats.csv")["quick/copy", "E2E"]["Request Count"] == "40"


def test_a_worker_that_is_killed_costs_its_share_and_one_that_comes_late_has_none(tmp_path: Path) -> None:
    port = str(free_port())
    worker = ("--worker", "--master-port", port)
    with (
        fake_lab({"quick": QUICK}) as (url, lab),
        started(tmp_path, *worker) as one,
        started(tmp_path, *worker) as killed,
    ):
        arguments = ("--lane", "quick", "--load", "constant:8/s,10s", "--output-tokens", "4")
        bind = ("--master-bind-port", port, "--master-bind-host", "127.0.0.1", "--expect-workers", "2")
        under_way = lab.after(8)
        with started(tmp_path, "--host", url, "--headless", "--master", *bind, *arguments) as process:
            assert under_way.wait(TIMEOUT_S)
            killed.kill()
            # Unanswered, the test goes on for as long as a busy machine takes to start one more worker.
            lab.hold()
            with started(tmp_path, *worker) as late:
                assert any(
                    "this worker came after the schedule was shared out" in line for line in said_by(late)
                )
                lab.release()
                out, _ = process.communicate(timeout=TIMEOUT_S)
                said, _ = one.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3, out
    assert "is gone, and its share of 40 arrivals is lost" in out
    assert "the shares of 1 worker, 40 of 80 arrivals, are lost" in out
    assert "schedule done: 40 requests" in said
    assert 40 <= lab.num_requests["quick"] < 80


def test_a_server_that_only_a_worker_cannot_reach_ends_the_test_and_is_named(tmp_path: Path) -> None:
    port, nobody = str(free_port()), f"http://127.0.0.1:{free_port()}"
    with started(tmp_path, "--worker", "--master-port", port) as worker:
        bind = ("--master-bind-port", port, "--master-bind-host", "127.0.0.1", "--expect-workers", "1")
        code, out = locust(tmp_path, "--host", nobody, "--headless", "--master", *bind, "--users", "9")
        worker.communicate(timeout=TIMEOUT_S)
    assert (code, worker.returncode) == (3, 3)
    assert re.search(
        rf"ERROR/\S+ worker \S+: {nobody}/v1/models: cannot be reached: Connection refused", out
    ), out


def swarm(page: str, **options: str | int) -> None:
    """Press Start, or Edit, on Locust's page."""
    form = {"user_count": 2, "spawn_rate": 1, "lane": "quick", "workload": "copy", "load": ""} | options
    urllib.request.urlopen(f"{page}/swarm", urllib.parse.urlencode(form).encode(), timeout=10).close()


def counted(metrics: str, name: str, workload: str) -> float:
    """A counter of the lane, all outcomes together."""
    rows = re.findall(rf'^tandem_load_{name}{{.*workload="{workload}"}} (\S+)$', metrics, re.MULTILINE)
    return sum(float(row) for row in rows)


def has_ended(metrics: str, workload: str) -> bool:
    """Whether no test is on, and each request of the last has ended: they do so after the test."""
    ended, sent = (counted(metrics, name, workload) for name in ("requests_total", "sent_requests_total"))
    return "tandem_load_run_active 0.0" in metrics and ended == sent


def test_tests_from_the_page_one_after_another(tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()
    page, live = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics"
    web = ("--web-host", "127.0.0.1", "--web-port", str(port), "--output-tokens", "4")
    with fake_lab({"quick": QUICK}) as (url, lab), started(
        tmp_path, "--host", url, *web, metrics_port=metrics_port
    ) as process:  # fmt: skip
        read_until(page, "<html")
        swarm(page)
        first = read_until(live, 'tandem_load_users{lane="quick",workload="copy"} 2.0')
        # Who changes the workload while users ask means the next test.
        swarm(page, user_count=3, workload="story")
        read_until(live, 'tandem_load_users{lane="quick",workload="copy"} 3.0')
        urllib.request.urlopen(f"{page}/stop", b"", timeout=10).close()
        # Every request that was begun ends, those that the stop cuts off too.
        stopped = read_when(live, lambda metrics: has_ended(metrics, "copy"))
        asked = lab.num_requests["quick"]

        swarm(page, load="poison:4/s")
        read_until(f"{page}/logs", "load 'poison:4/s': 'poison' is none of")
        swarm(page, load="constant:20/s,1s", workload="story", user_count=20)
        read_until(live, 'tandem_load_requests_total{lane="quick",outcome="completed",workload="story"} 20.0')
        # It ends by itself, before the last user is there.
        last = read_when(live, lambda metrics: has_ended(metrics, "story"))
        read_when(f"{page}/stats/requests", lambda stats: json.loads(stats)["state"] == "stopped")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
    assert counted(stopped, "sent_requests_total", "copy") > counted(first, "sent_requests_total", "copy")
    assert counted(stopped, "sent_requests_total", "story") == 0
    # The lab saw all that were sent, but those that the stop overtook.
    assert asked <= counted(stopped, "sent_requests_total", "copy") <= asked + 3
    for name in ("sent_requests_total", "due_requests_total", "requests_total"):
        assert counted(last, name, "copy") == counted(stopped, name, "copy")
        assert counted(last, name, "story") == 20


def test_whatever_ends_a_test_from_the_page_leaves_master_and_workers_fit_for_the_next(
    tmp_path: Path,
) -> None:
    port, master_port, metrics_port = free_port(), str(free_port()), free_port()
    page, live = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics"
    web = ("--web-host", "127.0.0.1", "--web-port", str(port), "--output-tokens", "4")
    bind = ("--master-bind-port", master_port, "--master-bind-host", "127.0.0.1")
    with (
        fake_lab({"quick": QUICK}) as (url, lab),
        started(tmp_path, "--worker", "--master-port", master_port),
        started(tmp_path, "--host", url, "--master", *bind, *web, metrics_port=metrics_port) as master,
    ):
        read_until(f"{page}/logs", "1 workers connected")
        swarm(page, load="poison:4/s")
        read_until(f"{page}/logs", "load 'poison:4/s': 'poison' is none of")
        swarm(page, user_count=9, host=f"http://127.0.0.1:{free_port()}")
        read_until(f"{page}/logs", "/v1/models: cannot be reached: Connection refused")
        read_until(f"{page}/logs", "reported that it has stopped")

        # A schedule is over while a ramp, made by Edit, has a minute to go: that ends too.
        began, begun_again = lab.after(1), lab.after(21)
        swarm(page, load="constant:20/s,1s", host=url)
        assert began.wait(TIMEOUT_S)
        swarm(page, load="constant:20/s,1s", host=url, user_count=60)
        read_when(f"{page}/stats/requests", lambda stats: json.loads(stats)["state"] == "stopped")
        assert not begun_again.wait(3)

        swarm(page, user_count=2, spawn_rate=2, host=url)
        two_users = 'tandem_load_users{lane="quick",workload="copy"} 2.0'
        read_when(live, lambda text: two_users in text and counted(text, "sent_requests_total", "copy") > 20)
        master.send_signal(signal.SIGTERM)
        out, _ = master.communicate(timeout=TIMEOUT_S)
    # The exit code is the last test's.
    assert master.returncode == 0, out


def test_the_page_has_charts_and_leads_to_them(tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()
    with fake_lab({"quick": QUICK}) as (url, lab):
        enough = lab.after(20)
        arguments = ("--lane", "quick", "--output-tokens", "4", "--users", "2", "--autostart")
        web = ("--web-host", "127.0.0.1", "--web-port", str(port))
        with started(tmp_path, "--host", url, *web, *arguments, metrics_port=metrics_port):
            assert enough.wait(TIMEOUT_S)
            page = f"http://127.0.0.1:{port}"
            assert 'href="./latency"' in read(f"{page}/")
            charts = read_until(f"{page}/latency", 'points="')
            live = read_until(f"http://127.0.0.1:{metrics_port}/metrics", "tandem_load_run_active 1.0")
    assert 'tandem_load_users{lane="quick",workload="copy"} 2.0' in live
    assert [re.sub(r"<.*?>", "", title) for title in re.findall(r"<h2>.*?</h2>", charts)] == [
        "TTFT, quick/copy", "TPOT, quick/copy", "E2E, quick/copy",
    ]  # fmt: skip


def read_until(url: str, wanted: str) -> str:
    """The page, as soon as it is there and holds what is wanted."""
    return read_when(url, lambda page: wanted in page)


def read_when(url: str, is_wanted: Callable[[str], bool]) -> str:
    """The page, as soon as it is there and as it is wanted."""
    deadline_s, page = time.monotonic() + TIMEOUT_S, ""
    while not page or not is_wanted(page):
        assert time.monotonic() < deadline_s, page
        time.sleep(0.1)
        with contextlib.suppress(ConnectionError, urllib.error.URLError):
            page = read(url)
    return page


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "closed:4"), "which --users makes"),
        (("--load", "poison:4/s"), "poison:4/s"),
        (("--workload", "chess"), "workload 'chess' is unknown"),
    ],
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    code, out = locust(tmp_path, "--host", "http://127.0.0.1:1", "--headless", *arguments)
    assert code == 2
    assert message in out


def test_a_server_that_is_not_there_ends_the_test(tmp_path: Path) -> None:
    code, out = locust(tmp_path, "--host", f"http://127.0.0.1:{free_port()}", "--headless", "--users", "1")
    assert code == 3
    assert "/v1/models: cannot be reached: Connection refused" in out


def test_the_server_is_asked_who_it_is() -> None:
    with fake_lab({"quick": QUICK}) as (url, _):
        assert find_server(url, say=pytest.fail) == Server(Dialect.TANDEM, "smollm2-135m")
        assert find_server(url, "vllm", say=pytest.fail) == Server(Dialect.VLLM, "smollm2-135m")
        assert find_server(url, model="other", say=pytest.fail) == Server(Dialect.TANDEM, "other")
        with pytest.raises(ServerError, match=r"/nowhere/v1/models: answered 404"):
            find_server(f"{url}/nowhere", say=pytest.fail)
    assert find_server("http://127.0.0.1:1", "openai", "m", say=pytest.fail) == Server(Dialect.OPENAI, "m")


def test_a_model_that_is_named_is_not_asked_for_again() -> None:
    said: list[str] = []
    with fake_lab({"quick": QUICK}) as (url, _):
        # A server without the list of models, which an inference server need not have.
        assert find_server(f"{url}/nowhere", model="m", say=said.append) == Server(Dialect.OPENAI, "m")
        with pytest.raises(ServerError, match=r"answered 404 Not Found; name one \(--model\)"):
            find_server(f"{url}/nowhere", say=pytest.fail)
    assert len(said) == 1
    assert said[0].startswith(
        f"{url}/nowhere/v1/models: answered 404 Not Found; it is taken for a plain OpenAI server"
    )
    assert "--model" not in said[0]
    # Nobody there is another matter: that would be a run without a server.
    with pytest.raises(ServerError, match=r"cannot be reached: Connection refused$"):
        find_server(f"http://127.0.0.1:{free_port()}", model="m", say=pytest.fail)


class Entry:
    """The part of a row of Locust's statistics that the charts read."""

    def __init__(self, method: str, name: str) -> None:
        self.method, self.name = method, name
        self.response_times: dict[float, int] = {}


def test_each_point_is_of_what_ended_since_the_last() -> None:
    history, entry = locust_charts.History(), Entry("<a>/copy", "TTFT")
    entry.response_times = {100: 19, 500: 1}
    history.sample([entry, Entry("a/copy", "ICL max")], 10.0)
    history.sample([entry], 15.0)  # nothing ended meanwhile
    entry.response_times = {100: 19, 500: 1, 200: 2}
    history.sample([entry], 20.0)
    entry.response_times = {300: 1}  # Locust's statistics were reset
    history.sample([entry], 25.0)
    points = history.rows["<a>/copy", "TTFT"]
    assert [(p.at_s, p.p50_ms, p.p95_ms) for p in points] == [(10, 100, 100), (20, 200, 200), (25, 300, 300)]
    assert list(history.rows) == [("<a>/copy", "TTFT")]
    assert "&lt;a&gt;/copy" in history.page()
    assert "<a>/copy" not in history.page()
