"""A lab of a benchmark's own, beside any other: own state directory, free port, the session of whoever starts it.

It is started in the foreground: `tandem up --detach` would give it a session, and so, where the kernel groups by
session, a scheduling group of its own, which gets as much of the processors as the group of all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serving.core.addresses import LOOPBACK
from serving.core.errors import StartFailedError
from serving.core.http_get import GetError, get
from serving.gateway.api_keys import KEYS_VARIABLE
from serving.lab import state as lab_state
from serving.lab.state import LabPhase

START_LIMIT_S = 300.0
STOP_LIMIT_S = 90.0
POLL_S = 0.2
LOG_TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class OwnLab:
    """A lab that is ready.

    Attributes:
        pid: its supervisor, from which all its processes come.
        url: of the gateway.
        engine_urls: of each lane's replicas.
    """

    pid: int
    url: str
    engine_urls: Mapping[str, tuple[str, ...]]


def free_port() -> int:
    """A TCP port of the loopback nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def own_lab(config: Mapping[str, Any], directory: Path) -> Iterator[OwnLab]:
    """Start a lab and stop it with the block.

    Args:
        config: of a lab; the gateway's port is chosen here.
        directory: an existing one for its state, config and log.

    Raises:
        StartFailedError: it did not get ready; the text ends with the log's last lines.
    """
    path, log_path = directory / "lab.yaml", directory / "lab.log"
    gateway = {**config.get("gateway", {}), "port": free_port()}
    path.write_text(yaml.safe_dump({**config, "gateway": gateway}))
    kept = {key: value for key, value in os.environ.items() if key != KEYS_VARIABLE}
    environment = kept | {"TANDEM_STATE": str(directory)}
    command = [sys.executable, "-m", "serving"]
    with log_path.open("wb") as log:
        up = [*command, "up", "--config", str(path)]
        process = subprocess.Popen(up, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        url = _wait_ready(process, directory, log_path)
        yield OwnLab(process.pid, url, _engine_urls(url))
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Nothing, unless the supervisor could not clean up by itself.
        subprocess.run(
            [*command, "down"], env=environment, capture_output=True, timeout=STOP_LIMIT_S, check=False
        )


def _wait_ready(process: subprocess.Popen[bytes], directory: Path, log_path: Path) -> str:
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while process.poll() is None:
        state = lab_state.read(directory)
        if state is not None and state.phase is LabPhase.READY:
            return state.url
        if time.monotonic() > give_up_at_s:
            raise StartFailedError(f"the lab was not ready within {START_LIMIT_S:g} s: {tail(log_path)}")
        time.sleep(POLL_S)
    raise StartFailedError(f"the lab did not start (exit code {process.returncode}): {tail(log_path)}")


def _engine_urls(url: str) -> dict[str, tuple[str, ...]]:
    try:
        lanes = json.loads(get(f"{url}/scheduler"))["lanes"]
    except (GetError, ValueError, KeyError) as error:
        raise StartFailedError(f"the lab's scheduler page cannot be read: {error}") from error
    return {lane["lane"]: tuple(replica["url"] for replica in lane["replicas"]) for lane in lanes}


def tail(log_path: Path) -> str:
    """The last lines of a log, in one."""
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(line.strip()[:200] for line in lines[-LOG_TAIL_LINES:]) or "nothing in its log"
