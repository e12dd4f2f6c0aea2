"""A Ray cluster of several nodes on this machine, as `ray start` makes them on several."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.running_lab import free_port, wait_until

STOP_LIMIT_S = 40
RAY = str(Path(sys.executable).with_name("ray"))
QUIET = ("--block", "--num-cpus=0", "--object-store-memory=100000000", "--disable-usage-stats")


@dataclass
class RayCluster:
    """`address` is its head's; nobody without `environment` is let in, for it holds the token."""

    address: str
    environment: dict[str, str]
    nodes: list[psutil.Popen] = field(default_factory=list)

    def start_worker(self, engines: int) -> psutil.Popen:
        """A node that takes so many engines."""
        resources = json.dumps({"tandem_engine": engines})
        return self.start(f"--address={self.address}", f"--resources={resources}")

    def start(self, *options: str) -> psutil.Popen:
        node = psutil.Popen(
            [RAY, "start", *QUIET, *options],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        self.nodes.append(node)
        # Two that start at once on one machine choose the same names for their sockets, and one never joins.
        wait_until(lambda: _serves(node), "the node's raylet serves", limit_s=60)
        return node


def kill_node(node: psutil.Popen) -> None:
    """Everything of that node at once, as when a machine loses its power."""
    everything = [node, *node.children(recursive=True)]
    for process in everything:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(everything, timeout=10)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A head that takes no engine, and the workers that a test adds."""
    # Not pytest's directory: Ray makes Unix sockets below it, whose paths must be short.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = others | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    port = free_port()
    cluster = RayCluster(f"127.0.0.1:{port}", environment)
    try:
        cluster.start("--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={directory}")
        wait_until(lambda: _listens(port), "the head listens", limit_s=60)
        yield cluster
    finally:
        for node in reversed(cluster.nodes):
            if node.is_running() and node.status() != psutil.STATUS_ZOMBIE:
                node.terminate()
                with suppress(psutil.TimeoutExpired):
                    node.wait(STOP_LIMIT_S)
            kill_node(node) if node.is_running() else node.wait(STOP_LIMIT_S)
        shutil.rmtree(directory, ignore_errors=True)


def _serves(node: psutil.Popen) -> bool:
    return any(
        child.name() == "raylet" and any(one.status == psutil.CONN_LISTEN for one in child.net_connections())
        for child in node.children(recursive=True)
    )


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
