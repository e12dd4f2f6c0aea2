"""The gateways that are measured, each started in front of the same two engines.

The engines are those of the lab behind our one gateway: `simulated`, prepared, two replicas. The other gateways are
given the addresses of these very processes, so that all stream from the same ones. The lab with two gateways cannot
share them, for a lab starts its engines itself: it has two of its own, which are idle whenever it is not measured.

All peers stay up while one of them is measured: to start one takes up to a minute. What the others take of the
processors meanwhile is measured too.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

import serving
from serving import model_store
from serving.benchmarks.gateway.names import (
    DIRECT,
    LITELLM,
    OURS,
    OURS_TWICE,
    PEERS,
    ROUTER,
    SERVE_PROXY,
    SMG,
)
from serving.benchmarks.gateway.requests import MARKER, MODEL, STEP_MS, body
from serving.benchmarks.lab import free_port, own_lab, tail
from serving.benchmarks.processes import Seen, end, part_of, see, titled, tree
from serving.core.addresses import LOOPBACK
from serving.core.errors import StartFailedError

LANE = "prepared"
NUM_ENGINES = 2
MAX_STREAMS = 2048  # of one engine: none ever waits in it
START_LIMIT_S = 180.0
STOP_LIMIT_S = 30.0
POLL_S = 0.5
NO_LIMIT = "100000"


@dataclass(frozen=True, slots=True)
class Peer:
    """A gateway that answers.

    Attributes:
        version: of its package, or what else says what it is.
        urls: where requests go; the client spreads its streams over them.
        root_pid: from which all its processes come; None where there is none.
        engine_title: title of the engines among them.
    """

    name: str
    version: str
    urls: tuple[str, ...]
    root_pid: int | None = None
    engine_title: str | None = None
    is_ray: bool = False

    def processes(self) -> list[Seen]:
        """Those that run now."""
        found = []
        for process in tree(self.root_pid) if self.root_pid is not None else ():
            part = part_of(titled(process), self.engine_title) if self.is_ray else "gateway"
            if (seen := see(self.name, part, process)) is not None:
                found.append(seen)
        return found


@dataclass(frozen=True, slots=True)
class NotStarted:
    """A gateway that could not be installed or started, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Program:
    """A gateway with a command.

    Attributes:
        environment: folder of its virtual environment; None: our own.
        start: what its interpreter runs.
        arguments: of that, from a port, the engines' URLs and a scratch directory.
    """

    package: str
    environment: Path | None
    start: tuple[str, ...]
    arguments: Callable[[int, Sequence[str], Path], list[str]]
    is_ray: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else self.environment / "bin/python"


def _router(port: int, urls: Sequence[str], _: Path) -> list[str]:
    return [
        *("--host", LOOPBACK, "--port", str(port), "--worker-urls", *urls),
        *("--policy", "round_robin", "--max-concurrent-requests", NO_LIMIT, "--log-level", "warning"),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port())),
    ]


def _smg(port: int, urls: Sequence[str], _: Path) -> list[str]:
    return [
        *("launch", "--host", LOOPBACK, "--port", str(port), "--worker-urls", *urls),
        *("--policy", "round_robin", "--backend", "openai", "--log-level", "warn"),
        *("--max-concurrent-requests", NO_LIMIT),
        *("--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port())),
    ]


def _litellm(port: int, urls: Sequence[str], scratch: Path) -> list[str]:
    config = scratch / "litellm.yaml"
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in urls
    ]
    config.write_text(
        yaml.safe_dump(
            {
                "model_list": models,
                "router_settings": {"routing_strategy": "simple-shuffle", "num_retries": 0},
                "litellm_settings": {"telemetry": False},
            }
        )
    )
    return ["--config", str(config), "--host", LOOPBACK, "--port", str(port), "--num_workers", "1"]


def _serve_proxy(port: int, urls: Sequence[str], _: Path) -> list[str]:
    return ["--port", str(port), *urls]


def _programs() -> dict[str, _Program]:
    others = model_store.cache_dir() / "benchgateway"

    def installed(
        package: str, arguments: Callable[[int, Sequence[str], Path], list[str]], **variables: str
    ) -> _Program:
        folder = others / package
        return _Program(package, folder, (str(folder / "bin" / package),), arguments, variables=variables)

    streamer = ("-m", "serving.benchmarks.gateway.serve_streamer")
    return {
        ROUTER: installed("vllm-router", _router),
        SMG: installed("smg", _smg),
        LITELLM: installed(
            "litellm",
            _litellm,
            LITELLM_LOCAL_MODEL_COST_MAP="True",
            LITELLM_LOG="ERROR",
            NO_DOCS="True",
            LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY="true",
        ),
        SERVE_PROXY: _Program("ray", None, streamer, _serve_proxy, is_ray=True),
    }


