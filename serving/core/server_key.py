"""The API key that the lab shows to a server that somebody else runs: from the environment and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping

from serving.core.client_key import SENDABLE
from serving.core.errors import ConfigError


def server_key(variable: str | None, setting: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key in the environment variable; None when none is named.

    Args:
        setting: that names the variable, for errors.

    Raises:
        ConfigError: the variable is not set, or no header can carry what it holds. The text does not show it.
    """
    if variable is None:
        return None
    if not (key := environment.get(variable)):
        raise ConfigError(f"{setting} = {variable!r}: this environment variable is not set")
    if not SENDABLE.fullmatch(key):
        raise ConfigError(f"{setting} = {variable!r}: its value must be printable ASCII without spaces")
    return key
