"""Unix sockets that Ray and engines leave in temporary directories: nobody listens there once the lab is down."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

from serving.core.run_mark import socket_folder_prefix


def remove_left(temp_dirs: Iterable[str], supervisor_pid: int, run_id: str) -> None:
    """Remove what a lab left; its processes have ended. A socket that somebody answers at stays.

    Args:
        temp_dirs: of Ray and of engines.
        supervisor_pid: who started Ray; its pid ends the name of Ray's session.
    """
    for folder in map(Path, temp_dirs):
        for path in folder.glob(f"ray/session_*_{supervisor_pid}/sockets/*"):
            if _is_left(path):
                path.unlink(missing_ok=True)
        for own in folder.glob(f"{socket_folder_prefix(run_id)}*"):
            shutil.rmtree(own, ignore_errors=True)


def _is_left(path: Path) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.getuid():
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # one whose backlog is full is in use
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
