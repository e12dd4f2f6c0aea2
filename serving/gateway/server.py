"""The gateway's socket: several gateways of one machine share its port, and one that leaves loses no connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from serving.core.errors import TandemError
from serving.gateway.http_protocol import Door, GatewayProtocol
from serving.http_server import QuietServer

BACKLOG = 4096
KEEP_ALIVE_S = 75  # longer than load balancers keep an idle connection, so that it is they who close it


def listen(host: str, port: int) -> socket.socket:
    """A socket that other gateways of this user may listen beside; the kernel spreads connections over them.

    Raises:
        TandemError: the port cannot be had; the text names the setting.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Inherited by its connections; asyncio sets it only on sockets that name TCP as their protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise TandemError(f"gateway.host={host} gateway.port={port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class GatewayServer(QuietServer):
    """uvicorn on the gateway's socket. Told to exit it takes no more connections and lets answers end."""

    def __init__(self, app: ASGIApp, listener: socket.socket, door: Door, *, drain_timeout_s: float) -> None:
        protocol = functools.partial(GatewayProtocol, door=door)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", protocol),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody here looks at a client's address
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(drain_timeout_s),  # uvicorn's are whole
            )
        )
        self._listener = listener
        self._door = door

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._door.is_draining = True
        waiting = self._stop_listening()
        loop = asyncio.get_running_loop()
        for connection in waiting:
            await loop.connect_accepted_socket(self._protocol, connection)
        await super().shutdown(sockets)

    def _stop_listening(self) -> list[socket.socket]:
        """Leave the port to the others; the connections that the kernel has made for this gateway already.

        No await: a connection made between the last look and the end would be reset.
        """
        waiting = []
        with contextlib.suppress(OSError):  # none waits any longer
            while True:
                waiting.append(self._listener.accept()[0])
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # at once, where uvloop closes in its next turn
        for server in self.servers:
            server.close()
        return waiting

    def _protocol(self) -> asyncio.Protocol:
        state = self.server_state
        return GatewayProtocol(config=self.config, server_state=state, app_state={}, door=self._door)
