"""Where a lab listens when nothing else is said."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
GATEWAY_PORT = 8000
GATEWAY_URL = f"http://{LOOPBACK}:{GATEWAY_PORT}"


def server_root(url: str) -> str:
    """A server's base URL without the `/v1` that people add, as OpenAI's clients have it, and without a slash."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def without_secrets(url: str) -> str:
    """A URL as errors may show it: without user and password, query and fragment, any of which may be a key."""
    return re.sub(r"//[^/]*@", "//", re.split(r"[?#]", url)[0])


def server_url_fault(url: str) -> str | None:
    """Why requests cannot go to a server's base URL; None when they can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return "must begin with http:// or https:// and name a host"
    if parts.username is not None or parts.password is not None:
        # Unlike the environment, a config is on pages, in reports and in what `tandem export` writes.
        return "must hold no user and password; api_key_env can name a key"
    if parts.query or parts.fragment:
        return "must have no query and no fragment"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "must be printable ASCII without spaces"
    if any(not 1 <= len(label) <= 63 for label in parts.hostname.removesuffix(".").split(".")):
        return "must name a host whose parts between dots have 1 to 63 characters"
    return None
