"""Where a lab listens when nothing else is said."""

from __future__ import annotations

LOOPBACK = "127.0.0.1"
GATEWAY_PORT = 8000
GATEWAY_URL = f"http://{LOOPBACK}:{GATEWAY_PORT}"


def server_root(url: str) -> str:
    """A server's base URL without the `/v1` that people add, as OpenAI's clients have it, and without a slash."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
