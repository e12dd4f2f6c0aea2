"""What is known of the lab running on this machine: its state file and the lock beside it.

The lock is held by the supervisor for life, so the kernel frees it even when the supervisor is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from serving.core.errors import AlreadyRunningError, ConfigError, TandemError
from serving.core.home import home_dir


class LabPhase(StrEnum):
    """Where a lab is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class LabState:
    """The state file's content.

    Attributes:
        pid: the supervisor.
        pid_start_ticks: its start, in clock ticks since boot: tells it from a later process of the same pid,
            and unlike a time of day does not move when the clock is set.
        run_id: value of TANDEM_RUN_ID in every process of the lab.
        config_path: the config file, absolute.
        url: base URL of the gateway, as a client on this machine reaches it.
        host, ports: TCP ports the lab listens on; free again once it is down.
        log_path: log of a detached supervisor; None in the foreground.
        phase, progress: where it is, and the last line of progress.
        started_at_s: Unix time.
        address: the Ray cluster it runs on, as --address named it; None where Ray is the lab's own.
        temp_dirs: where its Ray and its engines keep sockets; none of them on a cluster.
    """

    pid: int
    pid_start_ticks: int
    run_id: str
    config_path: str
    url: str
    host: str
    ports: tuple[int, ...]
    log_path: str | None
    phase: LabPhase
    progress: str
    started_at_s: float
    address: str | None = None
    temp_dirs: tuple[str, ...] = ()

    @property
    def is_alive(self) -> bool:
        """True while the very supervisor that wrote the file runs."""
        return process_start_ticks(self.pid) == self.pid_start_ticks

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.started_at_s)


def state_dir() -> Path:
    """Per-user directory of the state file and the log.

    `TANDEM_STATE`, else `$XDG_STATE_HOME/tandem`, else `~/.local/state/tandem`.

    Raises:
        ConfigError: nothing says where the home directory is.
    """
    if explicit := os.environ.get("TANDEM_STATE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_STATE_HOME") or home_dir() / ".local" / "state") / "tandem"


def make(directory: Path) -> None:
    """Make the directory, unless it is there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"{directory}: the lab's state cannot be kept there: {error.strerror}; "
            "set TANDEM_STATE, or HOME, to a directory of yours"
        ) from None


def log_path(directory: Path) -> Path:
    """Output of the last detached supervisor."""
    return directory / "lab.log"


def read(directory: Path) -> LabState | None:
    """The state file, or None when there is none.

    Raises:
        ConfigError: the file cannot be read.
        TandemError: it is damaged.
    """
    path = directory / "lab.json"
    try:
        data = json.loads(path.read_text())
        lists = {key: tuple(data[key]) for key in ("ports", "temp_dirs") if key in data}
        return LabState(**{**data, "phase": LabPhase(data["phase"]), **lists})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; set TANDEM_STATE, or HOME, to a directory of yours"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise TandemError(f"{path}: damaged state file ({error}); stop any lab, then delete it") from None


def write(directory: Path, state: LabState) -> None:
    """Replace the state file."""
    replace_file(directory / "lab.json", json.dumps(asdict(state), indent=2))


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step, so that a reader never sees half of it."""
    descriptor, scratch = tempfile.mkstemp(prefix=".lab-", dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    os.replace(scratch, path)


def remove(directory: Path) -> None:
    (directory / "lab.json").unlink(missing_ok=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the right to run a lab.

    Raises:
        AlreadyRunningError: another process holds it.
        ConfigError: as `make`.
    """
    make(directory)
    # Not inheritable (Python's default), so no process of the lab keeps the lock beyond the supervisor.
    with (directory / "lab.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyRunningError(already_running(read(directory))) from None
        yield


def already_running(state: LabState | None) -> str:
    """What to tell who wants a second lab."""
    if state is None:
        return "a lab is being started; `tandem status` shows it"
    return (
        f"a lab is {state.phase} already (pid {state.pid}, {state.url}, {state.config_path}); "
        "`tandem down` stops it"
    )


def process_start_ticks(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when it does not run (a zombie does not)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])
