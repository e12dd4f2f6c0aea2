"""One connection to a server, and the instant at which each receive of it came in.

On Linux the kernel stamps arriving packets, so a client that gets to read late still knows when they came.
The kernel keeps one stamp for what one receive returns, that of the newest packet in it: where several chunks
lay unread, the earlier ones of them pass for as late as the last. Over TLS, and on other systems, this process
stamps when it reads.
"""

from __future__ import annotations

import platform
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable

MAX_RECEIVE_BYTES = 65_536

# Python 3.11 has no name for it. The number and the payload are those of 64-bit Linux on these machines.
_SO_TIMESTAMPNS = 35
_HAS_KERNEL_STAMPS = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_STAMP = struct.Struct("qq")  # s and ns of the wall clock
_ANCILLARY_BYTES = socket.CMSG_SPACE(_STAMP.size) if _HAS_KERNEL_STAMPS else 0

MAX_AGE_S = 60.0
# Two clocks are read one after the other. An order that is wrong by less than this is no stepped clock.
CLOCK_READ_ERROR_S = 0.001


class StampedConnection:
    """A connected socket. `clock` gives seconds on a monotonic clock.

    Attributes:
        arrived_at_s: when the newest data of the last receive came in, on `clock`; never before an earlier receive.
        has_kernel_stamps: whether the kernel stamped every receive so far.
        max_read_lag_s: the longest time from arrival to read; None while the kernel stamped nothing.
    """

    def __init__(self, sock: socket.socket, clock: Callable[[], float]) -> None:
        self.socket = sock
        self._clock = clock
        self._asks_kernel = _HAS_KERNEL_STAMPS and not isinstance(sock, ssl.SSLSocket)
        if self._asks_kernel:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.start(0.0)

    def start(self, now_s: float) -> None:
        """Begin a request at `now_s`: nothing of its answer can have arrived before."""
        self.arrived_at_s = now_s
        self.has_kernel_stamps = self._asks_kernel
        self.max_read_lag_s: float | None = None

    def receive(self) -> bytes:
        """What has arrived, at least one byte unless the stream has ended; sets `arrived_at_s`.

        Raises:
            TimeoutError: nothing came within the socket's timeout.
            OSError: the connection broke.
        """
        if not self._asks_kernel:
            data = self.socket.recv(MAX_RECEIVE_BYTES)
            self.arrived_at_s = max(self.arrived_at_s, self._clock())
            return data
        data, ancillary, _, _ = self.socket.recvmsg(MAX_RECEIVE_BYTES, _ANCILLARY_BYTES)
        # In this order: if the process is stopped between the two, the instant is late as its own stamp would be.
        wall_ns = time.time_ns()
        now_s = self._clock()
        if ancillary:
            seconds, nanoseconds = _STAMP.unpack(ancillary[0][2])
            self._take_kernel_stamp(now_s, (wall_ns - seconds * 1_000_000_000 - nanoseconds) * 1e-9)
        else:
            if data:  # the end of a stream is no packet with a stamp
                self.has_kernel_stamps = False
            self.arrived_at_s = max(self.arrived_at_s, now_s)
        return data

    def _take_kernel_stamp(self, now_s: float, age_s: float) -> None:
        """Note data of this age, unless a step of the wall clock made the age impossible."""
        at_s = now_s - age_s
        if 0 <= age_s <= MAX_AGE_S and at_s >= self.arrived_at_s - CLOCK_READ_ERROR_S:
            self.arrived_at_s = max(self.arrived_at_s, at_s)
            self.max_read_lag_s = max(self.max_read_lag_s or 0.0, age_s)
        else:
            self.arrived_at_s = max(self.arrived_at_s, now_s)
            self.has_kernel_stamps = False

    def is_stale(self) -> bool:
        """Whether an idle connection has something to read: its end, or what nobody asked for."""
        timeout_s = self.socket.gettimeout()
        self.socket.settimeout(0)
        try:
            # TLS cannot peek. What it reads here is lost, and so is the connection if it reads anything.
            self.socket.recv(1, 0 if isinstance(self.socket, ssl.SSLSocket) else socket.MSG_PEEK)
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self.socket.settimeout(timeout_s)
        return True

    def shut_down(self) -> None:
        """Wake whoever waits on this connection, from another thread or greenlet: it sees the end of the stream."""
        try:
            # Not the TLS socket's own method: that takes its state away under the reader's feet.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError:
            return  # the connection ended by itself first

    def close(self) -> None:
        self.socket.close()
