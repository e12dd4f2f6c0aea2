"""Variables of the environment that Ray, vLLM and prometheus-client read with a meaning of their own.

Each of them would break the lab half a minute after its start, and its error names no variable. So the libraries
are asked before: vLLM's own table of variables, and Ray in a process of its own, which a variable may crash.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from serving.core.errors import MAX_SHOWN_CHARS, ConfigError
from serving.core.home import home_dir

MAX_PORT = 65535
# Two names of one variable: any process that uses prometheus-client looks for both.
MULTIPROCESS_VARIABLES = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
# What Ray reads as numbers under names that do not begin with its own; a test compares them with the installed Ray.
RAY_VARIABLES_OF_OTHER_NAMES = frozenset(
    {
        "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S_LOWER_BOUND",
        "LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S_UPPER_BOUND",
        "LOG_NAME_UPDATE_INTERVAL_S",
        "SERVE_SLOW_STARTUP_WARNING_PERIOD_S",
        "SERVE_SLOW_STARTUP_WARNING_S",
    }
)
# What reads variables when it is imported, and numbers that are read later; nothing of it in this process.
RAY_READERS = (
    "ray.serve, ray.serve._private.deployment_state, ray.serve._private.long_poll, ray._private.log_monitor"
)
RAY_NUMBERS = (
    "RAY_ROTATION_MAX_BYTES",
    "RAY_ROTATION_BACKUP_COUNT",
    "RAY_WORKER_TIMEOUT_S",
    "RAY_gcs_server_port_wait_time_s",
)
RAY_READING = f"import os, {RAY_READERS}; [int(os.environ[n]) for n in {RAY_NUMBERS} if n in os.environ]"
RAY_LIMIT_S = 120
# Linux takes no longer path of a socket; Ray's longest is made with seven digits of a pid.
MAX_SOCKET_PATH_BYTES = 107
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MAX_TEMP_DIR_BYTES = MAX_SOCKET_PATH_BYTES - len(RAY_SOCKET)
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
TEMP_VARIABLES = ("RAY_TMPDIR", "TMPDIR", "TEMP", "TMP")
HARMLESS = re.compile(r"[0-9]{1,9}")  # to whoever wants a number, a truth or a text


def temp_dirs() -> list[Path]:
    """Where Ray and the engines keep sockets on this machine; one directory unless variables part them."""
    rays = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    try:
        return list(dict.fromkeys((Path(rays), Path(tempfile.gettempdir()))))
    except FileNotFoundError:  # nothing at all that can be written to
        return [Path(rays)]


def place_faults() -> list[str]:
    """Why directories of this user would not do for Ray and the engines, a line each."""
    faults = []
    try:
        if not (home := home_dir()).is_dir():
            faults.append(f"HOME={str(home)!r}: no such directory; set it to a directory of yours")
    except ConfigError as error:
        faults.append(str(error))
    for folder in temp_dirs():
        names = [name for name in TEMP_VARIABLES if os.environ.get(name) == str(folder)]
        shown = f"{names[0] if names else 'temporary directory'}={str(folder)!r}"
        if not folder.is_absolute() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            faults.append(f"{shown}: must be a directory that this user may write to, by its absolute path")
        elif (num_bytes := len(os.fsencode(folder))) > MAX_TEMP_DIR_BYTES:
            faults.append(
                f"{shown}: has {num_bytes} bytes, and may have {MAX_TEMP_DIR_BYTES}: Ray's sockets lie below, and "
                f"their paths have at most {MAX_SOCKET_PATH_BYTES}"
            )
    return faults


def metrics_faults() -> list[str]:
    """Why prometheus-client would not serve a process's metrics as its own, a line each."""
    return [
        f"{_shown(name)}: unset it; with it prometheus-client keeps every process's metrics in files of that "
        "directory, and an engine's page would show the sum of all"
        for name in MULTIPROCESS_VARIABLES
        if name in os.environ
    ]


def vllm_faults() -> list[str]:
    """Variables that the installed vLLM cannot read, a line each; none where vLLM is not installed."""
    variables = _vllm_variables()
    faults = []
    for name in sorted(variables.keys() & os.environ.keys()):
        try:
            value = variables[name]()
        except (ValueError, TypeError, OSError, ImportError) as error:
            faults.append(f"{_shown(name)}: vLLM cannot read it: {error}")
            continue
        if name.endswith("_PORT") and isinstance(value, int) and not 0 <= value <= MAX_PORT:
            faults.append(f"{_shown(name)}: vLLM wants a port, 0 to {MAX_PORT}")
    return faults


def _vllm_variables() -> dict[str, Callable[[], object]]:
    """What vLLM reads each of its variables with. Its package is not imported, which would take seconds."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        return {}
    path = Path(package.submodule_search_locations[0]) / "envs.py"
    spec = importlib.util.spec_from_file_location("tandem_vllm_envs", path)
    assert spec is not None
    assert spec.loader is not None
    envs: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(envs)
    variables: dict[str, Callable[[], object]] = envs.environment_variables
    return variables


def ray_faults(fault_of: Callable[[dict[str, str]], str | None] | None = None) -> list[str]:
    """Variables that the installed Ray cannot read, a line each; one that it warns of and ignores is none.

    Args:
        fault_of: what Ray says in an environment, None if it is content; by default Ray is asked, which takes
            seconds for each variable of its that holds more than digits.
    """
    ask = fault_of or _ask_ray
    suspects = [name for name in sorted(os.environ) if _is_rays(name) and not _is_harmless(os.environ[name])]
    if not suspects or (together := ask(dict(os.environ))) is None:
        return []
    found = [
        f"{_shown(name)}: Ray cannot read it: {fault}"
        for name in suspects
        if (fault := ask(_without(other for other in suspects if other != name))) is not None
    ]
    return found or [f"{', '.join(map(_shown, suspects))}: Ray does not start with them: {together}"]


def _is_rays(name: str) -> bool:
    return name.startswith("RAY_") or name in RAY_VARIABLES_OF_OTHER_NAMES


def _is_harmless(value: str) -> bool:
    return HARMLESS.fullmatch(value) is not None


def _without(names: Iterable[str]) -> dict[str, str]:
    left_out = set(names)
    return {name: value for name, value in os.environ.items() if name not in left_out}


def _ask_ray(environment: dict[str, str]) -> str | None:
    done = subprocess.run(
        [sys.executable, "-c", RAY_READING],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=RAY_LIMIT_S,
    )
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"its import ends with {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its import ends with exit code {done.returncode}"


def _shown(name: str) -> str:
    value = os.environ[name]
    text = f"{name}={value[:MAX_SHOWN_CHARS]!r}"
    if SERVICE_LINK.match(value):
        text += (
            " (Kubernetes sets it for a Service of that name, unless the pod has `enableServiceLinks: false`)"
        )
    return text
