"""The user's home directory, below which state and models lie unless a variable says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from serving.core.errors import ConfigError


def home_dir() -> Path:
    """Where `HOME` points, else where the system's list of users has it; it need not exist.

    Raises:
        ConfigError: neither says.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            f"HOME is not set, and user {os.getuid()} has no name here to find a home directory by: "
            "set HOME to a directory of yours"
        ) from None
