"""Which API keys open the gateway: from a file, one a line, and from the environment of its node.

Keys are told apart from guesses by their digests, all of them looked at each time, so that neither a key's length
nor its place in the list can be measured from outside.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from serving.config import GatewayConfig
from serving.core.errors import ConfigError

KEYS_VARIABLE = "TANDEM_API_KEYS"
MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 256
MAX_KEYS = 1000
KEY = re.compile(rf"[\x21-\x7e]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
BEARER = re.compile(rb"bearer +([\x21-\x7e]+) *", re.IGNORECASE)


class ApiKeys:
    """The keys that open the gateway, as digests; without any it is open to whoever reaches it."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    @property
    def are_needed(self) -> bool:
        """Whether a client needs one."""
        return bool(self._digests)

    def accept(self, authorization: bytes) -> bool:
        """Whether the value of an `Authorization` header shows one of the keys."""
        bearer = BEARER.fullmatch(authorization)
        given = _digest(bearer[1] if bearer else b"")
        is_known = False
        for digest in self._digests:
            is_known |= hmac.compare_digest(digest, given)
        return is_known


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def are_configured(config: GatewayConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the config or the environment names keys."""
    return config.api_keys_file is not None or bool(environment.get(KEYS_VARIABLE))


def read_keys(config: GatewayConfig, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """The keys of `gateway.api_keys_file` and those of `TANDEM_API_KEYS`, together.

    Raises:
        ConfigError: the file cannot be read or can be read by everybody, holds no key, or a key is out of bounds.
            The text gives the place and never the key.
    """
    keys: list[str] = []
    if config.api_keys_file is not None:
        keys += _from_file(Path(config.api_keys_file))
    if given := environment.get(KEYS_VARIABLE):
        keys += _checked(enumerate(map(str.strip, given.split(",")), 1), f"{KEYS_VARIABLE}: key")
    if len(keys) > MAX_KEYS:
        raise ConfigError(
            f"{len(keys)} API keys; at most {MAX_KEYS} (gateway.api_keys_file, {KEYS_VARIABLE})"
        )
    return ApiKeys(keys)


def _from_file(path: Path) -> list[str]:
    if path.is_fifo() or path.is_char_device():
        # Never read: a pipe waits for its writer, /dev/zero has no end, and several gateways read the keys.
        raise ConfigError(f"gateway.api_keys_file = {path}: is not a file")
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"gateway.api_keys_file = {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"gateway.api_keys_file = {path}: not text in UTF-8") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        what = "read" if mode & stat.S_IROTH else "write"
        raise ConfigError(
            f"gateway.api_keys_file = {path}: mode {mode:04o} lets everybody on this machine {what} it; "
            f"chmod o-rw {path}"
        )
    numbered = enumerate(map(str.strip, lines), 1)
    keys = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"gateway.api_keys_file = {path}: holds no key; one a line, comments begin with #")
    return _checked(keys, f"gateway.api_keys_file = {path}: line")


def _checked(keys: Iterable[tuple[int, str]], place: str) -> list[str]:
    checked = []
    for number, key in keys:
        if not KEY.fullmatch(key):
            raise ConfigError(
                f"{place} {number}: a key must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters "
                f"without spaces; this one has {len(key)}"
            )
        checked.append(key)
    return checked
