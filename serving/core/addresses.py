"""Where a lab listens when nothing else is said."""

from __future__ import annotations

LOOPBACK = "127.0.0.1"
GATEWAY_PORT = 8000
GATEWAY_URL = f"http://{LOOPBACK}:{GATEWAY_PORT}"
