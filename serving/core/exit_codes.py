"""Exit codes: what `tandem --help` promises, and the clients that its verbs run keep."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """How a verb or a client ended."""

    OK = 0
    FAILED = 1
    USAGE = 2  # or a config, or a damaged run
    NOT_RUNNING = 3  # no lab, or one that cannot be reached
    ALREADY_RUNNING = 4
    INVALID = 5  # all is written, but some of the figures may not be used
    INTERRUPTED = 130


SIGNALLED = 128  # plus the number of the signal, as shells have it: 130 for Ctrl-C
# Of Locust by hand, which has 1 for requests that failed and 2 for wrong usage: the load was not offered as asked.
LOAD_FAILED = 3
