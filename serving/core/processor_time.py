"""Who gets a machine's processors first: engines yield to whoever measures and routes. See docs/decisions/0008.

Linux shares a processor between scheduling groups first, and by niceness within a group. A session is a group where
the kernel groups by session (autogroup): there an engine yields to other sessions by its group's priority alone.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

ENGINE_NICENESS = 15
GROUP_NICENESS = 10  # of an engine's group; at 19, the lowest, busy sessions would stall it
GROUP_PATIENCE_S = 5.0

_SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")
_GROUP = Path("/proc/self/autogroup")


def yield_as_engine() -> None:
    """Make this process, and all that it starts from now on, as nice as engines are; never less nice than it is.

    It gets a session of its own, and so, where sessions are groups, a scheduling group apart from those who route.
    """
    if niceness() < ENGINE_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, ENGINE_NICENESS)
    if os.getsid(0) == os.getpid():
        return
    # Ray makes each worker the leader of a process group, who may not leave it.
    if os.getpgid(0) == os.getpid():
        os.setpgid(0, os.getpgid(os.getppid()))
    os.setsid()  # and leads a group of processes by the same number as before


def niceness() -> int:
    """Of this process, -20 to 19."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def has_groups() -> bool:
    """Whether the kernel makes a scheduling group of each session."""
    try:
        return _SWITCH.read_text().strip() == "1" and _GROUP.exists()
    except OSError:
        return False


def group_niceness() -> int | None:
    """Of the group of this process's session, -20 to 19; None where sessions are no groups."""
    if not has_groups():
        return None
    try:
        return int(_GROUP.read_text().rsplit(maxsplit=1)[-1])
    except (OSError, ValueError, IndexError):
        return None


def yield_as_group() -> str | None:
    """Put the scheduling group of this engine behind others; None when that is done, else why it is not.

    Call it when the engine is ready: on a busy machine a start that comes last takes longer than anybody waits.
    It may take `GROUP_PATIENCE_S`: from users without privileges the kernel takes such a change every 0.1 s, from
    all of them together, and engines get ready at once.
    """
    if not has_groups():
        return "the kernel makes no scheduling group of a session (kernel.sched_autogroup_enabled)"
    if os.getsid(0) != os.getpid():
        return "it has no session of its own"
    give_up_at_s = time.monotonic() + GROUP_PATIENCE_S
    while True:
        try:
            _GROUP.write_text(str(GROUP_NICENESS))
        except BlockingIOError as error:  # EAGAIN
            if time.monotonic() > give_up_at_s:
                return f"{_GROUP}: {error.strerror}, for {GROUP_PATIENCE_S:g} s"
            time.sleep(random.uniform(0.05, 0.15))
        except OSError as error:
            return f"{_GROUP}: {error.strerror}"
        else:
            return None