def lab_config(num_gateways: int) -> dict[str, Any]:
    """A lab of two prepared engines, everything in it at one niceness and in one session."""
    lane = {
        "name": LANE,
        "strategy": "batched",
        "engine": "simulated",
        "replicas": NUM_ENGINES,
        "max_num_seqs": MAX_STREAMS,
        "simulated": {"prepared": True, "ttft_ms": STEP_MS, "step_ms": STEP_MS},
    }
    return {
        "model": {"name": MODEL},
        # Silent streams last as long as they are looked at.
        "gateway": {"replicas": num_gateways, "idle_timeout_s": 600},
        "processor": {"engines_yield": False},
        "lanes": [lane],
    }


@contextlib.contextmanager
def running(
    names: Sequence[str], scratch: Path, say: Callable[[str], None]
) -> Iterator[tuple[Peer, list[Peer | NotStarted]]]:
    """Start the peers named and stop them with the block; first of all the lab whose engines all stream from.

    Returns:
        That lab, and the peers in the order of `PEERS`.

    Raises:
        StartFailedError: the lab whose engines all stream from did not start.
    """
    programs = _programs()
    with contextlib.ExitStack() as stack:
        say(f"starting {OURS}, with the engines of all")
        ours, engines = stack.enter_context(_lab(OURS, 1, scratch / "one"))
        found: list[Peer | NotStarted] = []
        for name in (name for name in PEERS if name in names):
            say(f"starting {name}")
            if name == DIRECT:
                found.append(Peer(DIRECT, f"{NUM_ENGINES} engines", engines))
                continue
            if name == OURS:
                found.append(ours)
                continue
            try:
                if name == OURS_TWICE:
                    peer, _ = stack.enter_context(_lab(OURS_TWICE, 2, scratch / "two"))
                else:
                    program = programs[name]
                    folder = scratch / name
                    peer = stack.enter_context(_started(name, program, engines, folder))
                found.append(peer)
            except StartFailedError as error:
                found.append(NotStarted(name, str(error)))
        yield ours, found


@contextlib.contextmanager
def _lab(name: str, num_gateways: int, directory: Path) -> Iterator[tuple[Peer, tuple[str, ...]]]:
    directory.mkdir(parents=True)
    with own_lab(lab_config(num_gateways), directory) as lab:
        wait_until_answers(lab.url, lambda: None)
        title = f"ray::ServeReplica:tandem:{LANE}"
        version = serving.__version__
        peer = Peer(name, version, (lab.url,), lab.pid, engine_title=title, is_ray=True)
        yield peer, lab.engine_urls[LANE]


@contextlib.contextmanager
def _started(name: str, program: _Program, engines: Sequence[str], scratch: Path) -> Iterator[Peer]:
    """A program that answers.

    Raises:
        StartFailedError: it is not installed, ended, or does not answer in time.
    """
    if not program.python.exists():
        raise StartFailedError(f"not installed: no {program.python.name} of its own (make bench-gateway)")
    version = _version(program)
    scratch.mkdir(parents=True)
    port, log_path = free_port(), scratch / "log"
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    if program.environment is not None:
        kept.pop("PYTHONPATH", None)
    command = [str(program.python), *program.start, *program.arguments(port, engines, scratch)]
    with log_path.open("wb") as log:
        # In our session on purpose: see `serving.benchmarks.lab`.
        process = subprocess.Popen(
            command, env={**kept, **program.variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def check() -> None:
        if process.poll() is not None:
            raise StartFailedError(f"ended with exit code {process.returncode}: {tail(log_path)}")

    url = f"http://{LOOPBACK}:{port}"
    try:
        try:
            wait_until_answers(url, check)
        except TimeoutError as error:
            raise StartFailedError(f"{error}: {tail(log_path)}") from error
        yield Peer(name, f"{program.package} {version}", (url,), process.pid, is_ray=program.is_ray)
    finally:
        end(process, STOP_LIMIT_S)


def wait_until_answers(url: str, check: Callable[[], None], limit_s: float = START_LIMIT_S) -> None:
    """Ask for two tokens until a stream brings them.

    Args:
        check: raises when it is in vain.

    Raises:
        TimeoutError: it has not within the limit; the text tells the last answer.
    """
    give_up_at_s = time.monotonic() + limit_s
    while True:
        check()
        if (said := _ask(url)) == "":
            return
        if time.monotonic() > give_up_at_s:
            raise TimeoutError(f"no answer within {limit_s:g} s; the last was {said}")
        time.sleep(POLL_S)


def _ask(url: str) -> str:
    """Empty when a stream of two tokens came, else what came instead."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body("Once", 2), headers)
        answer = connection.getresponse()
        said = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()
    if answer.status == 200 and said.count(MARKER) == 2:
        return ""
    return f"{answer.status}: {said[:200]!r}"


def _version(program: _Program) -> str:
    code = f"import importlib.metadata as m; print(m.version({program.package!r}))"
    asked = subprocess.run([program.python, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        raise StartFailedError(
            f"not installed: {program.package} is not in {program.python.parent.parent.name}"
        )
    return asked.stdout.strip()
