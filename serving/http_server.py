"""An HTTP server inside a process that belongs to somebody else: a free port, no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from serving.core.errors import TandemError

PING_S = 5.0
PING_TIMEOUT_S = 10.0
TICK_S = 1.0  # a response's date is in whole seconds


class QuietServer(uvicorn.Server):
    """uvicorn on a given socket, without signal handlers: the process belongs to Ray.

    It hears of `should_exit` at once, where uvicorn looks every 0.1 s.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._told_to_exit = asyncio.Event()
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether to stop serving; set it on the server's own event loop."""
        return self._told_to_exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._told_to_exit.set()
        else:
            self._told_to_exit.clear()

    async def main_loop(self) -> None:
        # uvicorn makes a new date header in its ticks of 0, 10, 20 and so on.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told_to_exit.wait(), TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_app(app: ASGIApp, host: str) -> tuple[uvicorn.Server, asyncio.Task[None], str]:
    """Serve an application on a free port of `host` until the server is told to exit; also its host:port."""
    listener = socket.create_server((host, 0), backlog=2048)
    # Each connection inherits it. Else, on asyncio's own event loop, a first token waits up to 40 ms behind its
    # headers: asyncio sets it on sockets that name their protocol only, and what this listener accepts names none.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        # A peer behind a broken network sends nothing, not even an end.
        ws_ping_interval=PING_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        timeout_keep_alive=60,
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            raise TandemError(f"the HTTP server on {host} did not start: {task.exception()}")
        await asyncio.sleep(0.01)
    return server, task, f"{host}:{listener.getsockname()[1]}"
