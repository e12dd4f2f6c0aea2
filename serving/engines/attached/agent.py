"""Offers a server that somebody else runs to the scheduler for as long as it is well, and says why it is not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable

import aiohttp
import uvicorn

from serving.config import LaneConfig
from serving.core.errors import TandemError
from serving.core.lane import ReplicaInfo
from serving.engines.attached.page import agent_page
from serving.engines.attached.server import Examined, NoCompletionError, ServerClient, ServerError
from serving.engines.steps.log import StepLog, StepWriter
from serving.engines.steps.recorder import ReplicaLabels, StepRecorder
from serving.http_server import serve_app
from serving.scheduler.channel import keep_connected, listen
from serving.scheduler.protocol import AbsentHello, ReplicaHello, ReplicaLeaving, encode

logger = logging.getLogger(__name__)
HEALTH_PERIOD_S = 1.0
HEALTH_FAILURES = 2  # in a row; one may be a moment in which the server had no time for it
LOOKS_A_MODEL = 15  # health checks between two looks at what it serves, and whether our key still opens it
RETRY_S = 2.0
COMPLETION_RETRY_S = 20.0  # after an examination that asked for completions in vain
FIRST_LOOK_S = 120.0  # how long a start waits for each server's first examination
DISTINCT_BYTES = 4
SchedulerAddress = Callable[[], Awaitable[str]]


class ServerAgent:
    """One server's life in the lab: away or there, each said on a control channel of its own.

    Args:
        number: its place in `lanes[].urls`, for its replica's name.
    """

    def __init__(
        self, lane: LaneConfig, url: str, number: int, scheduler_address: SchedulerAddress, page_url: str = ""
    ) -> None:
        self._lane = lane
        self._url = url
        self._number = number
        self._scheduler_address = scheduler_address
        self._client = ServerClient(lane, url)
        self._channel: asyncio.Task[None] | None = None
        self._step_log = StepLog()
        # Without a writer a recording is refused, and with it that of the whole lab; this one never writes.
        self._step_writer = StepWriter(self._step_log.path)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._page_url = page_url
        self.examined_once = asyncio.Event()

    async def start(self, host: str) -> None:
        """Serve its page on a free port of `host`, and begin to look after the server."""
        name = f"{self._lane.name}-{self._number}"
        labels = ReplicaLabels(name, self._lane.name, self._lane.strategy, self._lane.engine)
        page = agent_page(self._client, self._lane.metrics, StepRecorder(self._step_log, labels))
        self._server, self._serving, address = await serve_app(page, host)
        self._page_url = f"http://{address}"
        self._living = asyncio.create_task(self.run())

    async def run(self) -> None:
        """For ever: examine, offer, watch; while it cannot serve, say why and examine again."""
        said = "not examined yet"
        await self._say(AbsentHello(self._lane.name, self._url, said))
        while True:
            try:
                found = await self._client.examine()
            except ServerError as error:
                if str(error) != said:
                    said = str(error)
                    await self._say_away(said)
                self.examined_once.set()
                in_vain = isinstance(error, NoCompletionError)
                await asyncio.sleep(COMPLETION_RETRY_S if in_vain else RETRY_S)
                continue
            await self._say_ready(found)
            self.examined_once.set()
            said = await self._until_unwell(found)
            await self._say_away(said)

    async def _until_unwell(self, found: Examined) -> str:
        """Why it must leave, once it must."""
        num_failures = num_well = 0
        while True:
            await asyncio.sleep(HEALTH_PERIOD_S)
            why = await self._client.fault(found.health)
            if why is None and (num_well + 1) % LOOKS_A_MODEL == 0:
                why = await self._change(found)
            if why is None:
                num_failures, num_well = 0, num_well + 1
            elif (num_failures := num_failures + 1) >= HEALTH_FAILURES:
                return why

    async def _change(self, found: Examined) -> str | None:
        try:
            model = (await self._client.look()).served.model
        except ServerError as error:
            return str(error)
        return (
            None
            if model == found.server.model
            else f"it serves {model} now, and no more {found.server.model}"
        )

    async def _say_ready(self, found: Examined) -> None:
        lane = self._lane
        # A new name each time: what was booked on the one that left is none of this one's.
        replica_id = f"{lane.name}-{self._number}-{secrets.token_hex(DISTINCT_BYTES)}"
        info = ReplicaInfo(
            replica_id,
            lane.name,
            lane.strategy,
            self._page_url,
            lane.max_running,
            lane.takes_unpinned,
            server=found.server,
        )
        logger.info("lane %s: server %s serves %s", lane.name, self._url, found.server.model)
        for lack in found.facts.lacks:
            logger.warning("lane %s: server %s: %s", lane.name, self._url, lack)
        await self._say(ReplicaHello(info, found.facts))

    async def _say_away(self, why: str) -> None:
        logger.warning("lane %s: server %s takes no requests: %s", self._lane.name, self._url, why)
        await self._say(AbsentHello(self._lane.name, self._url, why))

    async def _say(self, hello: ReplicaHello | AbsentHello) -> None:
        await self._end_channel()

        async def talk(channel: aiohttp.ClientWebSocketResponse) -> None:
            await channel.send_str(encode(hello).decode())
            try:
                await listen(channel, lambda _: None)
            except asyncio.CancelledError:
                if isinstance(hello, ReplicaHello):  # said, so that no request waits for it to come back
                    with contextlib.suppress(aiohttp.ClientConnectionResetError):
                        await channel.send_str(encode(ReplicaLeaving()).decode())
                raise

        self._channel = asyncio.create_task(keep_connected(self._scheduler_address, talk))

    async def _end_channel(self) -> None:
        if self._channel is not None:
            self._channel.cancel()
            await asyncio.wait([self._channel])

    def check(self) -> None:
        """Raise when it looks after its server no more, and should be replaced."""
        for task in (self._serving, self._living, self._channel):
            if task is not None and task.done():
                raise TandemError(f"a task of the agent of {self._url} ended: {task}")

    async def close(self) -> None:
        """Withdraw the server; streams on it go on without the agent."""
        if self._living is not None:
            self._living.cancel()
            await asyncio.wait([self._living])
        await self._end_channel()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait([self._serving], timeout=1)
        await self._client.__aexit__(None, None, None)
        self._step_writer.close()
        self._step_log.close()


class AttachedLane:
    """The agents of a lane's servers.

    Raises:
        ConfigError: the environment variable with their key is not set.
    """

    def __init__(self, lane: LaneConfig, scheduler_address: SchedulerAddress) -> None:
        self._agents = [
            ServerAgent(lane, url, number, scheduler_address) for number, url in enumerate(lane.urls, 1)
        ]

    async def start(self, host: str) -> None:
        """Return when each server was examined once, or after `FIRST_LOOK_S`: the lab does not wait for them."""
        for agent in self._agents:
            await agent.start(host)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                for agent in self._agents:
                    await agent.examined_once.wait()

    def check(self) -> None:
        """Raise when a server is not looked after any more."""
        for agent in self._agents:
            agent.check()

    async def close(self) -> None:
        """Withdraw all of them."""
        await asyncio.gather(*(agent.close() for agent in self._agents))
