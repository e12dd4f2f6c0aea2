"""The load tool's commands in processes of their own, as they must be: Locust patches the interpreter."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from threading import Event

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 200  # of a process; they take seconds, but other work may share the cores


def run_to_end(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT
    )  # fmt: skip


def interrupted(command: Sequence[str], arrived: Event) -> tuple[str, str]:
    """Ctrl-C as soon as enough requests have arrived; standard output and errors."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            assert arrived.wait(TIMEOUT_S)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return out, err
