"""A server inside somebody else's process: it ends when told, and its answers have a date."""

from __future__ import annotations

import socket

import anyio
import pytest
from starlette.applications import Starlette

from serving import http_server
from serving.http_server import serve_app
from tests.unit.scheduler.control_plane import until

pytestmark = pytest.mark.anyio


async def test_it_ends_when_it_is_told_to_and_not_at_its_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TICK_S", 3600)
    server, serving, _ = await serve_app(Starlette(), "127.0.0.1")
    assert not server.should_exit
    server.should_exit = True
    with anyio.fail_after(20):
        await serving


async def test_each_tick_renews_the_date_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "TICK_S", 0.001)
    server, serving, _ = await serve_app(Starlette(), "127.0.0.1")
    for _ in range(2):
        server.server_state.default_headers = []
        await until(lambda: "date" in [name.decode() for name, _ in server.server_state.default_headers])
    server.should_exit = True
    await serving


async def test_its_connections_send_at_once() -> None:
    """Nagle's algorithm would hold a first token back until the client has acknowledged the headers before it."""
    server, serving, address = await serve_app(Starlette(), "127.0.0.1")
    host, port = address.split(":")
    async with await anyio.connect_tcp(host, int(port)):
        await until(lambda: bool(server.server_state.connections))
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    server.should_exit = True
    await serving
