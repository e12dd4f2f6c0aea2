from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import pytest

from loadtest.client.connection import StampedConnection
from tests.unit.loadtest.lesson.browser import CHROMIUM, Browser, browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    """A page of Chromium's, to look at what a report or a lesson shows."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    with browser() as opened:
        yield opened


@pytest.fixture
def kernel_stamps() -> Iterator[None]:
    """The kernel stamps packets from the first one on.

    It does so while some socket asks for it, and begins a moment after the first one has asked.
    """
    if sys.platform != "linux":
        pytest.skip("other kernels do not stamp what they receive")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = StampedConnection(socket.create_connection(listener.getsockname(), 5), time.perf_counter)
        writer, _ = listener.accept()
        with writer:
            deadline_s = time.perf_counter() + 5
            while connection.max_read_lag_s is None and time.perf_counter() < deadline_s:
                writer.sendall(b"x")
                connection.receive()
            yield
        connection.close()
