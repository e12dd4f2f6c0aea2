"""The scheduler as a service: the pure core behind a control channel, a status page and metrics.

All calls into the core are synchronous and on one event loop, so each message is one atomic step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Response, WebSocket, WebSocketDisconnect

from serving.config import LaneConfig, SchedulerConfig
from serving.core.errors import LeaseError
from serving.core.request import ReplicaVerdict, RequestEnd, SchedulingRequest
from serving.metrics.registry import CONTENT_TYPE, exposition
from serving.metrics.tenant_label import OTHER_TENANTS
from serving.scheduler.admission import Refusal
from serving.scheduler.core import Grant, SchedulerCore
from serving.scheduler.lane_costs import LaneCosts
from serving.scheduler.metrics import SchedulerMetrics
from serving.scheduler.protocol import (
    BAD_HELLO,
    BAD_MESSAGE,
    CONTROL_PATH,
    REPLACED,
    AbsentHello,
    FromScheduler,
    GatewayHello,
    Granted,
    HelloError,
    Refused,
    Release,
    ReplicaHello,
    ReplicaLeaving,
    ReplicaUpdate,
    Submit,
    ToScheduler,
    Welcome,
    Withdraw,
    decode_to_scheduler,
    encode,
    next_frame,
    read_hello,
)
from serving.scheduler.quiet_log import QuietLog

logger = logging.getLogger(__name__)
MAX_TENANTS_SHOWN = 20
TICK_S = 0.25
MAX_CLOSE_REASON_BYTES = 123  # a close frame holds no more
SETTLE_S = 3.0  # gateways and replicas notice a lost scheduler at once and retry several times a second


@dataclass(eq=False)
class _Gateway:
    """A connected gateway: its outbox, and the requests it has waiting or running here."""

    hello: GatewayHello
    outbox: asyncio.Queue[str]
    requests: set[str]

    def tell(self, message: FromScheduler) -> None:
        self.outbox.put_nowait(encode(message).decode())


@dataclass(eq=False)
class _Replica:
    """A connected replica, and the last that it was told."""

    hello: ReplicaHello
    outbox: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    told: ReplicaUpdate | None = None


class SchedulerService:
    """Holds the core, the connections, and who asked for what.

    Args:
        lane_costs: for placement `adaptive`, as the core takes them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        lanes: Sequence[LaneConfig],
        clock: Callable[[], float] = time.monotonic,
        settle_s: float = SETTLE_S,
        lane_costs: LaneCosts | None = None,
    ) -> None:
        self._clock = clock
        self._config = config
        self._lanes = lanes
        self._core = SchedulerCore(config, settled_at_s=clock() + settle_s, lane_costs=lane_costs)
        self._settle_s = settle_s
        self._gateways: set[_Gateway] = set()
        self._owner_of: dict[str, _Gateway] = {}
        self._replicas: dict[str, _Replica] = {}
        self._absent: dict[tuple[str, str], AbsentHello] = {}  # by lane and URL
        self._has_grace = True
        self._faults = QuietLog(logger)
        self.metrics = SchedulerMetrics(self._core, config, lanes, clock)

    # Connections

    async def serve_connection(self, socket: WebSocket) -> None:
        """Talk with one gateway or replica until it leaves."""
        await socket.accept()
        try:
            first, *said_with_it = (await socket.receive_text()).split("\n")
            hello = read_hello(first)
            if isinstance(hello, GatewayHello):
                await self._serve_gateway(socket, hello, said_with_it)
            elif isinstance(hello, AbsentHello):
                await self._note_absent(socket, hello)
            else:
                await self._serve_replica(socket, hello)
        except WebSocketDisconnect:
            return
        except HelloError as error:
            await self._close(socket, BAD_HELLO, str(error))
        except msgspec.DecodeError as error:
            await self._close(socket, BAD_MESSAGE, str(error))

    async def _close(self, socket: WebSocket, code: int, reason: str) -> None:
        host = socket.client.host if socket.client else "an unknown host"
        # Whoever is refused comes back for ever: an older release several times a second.
        self._faults.log(logging.ERROR, f"control channel from {host}: {reason}")
        await socket.close(code, reason.encode()[:MAX_CLOSE_REASON_BYTES].decode(errors="ignore"))

    async def _serve_gateway(self, socket: WebSocket, hello: GatewayHello, lines: list[str]) -> None:
        for earlier in [known for known in self._gateways if known.hello.gateway_id == hello.gateway_id]:
            self._forget(earlier)  # its connection is dead, though nobody has told us yet
        gateway = _Gateway(hello, asyncio.Queue(), set())
        gateway.tell(Welcome())
        self._gateways.add(gateway)
        # It may have come back sooner than the replicas that the same fault cut off.
        self._core.expect_back(self._clock() + self._settle_s)
        for lease in hello.leases:
            self._core.adopt(lease)
            self._own(gateway, lease.request_id)
        self._dispatch()  # into the room of what it held before and holds no more
        logger.info("gateway %s connected with %d leases", hello.gateway_id, len(hello.leases))
        writer = asyncio.create_task(self._write(socket, gateway.outbox))
        try:
            while gateway in self._gateways:
                for line in lines:
                    self._handle(gateway, decode_to_scheduler(line))
                lines = (await socket.receive_text()).split("\n")
            # It has connected anew: what it said here before is given back, and nobody would release more.
            await socket.close(REPLACED, "this gateway has a newer connection")
        finally:
            writer.cancel()
            if gateway in self._gateways:
                self._forget(gateway)
                self._dispatch()

    async def _write(self, socket: WebSocket, outbox: asyncio.Queue[str]) -> None:
        while True:
            await socket.send_text(await next_frame(outbox))

    async def _serve_replica(self, socket: WebSocket, hello: ReplicaHello) -> None:
        info = hello.info
        try:
            self._core.replica_ready(info)
        except ValueError as error:  # of another config than this scheduler's, such as during an update
            raise HelloError(str(error)) from None
        replica = self._replicas[info.replica_id] = _Replica(hello)
        logger.info("replica %s of lane %s is ready at %s", info.replica_id, info.lane, info.url)
        self._dispatch()
        writer = asyncio.create_task(self._write(socket, replica.outbox))
        has_left = False
        try:
            while True:
                message = decode_to_scheduler(await socket.receive_text())
                if self._replicas.get(info.replica_id) is not replica:
                    await socket.close(REPLACED, "this replica has a newer connection")
                    return
                if isinstance(message, ReplicaLeaving):
                    logger.info("replica %s of lane %s is leaving", info.replica_id, info.lane)
                    self._core.replica_gone(info.replica_id)
                    has_left = True
        finally:
            writer.cancel()
            # A replica that reconnected is announced by its new connection; the end of the old one says nothing.
            if self._replicas.get(info.replica_id) is replica:
                del self._replicas[info.replica_id]
                if not has_left:
                    logger.warning("replica %s of lane %s is gone", info.replica_id, info.lane)
                    self._core.replica_gone(info.replica_id)
                    self._core.expect_back(self._clock() + self._settle_s)

    async def _note_absent(self, socket: WebSocket, hello: AbsentHello) -> None:
        """Show that a server cannot serve, and why, until the connection closes."""
        key = hello.lane, hello.url
        self._absent[key] = hello
        logger.warning("server %s of lane %s is away: %s", hello.url, hello.lane, hello.why)
        try:
            await socket.receive_text()
            await socket.close(BAD_MESSAGE, "nothing follows an absent_hello")
        finally:
            if self._absent.get(key) is hello:  # else a newer connection has said why
                del self._absent[key]

    def _forget(self, gateway: _Gateway) -> None:
        """Give back all that a gateway held: without it, its streams are gone too."""
        logger.info("gateway %s left with %d requests", gateway.hello.gateway_id, len(gateway.requests))
        self._gateways.discard(gateway)
        for request_id in gateway.requests:
            del self._owner_of[request_id]
            self._core.withdraw(request_id, self._clock())

    # Requests

    def _handle(self, gateway: _Gateway, message: ToScheduler) -> None:
        """Do what a gateway says, then place what now can be placed: the newcomer, or whoever has room by it."""
        match message:
            case Submit(request):
                self._submit(gateway, request)
            case Release(request_id, end):
                self._release(gateway, request_id, end)
            case Withdraw(request_id):
                self._disown(request_id)
                self._core.withdraw(request_id, self._clock())
            case _:
                logger.error("gateway %s sent a %s", gateway.hello.gateway_id, type(message).__name__)
        self._dispatch()

    def _submit(self, gateway: _Gateway, request: SchedulingRequest) -> None:
        """Queue it or refuse it; `_dispatch`, which follows every message, is what places it."""
        if refusal := self._core.submit(request, self._clock()):
            self._refuse(gateway, request.request_id, refusal)
        else:
            self._own(gateway, request.request_id)

    def _release(self, gateway: _Gateway, request_id: str, end: RequestEnd) -> None:
        self._disown(request_id)
        try:
            lease = self._core.release(request_id, self._clock(), end)
        except LeaseError as error:
            # A fault in the gateway must be seen, and must not take the scheduler down.
            self.metrics.lease_errors.inc()
            logger.error("gateway %s: %s", gateway.hello.gateway_id, error)
            return
        if end.verdict is ReplicaVerdict.DIED:
            logger.error(
                "replica %s died with request %s in its first step; that request is not run again",
                lease.replica_id,
                request_id,
            )

    def _dispatch(self) -> None:
        """Tell the gateways of each request that the core has placed."""
        for grant in self._core.dispatch(self._clock()):
            self._grant(grant)

    def _grant(self, grant: Grant) -> None:
        self.metrics.granted(grant)
        request_id = grant.lease.request_id
        self._owner_of[request_id].tell(
            Granted(
                request_id,
                grant.replica.replica_id,
                grant.replica.lane,
                grant.replica.url,
                grant.replica.server,
                grant.choice,
            )
        )

    def _refuse(self, gateway: _Gateway, request_id: str, refusal: Refusal) -> None:
        gateway.tell(Refused(request_id, refusal.reason, refusal.message, refusal.retry_after_s))

    def _own(self, gateway: _Gateway, request_id: str) -> None:
        gateway.requests.add(request_id)
        self._owner_of[request_id] = gateway

    def _disown(self, request_id: str) -> None:
        if gateway := self._owner_of.pop(request_id, None):
            gateway.requests.discard(request_id)

    # Time, drain, state

    async def tick_forever(self) -> None:
        """What only the passing of time brings: requests that waited too long, the end of settling."""
        while True:
            await asyncio.sleep(TICK_S)
            for waiting, refusal in self._core.expire(self._clock()):
                request_id = waiting.request.request_id
                gateway = self._owner_of[request_id]
                self._disown(request_id)
                self._refuse(gateway, request_id, refusal)
            self._dispatch()
            self._update_replicas()

    def _update_replicas(self) -> None:
        """Tell each replica what it does not know yet."""
        demands = self._core.demand_tokens()
        for replica_id, replica in self._replicas.items():
            update = ReplicaUpdate(demands.get(replica_id, 0), self._has_grace)
            if update != replica.told:
                replica.told = update
                replica.outbox.put_nowait(encode(update).decode())

    async def drain(self) -> bool:
        """Take no new requests and wait until those that run or wait have ended; False when some were left."""
        self._core.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                while self._core.num_leases or self._core.num_waiting:  # noqa: ASYNC110 - once in a lab's life
                    await asyncio.sleep(0.05)
        # Replicas that stop after this need not wait for streams once more.
        self._has_grace = False
        self._update_replicas()
        return not (self._core.num_leases or self._core.num_waiting)

    def status(self) -> dict[str, Any]:
        """The scheduler's state for people and programs; the JSON of `GET /scheduler`."""
        by_tenant = self._most_waiting_tenants()
        waiting = self._waiting(by_tenant)
        lanes: dict[str, dict[str, Any]] = {
            lane.name: {
                "lane": lane.name,
                "strategy": lane.strategy,
                "wanted_replicas": lane.replicas,
                "waiting": waiting.get(lane.name, []),
                "replicas": [],
                "absent": [
                    {"url": absent.url, "why": absent.why}
                    for absent in self._absent.values()
                    if absent.lane == lane.name
                ],
            }
            for lane in self._lanes
        }
        now_s = self._clock()
        for replica in self._core.replicas():
            lanes[replica.info.lane]["replicas"].append(
                {
                    "replica": replica.info.replica_id,
                    "ready": True,
                    "breaker": replica.breaker.state(now_s),
                    "failures_in_a_row": replica.breaker.failures,
                    "running": replica.load.running,
                    "running_sequences": replica.load.sequences,
                    "max_running": replica.info.max_running,
                    "outstanding_tokens": replica.load.outstanding_tokens,
                    "url": replica.info.url,
                }
            )
        ready = {replica.info.replica_id for replica in self._core.replicas()}
        return {
            "draining": self._core.is_draining,
            "leaving_replicas": sorted(self._replicas.keys() - ready),
            "order": self._config.order,
            "placement": self._config.placement,
            "adaptive": self._adaptive(),
            "waiting": self._core.num_waiting,
            "waiting_any": waiting.get(None, []),
            "waiting_by_band": self._core.waiting_by_band(),
            "waiting_by_tenant": by_tenant,
            "leases": self._core.num_leases,
            "gateways": sorted(gateway.hello.gateway_id for gateway in self._gateways),
            "lanes": list(lanes.values()),
            "refusals": {str(reason): count for reason, count in self._core.refusals.items()},
            "last_refusals": [
                {
                    "seconds_ago": round(now_s - note.at_s, 1),
                    "reason": note.reason,
                    "tenant": note.tenant,
                    "lane": note.lane,
                }
                for note in reversed(self._core.last_refusals)
            ],
        }

    def _adaptive(self) -> dict[str, Any] | None:
        """What placement `adaptive` chose and expects; None under another."""
        adaptive = self._core.adaptive
        if adaptive is None:
            return None
        return {
            "margin": self._config.placement_margin,
            "choices": [
                {"lane": lane, "kind": kind, "why": why, "requests": count}
                for (lane, kind, why), count in sorted(adaptive.choices.items())
            ],
            "last_choices": [
                asdict(choice) | {"header": str(choice)} for choice in reversed(adaptive.last_choices)
            ],
            "corrections": [asdict(correction) for correction in adaptive.corrections.all()],
            "accepted_tokens": [
                {"lane": lane, "kind": kind, "predicted": sums.predicted, "observed": sums.observed}
                for (lane, kind), sums in sorted(adaptive.accepted.items())
            ],
        }

    def _most_waiting_tenants(self) -> dict[str, int]:
        """The tenants with the most waiting requests; the rest are summed as `other`."""
        counts = Counter(self._core.waiting_by_tenant())
        shown = dict(counts.most_common(MAX_TENANTS_SHOWN))
        rest = counts.total() - sum(shown.values())
        return shown | ({OTHER_TENANTS: rest} if rest else {})

    def _waiting(self, shown_tenants: Mapping[str, int]) -> dict[str | None, list[dict[str, Any]]]:
        """Who waits, by pinned lane; None for those that wait for any. The tenants not shown are taken together."""
        merged: dict[tuple[str | None, str, str], Counter[str]] = defaultdict(Counter)
        for group in self._core.waiting_groups():
            tenant = group.tenant if group.tenant in shown_tenants else OTHER_TENANTS
            merged[group.lane, group.band, tenant] += Counter(requests=group.requests, tokens=group.tokens)
        by_lane: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
        for (lane, band, tenant), counts in merged.items():
            by_lane[lane].append({"band": band, "tenant": tenant, **counts})
        return dict(by_lane)

    def replicas(self) -> list[dict[str, Any]]:
        """What each ready replica said about its engine."""
        return [
            {
                "replica": hello.info.replica_id,
                "lane": hello.info.lane,
                "strategy": hello.info.strategy,
                "url": hello.info.url,
                "server": hello.info.server.url if hello.info.server else None,
                "served_model": hello.info.server.model if hello.info.server else None,
                "lacks": list(hello.engine.lacks),
                "engine": hello.engine.name,
                "engine_version": hello.engine.version,
                "has_model": hello.engine.has_model,
                "niceness": hello.engine.niceness,
                "group_niceness": hello.engine.group_niceness,
                "dtype": hello.engine.dtype,
                "device": hello.engine.device,
                "arguments": list(hello.engine.arguments),
                "tokenizer": hello.engine.tokenizer,
                "max_step_tokens": hello.engine.max_step_tokens,
                "kv_tokens": hello.engine.kv_tokens,
            }
            for hello in (replica.hello for replica in self._replicas.values())
        ]

    def targets(self, own_address: str) -> list[dict[str, Any]]:
        """Every process that serves `/metrics`, in Prometheus' HTTP service discovery format."""
        targets = [{"targets": [own_address], "labels": {"role": "scheduler"}}]
        targets += [
            {
                "targets": [gateway.hello.metrics_address],
                "labels": {"role": "gateway", "gateway": gateway.hello.gateway_id},
            }
            for gateway in self._gateways
        ]
        targets += [
            {
                "targets": [hello.info.url.removeprefix("http://")],
                "labels": {"role": "replica", "lane": hello.info.lane, "replica": hello.info.replica_id},
            }
            for hello in (replica.hello for replica in self._replicas.values())
        ]
        return targets


async def _no_targets() -> list[dict[str, Any]]:
    return []


def build_scheduler_app(
    service: SchedulerService,
    own_address: Callable[[], str],
    node_targets: Callable[[], Awaitable[list[dict[str, Any]]]] = _no_targets,
) -> FastAPI:
    """The scheduler's HTTP application.

    Args:
        own_address: host:port it is served at, known once it listens.
        node_targets: what serves metrics of the cluster's nodes, as `/targets` lists it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        ticking = asyncio.create_task(service.tick_forever())
        yield
        ticking.cancel()

    app = FastAPI(openapi_url=None, lifespan=lifespan)

    # All routes are coroutines: the core is not for two threads.

    @app.websocket(CONTROL_PATH)
    async def control(socket: WebSocket) -> None:
        await service.serve_connection(socket)

    @app.get("/scheduler")
    async def status() -> dict[str, Any]:
        return service.status()

    @app.get("/replicas")
    async def replicas() -> list[dict[str, Any]]:
        return service.replicas()

    @app.get("/targets")
    async def targets() -> list[dict[str, Any]]:
        return [*service.targets(own_address()), *await node_targets()]

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(service.metrics.registry), media_type=CONTENT_TYPE)

    return app
