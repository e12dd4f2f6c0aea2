"""A gateway's side of the control channel: `async with client.lease(request) as grant`.

The channel reconnects by itself. Requests that wait when it breaks are submitted again on the next connection,
and leases that are held are reported, so a scheduler that restarts knows the load before it places anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import aiohttp

from serving.core.errors import Reason, RefusedError
from serving.core.request import Lease, RequestEnd, SchedulingRequest
from serving.scheduler.channel import keep_connected, listen
from serving.scheduler.protocol import (
    FromScheduler,
    GatewayHello,
    Granted,
    Refused,
    Release,
    Submit,
    ToScheduler,
    Welcome,
    Withdraw,
    decode_from_scheduler,
    encode,
    next_frame,
)

ALONE_LIMIT_S = 15.0
ALONE_TICK_S = 0.5


@dataclass(eq=False)
class _Pending:
    """A request that waits; whoever has its answer, `_settle` or a refusal of our own, puts it into the future."""

    request: SchedulingRequest
    since_s: float = field(default_factory=time.monotonic)
    answer: asyncio.Future[Granted] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass
class HeldReplica:
    """A granted lease, and what its holder has to say when it ends."""

    granted: Granted
    granted_at_s: float  # monotonic
    end: RequestEnd = field(default_factory=RequestEnd)


class SchedulerClient:
    """Leases for one gateway.

    Args:
        gateway_id: unique over the cluster's life.
        metrics_address: host:port where the gateway serves `/metrics`.
        address: finds the scheduler.
    """

    def __init__(self, gateway_id: str, metrics_address: str, address: Callable[[], Awaitable[str]]) -> None:
        self._gateway_id = gateway_id
        self._metrics_address = metrics_address
        self._address = address
        self._outbox: asyncio.Queue[str] | None = None  # of the open channel, be it welcome yet or not
        self._pending: dict[str, _Pending] = {}
        self._held: dict[str, Lease] = {}
        self._connected = asyncio.Event()
        self._alone_since_s = time.monotonic()

    async def run(self) -> None:
        """Keep the channel open; the gateway's deployment runs it as a task for its life."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keep_connected(self._address, self._talk))
            tasks.create_task(self._refuse_while_alone())

    async def _refuse_while_alone(self) -> None:
        """Without a scheduler nobody bounds the queue: what waits over the limit, or its own, is refused."""
        while True:
            await asyncio.sleep(ALONE_TICK_S)
            if self._connected.is_set():
                continue
            for pending in list(self._pending.values()):
                alone_s = time.monotonic() - max(pending.since_s, self._alone_since_s)
                patience_s = pending.request.max_queue_s
                limit_s = ALONE_LIMIT_S if patience_s is None else min(ALONE_LIMIT_S, patience_s)
                if alone_s > limit_s and not pending.answer.done():
                    message = f"the scheduler has not been reachable for {limit_s:g} s"
                    pending.answer.set_exception(RefusedError(Reason.SCHEDULER_UNREACHABLE, message, 1))
                    # A channel may be open that is not welcome yet, and its hello has submitted the request.
                    self._tell(Withdraw(pending.request.request_id))

    async def wait_connected(self, timeout_s: float) -> None:
        """Return once a scheduler has welcomed this gateway.

        Raises:
            TimeoutError: it has not within the limit.
        """
        async with asyncio.timeout(timeout_s):
            await self._connected.wait()

    @contextlib.asynccontextmanager
    async def lease(self, request: SchedulingRequest) -> AsyncIterator[HeldReplica]:
        """Wait for room on a replica and hold it for the length of the block.

        Leaving the block releases the lease, however it is left; so does being cancelled while waiting.
        What the block writes into `end` is told with the release.

        Raises:
            RefusedError: the scheduler said no.
        """
        request_id = request.request_id
        pending = self._pending[request_id] = _Pending(request)
        try:
            self._tell(Submit(request))
            granted = await pending.answer
        except asyncio.CancelledError:
            # The grant may have come in this very tick: withdrawing gives that back too.
            self._held.pop(request_id, None)
            self._tell(Withdraw(request_id))
            raise
        finally:
            del self._pending[request_id]
        held = HeldReplica(granted, time.monotonic())
        try:
            yield held
        finally:
            del self._held[request_id]
            self._tell(Release(request_id, held.end))

    def _tell(self, message: ToScheduler) -> None:
        # `_talk` makes the outbox when a channel opens. Without one nothing needs saying: the next hello reports
        # what is held and submits what waits.
        if self._outbox is not None:
            self._outbox.put_nowait(encode(message).decode())

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """What is said and heard on one channel, from its hello to its end."""
        # No await before all of this is queued: a lease that ended in between would stay booked for ever.
        self._outbox = outbox = asyncio.Queue[str]()
        self._tell(GatewayHello(self._gateway_id, self._metrics_address, list(self._held.values())))
        for pending in self._pending.values():
            if not pending.answer.done():
                # It waited already, with no scheduler or with the one before.
                waited_s = time.monotonic() - pending.since_s
                request = pending.request
                age_s, waited_s = request.age_s + waited_s, request.waited_s + waited_s
                self._tell(Submit(replace(request, age_s=age_s, waited_s=waited_s)))
        sender = asyncio.create_task(_send_all(socket, outbox))
        try:
            await listen(socket, lambda line: self._hear(decode_from_scheduler(line)))
        finally:
            sender.cancel()
            self._outbox = None
            if self._connected.is_set():  # else it is alone for as long as before
                self._connected.clear()
                self._alone_since_s = time.monotonic()

    def _hear(self, message: FromScheduler) -> None:
        if isinstance(message, Welcome):
            self._connected.set()
        else:
            self._settle(message)

    def _settle(self, message: Granted | Refused) -> None:
        pending = self._pending.get(message.request_id)
        if pending is None or pending.answer.done():
            return  # the client left; Withdraw is on its way and gives the lease back
        if isinstance(message, Granted):
            self._held[message.request_id] = Lease(
                message.request_id,
                message.replica_id,
                pending.request.reserved_tokens,
                pending.request.num_sequences,
            )
            pending.answer.set_result(message)
        else:
            pending.answer.set_exception(_refused(message))


def _refused(message: Refused) -> RefusedError:
    return RefusedError(Reason(message.reason), message.message, message.retry_after_s)


async def _send_all(socket: aiohttp.ClientWebSocketResponse, outbox: asyncio.Queue[str]) -> None:
    with contextlib.suppress(aiohttp.ClientConnectionResetError):  # the reader sees the end too
        while True:
            await socket.send_str(await next_frame(outbox))
