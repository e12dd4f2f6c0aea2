"""One engine replica: an engine, its HTTP server, its warm-up, and its word to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp
import uvicorn

from serving.config import LaneConfig
from serving.core.errors import TandemError
from serving.core.lane import ReplicaInfo
from serving.core.processor_time import group_niceness, niceness, yield_as_group
from serving.engines.base import Engine
from serving.engines.cores import cores_of
from serving.engines.door import Door
from serving.engines.engine_page import with_engine_page
from serving.engines.metrics import ReplicaCollector
from serving.engines.route_filter import only_lab_routes
from serving.engines.steps.recorder import ReplicaLabels, StepRecorder
from serving.http_server import serve_app
from serving.scheduler.channel import keep_connected, listen
from serving.scheduler.protocol import ReplicaHello, ReplicaLeaving, decode_replica_update, encode
from serving.tracing.otlp import Tracing, with_engine_span

logger = logging.getLogger(__name__)
WARM_UP_TIMEOUT_S = 120
LEAVE_SETTLE_S = 0.1
WATCH_S = 0.25
CLOSE_LIMIT_S = 1.0


class EngineReplica:
    """Starts an engine, warms it, and offers it to the scheduler.

    Args:
        scheduler_address: finds the scheduler's host:port.
        drain_timeout_s: how long running streams may go on when the replica is told to stop.
        yields: its scheduling group comes behind others once it is ready.
        tracing: exports a span of each request to a collector; None when none is set.
    """

    def __init__(
        self,
        engine: Engine,
        lane: LaneConfig,
        replica_id: str,
        model_name: str,
        scheduler_address: Callable[[], Awaitable[str]],
        drain_timeout_s: float,
        *,
        yields: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._lane = lane
        self._replica_id = replica_id
        self._model_name = model_name
        self._scheduler_address = scheduler_address
        self._tasks: list[asyncio.Task[None]] = []
        self._server: uvicorn.Server | None = None
        self._door: Door | None = None
        self._drain_timeout_s = drain_timeout_s
        self._channel: aiohttp.ClientWebSocketResponse | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._has_grace = True
        self._is_leaving = False
        self._yields = yields
        self._tracing = tracing
        self.demand_tokens = 0  # the scheduler's word: booked here, and this replica's part of what waits

    async def start(self, host: str) -> str:
        """Return the base URL once the engine has answered a first request; only then may others come."""
        # Wrapped from the inside: a request meets the last wrapper first.
        app = only_lab_routes(await self._engine.start())
        if self._tracing is not None:
            app = with_engine_span(app, self._tracing)
        collector = ReplicaCollector(self._lane.name, self._replica_id, self._engine.tally)
        self._engine.registry.register(collector)
        self._door = Door(app, self._engine.check)
        paged = with_engine_page(self._door, self._engine.tally, self._recorder())
        self._server, serving, address = await serve_app(paged, host)
        self._engine.served_by(self._server)
        url = f"http://{address}"
        await self._warm_up(url)
        await collector.refresh_memory()
        if self._yields and (lack := await asyncio.to_thread(yield_as_group)):
            logger.warning("replica %s does not yield to other sessions: %s", self._replica_id, lack)
        background = (collector.keep_memory_fresh(), self._stay_announced(self._hello(url)))
        self._tasks = [serving, *map(asyncio.create_task, background)]
        self._watcher = asyncio.create_task(self._leave_when_broken())
        return url

    async def _leave_when_broken(self) -> None:
        """A dead engine answers fast, with errors: it leaves the scheduler at once, not at Serve's next look."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self.check()
            except (TandemError, RuntimeError) as error:
                logger.error("replica %s: %s; it takes no more requests", self._replica_id, error)
                await self._say_leaving()
                for task in self._tasks[1:]:
                    task.cancel()
                return

    def check(self) -> None:
        """Raise when the replica cannot serve and should be replaced."""
        self._engine.check()
        for task in self._tasks:
            if task.done():
                raise TandemError(f"a task of replica {self._replica_id} ended: {task}")

    async def close(self) -> None:
        """Leave the scheduler, let running streams end within the drain limit, end the engine."""
        await self._leave()
        if self._door is not None:
            self._door.close()
        for task in (self._watcher, *self._tasks[1:]):
            if task is not None:
                task.cancel()
        if self._server is not None:
            # Streams have had their time: whatever is still open is cut.
            self._server.should_exit = self._server.force_exit = True
        for serving in self._tasks[:1]:
            await asyncio.wait([serving], timeout=CLOSE_LIMIT_S)  # so that it closes its port itself
            serving.cancel()
        self._engine.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _say_leaving(self) -> None:
        self._is_leaving = True
        if self._channel is not None:
            # No scheduler: nobody sends requests.
            with contextlib.suppress(aiohttp.ClientConnectionResetError):
                await self._channel.send_str(encode(ReplicaLeaving()).decode())

    async def _leave(self) -> None:
        await self._say_leaving()
        if self._channel is None:
            return
        give_up_at_s = time.monotonic() + self._drain_timeout_s
        # A grant may be on its way here: look for idleness only after it can have arrived.
        await asyncio.sleep(LEAVE_SETTLE_S)
        while self._has_grace and self._num_open and time.monotonic() < give_up_at_s:  # noqa: ASYNC110
            await asyncio.sleep(LEAVE_SETTLE_S)

    @property
    def _num_open(self) -> int:
        return self._door.num_open if self._door is not None else 0

    async def _warm_up(self, url: str) -> None:
        # The first request pays for allocation and lazy set-up; no user should.
        body = {"model": self._model_name, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        timeout = aiohttp.ClientTimeout(total=WARM_UP_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=body) as response,
        ):
            if response.status != 200:
                raise TandemError(
                    f"lane {self._lane.name}: warm-up answered {response.status}: {await response.text()}"
                )

    async def _stay_announced(self, hello: ReplicaHello) -> None:
        async def talk(channel: aiohttp.ClientWebSocketResponse) -> None:
            if self._is_leaving:
                await asyncio.Future()  # a scheduler that came meanwhile must not send it anything
            self._channel = channel
            await channel.send_str(encode(hello).decode())
            await listen(channel, hear)

        def hear(text: str) -> None:
            update = decode_replica_update(text)
            self.demand_tokens, self._has_grace = update.outstanding_tokens, update.has_grace

        await keep_connected(self._scheduler_address, talk)

    def _recorder(self) -> StepRecorder:
        engine, lane = self._engine, self._lane
        return StepRecorder(
            engine.step_log, ReplicaLabels(self._replica_id, lane.name, lane.strategy, engine.facts.name)
        )

    def _hello(self, url: str) -> ReplicaHello:
        lane = self._lane
        info = ReplicaInfo(
            self._replica_id,
            lane.name,
            lane.strategy,
            url,
            lane.max_running,
            takes_unpinned=lane.unpinned_model is not None,
            model=lane.unpinned_model or "",
            cores=cores_of(lane, self._engine.facts.device, urlsplit(url).hostname or ""),
        )
        return ReplicaHello(
            info, replace(self._engine.facts, niceness=niceness(), group_niceness=group_niceness())
        )
