"""Instants of arrival, on a connection of this process to itself."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from loadtest.client.connection import StampedConnection

LATE_S = 0.05

pytestmark = pytest.mark.usefixtures("kernel_stamps")


@contextlib.contextmanager
def connected(clock_offset_s: float = 0.0) -> Iterator[tuple[socket.socket, StampedConnection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = socket.create_connection(listener.getsockname(), timeout=5)
        writer, _ = listener.accept()
        connection = StampedConnection(reader, lambda: time.perf_counter() + clock_offset_s)
        with writer:
            connection.start(time.perf_counter() + clock_offset_s)
            yield writer, connection
        connection.close()


def test_a_reader_that_comes_late_knows_when_the_data_came() -> None:
    with connected() as (writer, connection):
        for number in range(1, 4):
            sent_at_s = time.perf_counter()
            writer.sendall(b"x")
            time.sleep(LATE_S)  # the reader is busy elsewhere
            assert connection.receive() == b"x"
            assert connection.arrived_at_s - sent_at_s < LATE_S / 2, number
            assert connection.arrived_at_s >= sent_at_s - 0.001
    assert connection.has_kernel_stamps
    assert connection.max_read_lag_s is not None
    assert connection.max_read_lag_s >= LATE_S


def test_instants_are_on_the_given_clock() -> None:
    with connected(clock_offset_s=1000) as (writer, connection):
        writer.sendall(b"x")
        connection.receive()
        assert connection.arrived_at_s == pytest.approx(time.perf_counter() + 1000, abs=1)


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_stepped_wall_clock_moves_no_instant(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time_ns
    with connected() as (writer, connection):
        writer.sendall(b"x")
        monkeypatch.setattr("loadtest.client.connection.time.time_ns", lambda: real() + int(step_s * 1e9))
        before_s = time.perf_counter()
        connection.receive()
        assert before_s <= connection.arrived_at_s <= time.perf_counter()
    assert not connection.has_kernel_stamps


def test_the_end_of_a_stream_is_no_unstamped_data() -> None:
    with connected() as (writer, connection):
        writer.sendall(b"x")
        connection.receive()
        writer.shutdown(socket.SHUT_WR)
        assert connection.receive() == b""
    assert connection.has_kernel_stamps
