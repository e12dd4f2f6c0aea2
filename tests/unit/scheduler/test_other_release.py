"""Gateways and replicas of another release, and strangers, at the scheduler's door over a real WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from serving import __version__
from serving.core.errors import Reason, RefusedError
from serving.scheduler import channel as channel_module
from serving.scheduler import client as client_module
from serving.scheduler import protocol
from serving.scheduler.client import SchedulerClient
from serving.scheduler.protocol import BAD_HELLO, GatewayHello, ReplicaHello, encode
from serving.scheduler.service import SETTLE_S
from tests.unit.scheduler.control_plane import ENGINE, ControlPlane, control_plane, until
from tests.unit.scheduler.examples import replica, request

pytestmark = pytest.mark.anyio

OURS = protocol.PROTOCOL_VERSION
NEXT = OURS + 1
GATEWAY = GatewayHello("stranger", "127.0.0.1:9")
REPLICA = ReplicaHello(replica("stranger"), ENGINE)
# As they were before there was a version.
OLD_GATEWAY = {"type": "gateway_hello", "gateway_id": "g", "metrics_address": "127.0.0.1:9", "leases": []}
OLD_REPLICA = {"type": "replica_hello", "replica_id": "r", "lane": "batched", "strategy": "batched"}


def spoiled(hello: GatewayHello | ReplicaHello, **fields: Any) -> str:
    return json.dumps(json.loads(encode(hello)) | fields)


@pytest.mark.parametrize(
    ("hello", "kind", "theirs"),
    [
        (spoiled(GATEWAY, protocol_version=1), "gateway_hello", "1"),
        (spoiled(REPLICA, protocol_version=1), "replica_hello", "1"),
        (spoiled(GATEWAY, protocol_version=0), "gateway_hello", "0"),
        (json.dumps(OLD_GATEWAY), "gateway_hello", "none"),
        (json.dumps(OLD_REPLICA), "replica_hello", "none"),
        (spoiled(GATEWAY, protocol_version=NEXT, leases={}, region="north"), "gateway_hello", str(NEXT)),
        ('{"type": "replica_hello", "protocol_version": "2b", "name": "r"}', "replica_hello", "'2b'"),
        ('{"type": "salute", "protocol_version": 9}', "salute", "9"),
    ],
)
async def test_a_hello_of_another_version_is_refused_with_both_versions(
    hello: str, kind: str, theirs: str, caplog: pytest.LogCaptureFixture
) -> None:
    reason = (
        f"{kind} of control protocol {theirs}, but this scheduler (tandem {__version__}) speaks {OURS}: "
        "start all from one release"
    )
    async with control_plane() as plane:
        assert await answer_to(plane, hello) == (BAD_HELLO, reason)
        assert plane.status["gateways"] == []
        assert plane.service.replicas() == []
    assert f"control channel from 127.0.0.1: {reason}" in caplog.messages


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "truncated"),
        ("GET / HTTP/1.1", "malformed"),
        ("[1, 2]", "Expected `object`"),
        ('{"leases": []}', "`type`"),
        ('{"type": 7}', "`$.type`"),
        ('{"type": "withdraw", "request_id": "a"}', "must be a hello, got withdraw"),
        (f'{{"type": "submit", "protocol_version": {OURS}}}', "protocol_version"),
        (spoiled(GATEWAY, protocol_version=True), "control protocol True"),
        (spoiled(GATEWAY, gateway_id=None), "gateway_id"),
        (spoiled(GATEWAY, region="north"), "region"),
        (spoiled(GATEWAY, **{"é" * 200: 1}), "unknown field"),
        (spoiled(REPLICA, info={}), "replica_id"),
    ],
)
async def test_what_is_no_hello_is_refused(said: str, reason: str) -> None:
    async with control_plane() as plane, plane.replica("r1"), plane.client() as client:
        code, text = await answer_to(plane, said)
        assert code == BAD_HELLO
        assert reason in text
        async with client.lease(request("a")):
            assert plane.status["gateways"] == ["g"]


async def answer_to(plane: ControlPlane, said: str) -> tuple[int, str]:
    """Code and reason with which the scheduler closes a channel that begins so."""
    async with plane.connected() as socket:
        await socket.send_str(said)
        frame = await socket.receive(timeout=20)
        assert frame.type is aiohttp.WSMsgType.CLOSE, frame
        return frame.data, str(frame.extra)


# A real gateway; that of a replica is in tests/unit/engines/test_replica.py.


@contextlib.asynccontextmanager
async def refused_client(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SchedulerClient]:
    """A gateway's client beside a scheduler that has become one of another release."""
    monkeypatch.setattr(protocol, "PROTOCOL_VERSION", NEXT)
    client = SchedulerClient("g", "127.0.0.1:9", plane.address)
    channel = asyncio.create_task(client.run())
    try:
        yield client
        assert not channel.done(), channel
    finally:
        channel.cancel()
        await asyncio.wait([channel])


def complaints(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == logger and record.levelno >= logging.WARNING
    ]


async def test_a_refused_gateway_says_so_once_and_comes_back_to_the_right_scheduler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_module, "RECONNECT_DELAY_S", 0.001)
    monkeypatch.setattr(channel_module, "REFUSED_DELAY_S", 0.05)
    attempts = 0

    async def counted() -> str:
        nonlocal attempts
        attempts += 1
        return await found()

    async with control_plane() as plane:
        found = plane.address
        monkeypatch.setattr(plane, "address", counted)
        async with refused_client(plane, monkeypatch) as client:
            started_at_s = time.monotonic()
            await until(lambda: attempts >= 4)
            assert time.monotonic() - started_at_s >= 0.14, "three pauses"
            reason = f"control protocol {OURS}, but this scheduler (tandem {__version__}) speaks {NEXT}"
            (ours,) = complaints(caplog, channel_module.__name__)
            assert f"(tandem {__version__}, control protocol {OURS})" in ours
            assert reason in ours
            assert "trying again every 0.05 s" in ours
            (theirs,) = complaints(caplog, "serving.scheduler.service")
            assert reason in theirs
            monkeypatch.setattr(protocol, "PROTOCOL_VERSION", OURS)
            await client.wait_connected(20)
            assert plane.status["gateways"] == ["g"]


def test_a_refused_gateway_waits_longer_than_one_that_finds_no_scheduler_and_is_back_in_time() -> None:
    assert channel_module.RECONNECT_DELAY_S < channel_module.REFUSED_DELAY_S < SETTLE_S


async def test_at_a_gateway_that_is_refused_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "REFUSED_DELAY_S", 0.01)
    monkeypatch.setattr(client_module, "ALONE_LIMIT_S", 0.1)
    monkeypatch.setattr(client_module, "ALONE_TICK_S", 0.005)
    async with control_plane() as plane, refused_client(plane, monkeypatch) as client:
        with pytest.raises(TimeoutError):
            await client.wait_connected(0.05)
        with pytest.raises(RefusedError) as caught:
            async with asyncio.timeout(20), client.lease(request("a")):
                pass
        assert caught.value.reason is Reason.SCHEDULER_UNREACHABLE
        assert plane.status["waiting"] == 0
