"""Who gets a machine's processors first: engines yield to whoever measures and routes. See docs/decisions/0008.

Linux shares a processor between scheduling groups first, and by niceness within a group. A session is a group where
the kernel groups by session (autogroup); then a lab yields to other sessions by its group's priority alone.
"""

from __future__ import annotations

import os
from pathlib import Path

ENGINE_NICENESS = 15
LAST = 19  # the lowest priority there is, of a process as of a group

_SWITCH = Path("/proc/sys/kernel/sched_autogroup_enabled")
_GROUP = Path("/proc/self/autogroup")


def yield_as_engine() -> None:
    """Make this process, and all that it starts from now on, as nice as engines are; never less nice than it is."""
    if niceness() < ENGINE_NICENESS:
        os.setpriority(os.PRIO_PROCESS, 0, ENGINE_NICENESS)


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


def yield_as_session() -> str | None:
    """Put the group of this process's session behind all others; None when that is done, else why it is not.

    Only the leader of a session does: the others would take their terminal with them, for good.
    """
    if not has_groups():
        return "the kernel makes no scheduling group of a session (kernel.sched_autogroup_enabled)"
    if os.getsid(0) != os.getpid():
        return "it runs in the session of a terminal; `tandem up --detach` gives it one of its own"
    try:
        _GROUP.write_text(str(LAST))
    except OSError as error:
        return f"{_GROUP}: {error.strerror}"
    return None
