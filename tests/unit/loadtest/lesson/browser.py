"""Chromium over its debugging port: what a page looks like and what it complains about."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_S = 60.0


@dataclass
class Shown:
    """A page as it was shown once.

    Attributes:
        overflow_px: how much wider than the window the page is, or a picture's text than the picture.
        complaints: console errors, exceptions, blocked loads.
        requests: every URL that was asked for, the page's own first.
    """

    width_px: int
    drawn: int
    overflow_px: int
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    png: bytes = b""


class Browser:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._serial = 0
        self._events: list[dict[str, Any]] = []

    def show(self, page: Path, width_px: int, scheme: str, media: str = "screen") -> Shown:
        """Open the page at a width, light or dark, and wait until its pictures are drawn.

        Args:
            media: `screen`, or `print` for what would be printed.
        """
        self._events.clear()
        for domain in ("Page", "Log", "Runtime", "Network"):
            self._call(f"{domain}.enable")
        size = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)
        self._call("Page.navigate", url=page.as_uri())
        give_up_at_s = time.monotonic() + LIMIT_S
        count = "document.querySelectorAll('.chart').length"
        drawn = "document.querySelectorAll('.chart svg').length"
        while not self.value(
            f"document.readyState == 'complete' && document.title != '' && {count} == {drawn}"
        ):
            assert time.monotonic() < give_up_at_s, self.value("document.body.innerText")
        overflow = "document.documentElement.scrollWidth - window.innerWidth"
        # A wide picture scrolls in its own box, which also is overflow.
        wider = "[...document.querySelectorAll('.chart')].map(box => box.scrollWidth - box.clientWidth)"
        cut = (
            "[...document.querySelectorAll('.chart svg text')].map(text => Math.ceil("
            "text.getBoundingClientRect().right - text.closest('svg').getBoundingClientRect().right))"
        )
        boxes = f"Math.max(0, ...{wider}, ...{cut})"
        shown = Shown(width_px, self.value(drawn), max(self.value(overflow), self.value(boxes)))
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        shown.png = base64.b64decode(shot["data"])
        for event in self._events:
            match event["method"]:
                case "Log.entryAdded":
                    shown.complaints.append(event["params"]["entry"]["text"])
                case "Runtime.exceptionThrown":
                    shown.complaints.append(str(event["params"]["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if event["params"]["type"] in ("error", "warning"):
                    shown.complaints.append(str(event["params"]["args"]))
                case "Network.requestWillBeSent":
                    shown.requests.append(event["params"]["request"]["url"])
        return shown

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get(
            "value"
        )

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._serial += 1
        self._socket.send(json.dumps({"id": self._serial, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=LIMIT_S))
            if message.get("id") == self._serial:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._events.append(message)


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium with a profile of its own, ended afterwards."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="tandem-chromium-", ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
        flags += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            [CHROMIUM, *flags, "about:blank"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=LIMIT_S) as answer:
                (url,) = [one["webSocketDebuggerUrl"] for one in json.load(answer) if one["type"] == "page"]
            with connect(url, max_size=None, proxy=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait()


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    give_up_at_s = time.monotonic() + LIMIT_S
    while not (file.is_file() and (lines := file.read_text().split())):
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        assert time.monotonic() < give_up_at_s, "chromium opened no debugging port"
        time.sleep(0.02)
    return int(lines[0])
