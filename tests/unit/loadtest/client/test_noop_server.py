"""The no-op server and what is measured against it, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.client import noop_server
from loadtest.client.ceiling import measure_ceiling
from loadtest.client.record import RequestLabel, RequestRecord
from loadtest.client.sse_client import ClientSettings, StreamingClient
from serving.core.latency import inter_chunk_latencies_s

TOKENS_PER_S = 200.0

CEILING = """
import json
from dataclasses import asdict
from loadtest.client.ceiling import measure_ceiling
import psutil
ceiling = measure_ceiling(streams=60, duration_s=0.3)
print(json.dumps({**asdict(ceiling), "children": len(psutil.Process().children())}))
"""


@pytest.fixture(scope="module")
def paced() -> Iterator[str]:
    process, url = noop_server.start(TOKENS_PER_S)
    yield url
    noop_server.stop(process)
    assert process.returncode == 0


def ask(url: str, name: str = "noop-1", **body: object) -> RequestRecord:
    client = StreamingClient(ClientSettings(url))
    record = client.send(RequestLabel(name, "", "", "", 0), body, time.perf_counter())
    client.close()
    return record


def test_max_tokens_is_honoured_and_counted(paced: str) -> None:
    record = ask(paced, max_tokens=7, min_tokens=7, stream_options={"continuous_usage_stats": True})
    assert record.error is None
    assert (record.output_tokens, record.asked_output_tokens) == (7, 7)
    assert record.chunk_tokens == (1,) * 7


def test_tokens_come_at_the_pace_asked_for(paced: str) -> None:
    gaps_s = inter_chunk_latencies_s(ask(paced, max_tokens=41).timeline)
    # The first token is sent at once, so the first gap is anything up to the period.
    assert sum(gaps_s[1:]) / 39 == pytest.approx(1 / TOKENS_PER_S, rel=0.2)


def test_other_paths_are_refused(paced: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(f"{paced}/v1/nothing")
    caught.value.close()


def test_stamps_tell_what_was_sent_when(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps.jsonl"
    command = [
        sys.executable,
        "-m",
        "loadtest.client.noop_server",
        "--tokens-per-s",
        "0",
        "--stamps",
        str(stamps),
    ]
    with subprocess.Popen(
        [*command, "--stop-with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        record = ask(url, "noop-2", max_tokens=300)
        noop_server.stop(server)
    row = json.loads(stamps.read_text())
    assert row["request_id"] == "noop-2"
    assert len(row["sent_at_s"]) == len(record.chunk_at_s) == record.output_tokens == 300
    assert all(sent <= read for sent, read in zip(row["sent_at_s"], record.chunk_at_s, strict=True))


def test_several_processes_share_a_port_and_end_together() -> None:
    process, url = noop_server.start(0, processes=2)
    records = [ask(url, max_tokens=3) for _ in range(8)]
    noop_server.stop(process)
    assert process.returncode == 0
    assert [record.output_tokens for record in records] == [3] * 8
    assert ask(url).reason == "connect_failed"


def test_the_ceiling_is_measured_and_its_server_stopped(tmp_path: Path) -> None:
    script = tmp_path / "ceiling.py"
    script.write_text(CEILING)
    command = [sys.executable, "-m", "gevent.monkey", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    ceiling = json.loads(done.stdout)
    assert ceiling["streams"] == 60
    assert ceiling["children"] == 0
    assert ceiling["tokens_per_s"] > 1000
    assert ceiling["requests_per_s"] > 100


def test_the_ceiling_needs_sockets_that_wait_for_each_other() -> None:
    with pytest.raises(RuntimeError, match="gevent"):
        measure_ceiling(1)
