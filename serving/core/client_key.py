"""The API key that this machine's own clients show to a gateway: the verbs of `tandem`, and the load client.

`TANDEM_API_KEY` and not `OPENAI_API_KEY`: a key for somebody else's service has no business at every address
that is measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from serving.core.errors import ConfigError

CLIENT_KEY_VARIABLE = "TANDEM_API_KEY"
KEY_HINT = f"it asks for an API key ({CLIENT_KEY_VARIABLE})"  # for a client that was answered 401
SENDABLE = re.compile(r"[\x21-\x7e]+")


def client_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """The key; None when none is set.

    Raises:
        ConfigError: no header can carry it. The text does not show it.
    """
    key = environment.get(CLIENT_KEY_VARIABLE) or None
    if key is not None and not SENDABLE.fullmatch(key):
        raise ConfigError(f"{CLIENT_KEY_VARIABLE} must be printable ASCII without spaces")
    return key


def key_headers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The header that shows the key, for requests to the gateway and to no other address.

    Raises:
        ConfigError: no header can carry the key.
    """
    key = client_key(environment)
    return {} if key is None else {"authorization": f"Bearer {key}"}
