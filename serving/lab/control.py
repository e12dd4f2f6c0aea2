"""The local lab from outside: start its supervisor detached, stop it, look at it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil

from serving.core.client_key import KEY_HINT, key_headers
from serving.core.errors import AlreadyRunningError, StartFailedError, TandemError
from serving.core.http_get import GetError, get
from serving.core.run_mark import RUN_ID_VARIABLE
from serving.lab import state as lab_state
from serving.lab.cleanup import KILL_LIMIT_S, POLL_S, clean_up, sweep
from serving.lab.state import LabPhase, LabState
from serving.progress import Say

ABANDON_LIMIT_S = 60.0
HTTP_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 40


def detach(command: Sequence[str], *, run_id: str, log_path: Path, timeout_s: float, say: Say) -> LabState:
    """Start a supervisor in a session of its own and wait until its lab is ready.

    Args:
        command: path and arguments of what runs `supervise` with `run_id`; it fails by itself when it is not
            ready in time.
        log_path: receives its output.
        timeout_s: how long to wait; longer than the supervisor's own limit.

    Raises:
        ConfigError: the log's directory cannot be made.
        StartFailedError: it ended, or was not ready in time; the text ends with the tail of the log.
        KeyboardInterrupt: interrupted; the half-started lab is gone.
    """
    lab_state.make(log_path.parent)
    child = _spawn(command, log_path, os.environ | {RUN_ID_VARIABLE: run_id, "PYTHONUNBUFFERED": "1"})
    try:
        return _follow(child, log_path, timeout_s, say)
    except BaseException:
        _abandon(child, run_id, say)
        raise


def _spawn(command: Sequence[str], log_path: Path, env: dict[str, str]) -> psutil.Process:
    # Not subprocess.Popen, which warns when it is let go while its child lives, as is the purpose here.
    with log_path.open("wb") as log, Path(os.devnull).open("rb") as nothing:
        actions = [
            (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
            (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
        ]
        return psutil.Process(
            os.posix_spawn(command[0], list(command), env, file_actions=actions, setsid=True)
        )


def _exit_code(child: psutil.Process) -> int | None:
    try:
        return child.wait(timeout=0)
    except psutil.TimeoutExpired:
        return None


def _follow(child: psutil.Process, log_path: Path, timeout_s: float, say: Say) -> LabState:
    say("starting the supervisor")
    give_up_at_s = time.monotonic() + timeout_s
    while (code := _exit_code(child)) is None:
        state = lab_state.read(log_path.parent)
        if state is not None and state.pid == child.pid:
            if state.phase is LabPhase.READY:
                return state
            say(state.progress)
        if time.monotonic() > give_up_at_s:
            raise StartFailedError(f"not ready within {timeout_s:g} s; {_tail(log_path)}")
        time.sleep(POLL_S)
    raise StartFailedError(f"the lab did not start (exit code {code}); {_tail(log_path)}")


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"the end of {log_path}:", *(f"  {line}" for line in lines)])


def _abandon(child: psutil.Process, run_id: str, say: Say) -> None:
    """End a half-started lab; a second Ctrl-C kills the supervisor instead of waiting for it."""
    directory = lab_state.state_dir()
    try:
        if _exit_code(child) is None:
            say("stopping the half-started lab")
            child.terminate()
            child.wait(timeout=ABANDON_LIMIT_S)
    except (psutil.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        child.wait()
    finally:
        state = lab_state.read(directory)
        if state is not None and state.run_id == run_id:
            clean_up(directory, state, say, is_stopped=False)
        else:
            sweep(run_id)


def stop_running(
    *, timeout_s: float, say: Say, take_down: Callable[[str, str], None] | None = None
) -> LabState | None:
    """Stop the lab of this user, however it stands; None when there is none.

    Args:
        take_down: stops what a supervisor that did not stop left on a Ray cluster; gets its address and the run_id.

    Raises:
        TandemError: a process or a port outlived the stop.
    """
    directory = lab_state.state_dir()
    state = lab_state.read(directory)
    if state is None:
        return None
    if state.is_alive:
        _stop_supervisor(state, directory, timeout_s, say)
    else:
        say(f"the supervisor (pid {state.pid}) died; sweeping up what it left")
    if state.address is not None and take_down is not None and _is_left(state, directory):
        say(f"stopping what is left on the Ray cluster at {state.address}")
        take_down(state.address, state.run_id)
    try:
        with lab_state.locked(directory):
            clean_up(directory, state, say)
    except AlreadyRunningError:
        # Somebody started the next lab in this moment: only the processes of the old one are ours.
        sweep(state.run_id)
    return state


def _is_left(state: LabState, directory: Path) -> bool:
    """Whether nobody cleaned up: a supervisor that stops removes its state file."""
    now = lab_state.read(directory)
    return now is not None and now.run_id == state.run_id


def _stop_supervisor(state: LabState, directory: Path, timeout_s: float, say: Say) -> None:
    process = psutil.Process(state.pid)
    process.send_signal(signal.SIGTERM)
    give_up_at_s = time.monotonic() + timeout_s
    while state.is_alive:
        now = lab_state.read(directory)
        say(
            now.progress
            if now is not None and now.run_id == state.run_id
            else "waiting for the supervisor to end"
        )
        if time.monotonic() > give_up_at_s:
            say(f"supervisor {state.pid} did not stop within {timeout_s:g} s (--timeout-s): killing it")
            process.send_signal(signal.SIGKILL)
            try:
                process.wait(timeout=KILL_LIMIT_S)
            except psutil.TimeoutExpired:
                raise TandemError(
                    f"supervisor {state.pid} was killed and is still there after {KILL_LIMIT_S:g} s: "
                    "the machine is too busy to end it; run `tandem down` again"
                ) from None
            return
        time.sleep(POLL_S)


def look() -> dict[str, Any]:
    """How the lab stands, as JSON.

    `state` is one of `ready`, `starting`, `stopping`, `degraded` (serves, but a lane has no replica, or none whose
    breaker lets a request through), `unreachable` (should be ready, does not answer),
    `died` (the supervisor is gone, its state file is not) and `not_running`. `scheduler` is the gateway's
    answer to GET /scheduler, or None.
    """
    state = lab_state.read(lab_state.state_dir())
    if state is None:
        return {"state": "not_running", "scheduler": None}
    standing: dict[str, Any] = {
        "state": str(state.phase) if state.is_alive else "died",
        "pid": state.pid,
        "run_id": state.run_id,
        "url": state.url,
        "config_path": state.config_path,
        "log_path": state.log_path,
        "progress": state.progress,
        "age_s": round(state.age_s, 1),
        "scheduler": None,
    }
    if standing["state"] == LabPhase.READY:
        try:
            fetch = reader(state.url)
            fetch(state.url + "/health")
            standing["scheduler"] = json.loads(fetch(state.url + "/scheduler"))
            if faults := lane_faults(standing["scheduler"]):
                standing |= {"state": "degraded", "progress": "; ".join(faults)}
        except (OSError, ValueError) as error:
            standing |= {"state": "unreachable", "progress": f"{state.url} does not answer: {error}"}
    return standing


def lane_faults(scheduler: dict[str, Any]) -> list[str]:
    """Why lanes serve nothing now, a line each, from the gateway's answer to GET /scheduler."""
    faults = []
    for lane in scheduler["lanes"]:
        replicas = lane["replicas"]
        if not replicas:
            faults.append(f"lane {lane['lane']}: no ready replica")
        elif all(replica["breaker"] == "open" for replica in replicas):
            faults.append(f"lane {lane['lane']}: the breakers of all {len(replicas)} replica(s) are open")
    return faults


def reader(base_url: str) -> Callable[[str], bytes]:
    """Reads pages of a lab's processes, proxies aside; it shows the API key to the gateway at `base_url` alone.

    It raises OSError: no answer within HTTP_TIMEOUT_S, or a status of 400 and above.
    """
    shown = key_headers()

    def fetch(url: str) -> bytes:
        try:
            return get(url, shown if url.startswith(f"{base_url}/") else None, timeout_s=HTTP_TIMEOUT_S)
        except GetError as error:
            hint = f"; {KEY_HINT}" if error.status == HTTPStatus.UNAUTHORIZED else ""
            raise OSError(f"{error.why}{hint}") from None

    return fetch
