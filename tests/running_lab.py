"""A lab started by the command a user types, for tests that need a running one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import yaml

START_LIMIT_S = 420
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


@dataclass(frozen=True)
class RunningLab:
    """A lab that serves; `url` is the gateway's."""

    url: str
    model: str
    environment: dict[str, str]

    def client(self, **options: Any) -> openai.OpenAI:
        """An OpenAI client that never retries: a test wants the first answer."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=10).raise_for_status().json()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120, **options)

    def replicas(self, lane: str) -> list[dict[str, Any]]:
        """The scheduler's view of a lane's replicas."""
        (found,) = [entry for entry in self.get("/scheduler")["lanes"] if entry["lane"] == lane]
        replicas: list[dict[str, Any]] = found["replicas"]
        return replicas

    def engine(self, lane: str) -> dict[str, Any]:
        """The engine's own counts and instants, of a lane with one replica."""
        (counts,) = self.engines(lane)
        return counts

    def engines(self, lane: str) -> list[dict[str, Any]]:
        """The same of each replica of a lane."""
        urls = [replica["url"] for replica in self.replicas(lane)]
        return [httpx.get(f"{url}/tandem/engine", timeout=10).json() for url in urls]

    def processes(self) -> list[psutil.Process]:
        """Every process of the lab: all inherit its state directory."""
        psutil.process_iter.cache_clear()  # it would give an ended process for a pid used again
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TANDEM_STATE") == self.environment["TANDEM_STATE"]:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue  # it ended meanwhile, or is not ours to look at
        return found

    def process_behind(self, address: str) -> psutil.Process:
        """The process behind host:port; a forked child may hold its socket too, so the oldest."""
        port = int(address.rsplit(":", 1)[1])
        # Not among self.processes(): on a cluster that was there before the lab they are its raylets' children.
        pids = {
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid is not None
        }
        assert pids, f"no process listens on {port}"
        return min(map(psutil.Process, pids), key=psutil.Process.create_time)

    def listening_addresses(self) -> set[str]:
        """IP addresses on which any process of the lab accepts connections."""
        addresses = {
            connection.laddr.ip
            for process in self.processes()
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        assert addresses, "the lab listens somewhere"
        return addresses


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    """Poll until the condition holds; the only waiting that tests of a running system do."""
    give_up_at_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_at_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tandem(
    *arguments: str, environment: dict[str, str], limit_s: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "serving", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


@contextmanager
def running_lab(
    config: dict[str, Any], options: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Iterator[RunningLab]:
    """Start a lab on a free port, and stop it whatever happens.

    Args:
        options: further ones of `tandem up`.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as directory:
        port = free_port()
        config = config | {"gateway": {"port": port} | config.get("gateway", {})}
        path = Path(directory) / "lab.yaml"
        path.write_text(yaml.safe_dump(config))
        environment = {**environment, "TANDEM_STATE": directory}
        command = ("up", "--config", str(path), "--detach", *options)
        try:
            started = tandem(*command, environment=environment, limit_s=START_LIMIT_S)
            assert started.returncode == 0, started.stdout + started.stderr
            yield RunningLab(f"http://127.0.0.1:{port}", config["model"]["name"], environment)
        finally:
            stopped = tandem("down", environment=environment)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        status = tandem("status", "--json", environment=environment)
        assert status.returncode == 3, f"a lab is left behind: {json.loads(status.stdout)}"
