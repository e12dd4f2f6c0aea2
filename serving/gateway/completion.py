"""One completion from arrival to last byte: lease, post, relay, account."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from starlette.types import Receive, Scope, Send

from serving.core.errors import Reason, RefusedError, UpstreamError
from serving.core.request import Outcome, SchedulingRequest
from serving.gateway.account import CLIENT_STALLED, Ending, RequestAccount
from serving.gateway.attached import ServerKeys, check_status
from serving.gateway.client_response import ClientGoneError, ClientResponse, ClientStalledError
from serving.gateway.metrics import GatewayMetrics
from serving.gateway.openai_request import RoutedRequest
from serving.gateway.relay import relay
from serving.gateway.upstream import UpstreamClient
from serving.scheduler.client import SchedulerClient
from serving.scheduler.protocol import Granted
from serving.tracing.otlp import Tracing
from serving.tracing.span_log import SpanLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What every completion of a gateway shares.

    Attributes:
        tracing: exports spans to a collector; None when none is set.
        logs_requests: one line in the log for each request that ends.
        server_keys: for servers that somebody else runs.
    """

    scheduler: SchedulerClient
    upstream: UpstreamClient
    metrics: GatewayMetrics
    spans: SpanLog = field(default_factory=SpanLog)
    tracing: Tracing | None = None
    logs_requests: bool = False
    server_keys: ServerKeys = field(default_factory=lambda: ServerKeys({}))


class Completion:
    """An ASGI response that runs one request. All it holds is given back when it returns or is cancelled.

    Args:
        path: `/v1/chat/completions` or `/v1/completions`.
        client_request_id: the id the client sees; the scheduling id begins with it and is unique.
        arrived_at_s: monotonic instant of arrival.
        headers: the client's, for the trace that it may be part of.
    """

    def __init__(
        self,
        services: Services,
        request: RoutedRequest,
        *,
        path: str,
        client_request_id: str,
        arrived_at_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self._services = services
        self._request = request
        self._path = path
        tracing = services.tracing
        self._account = RequestAccount(
            request,
            services.metrics,
            gateway_id=services.spans.gateway_id,
            client_request_id=client_request_id,
            arrived_at_s=arrived_at_s,
            traced=tracing.begin("gateway", headers, round(arrived_at_s * 1e9)) if tracing else None,
            logs_requests=services.logs_requests,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, stop the engine as soon as the client has gone, and account for how it ended."""
        client = ClientResponse(scope, receive, send)
        ending = Ending(Outcome.FAILED, Reason.INTERNAL)
        with self._services.spans.running(self._account.span):
            try:
                ending = await self._answer(client)
            except (ClientGoneError, OSError):
                ending = self._account.client_left()
            except ClientStalledError:
                ending = CLIENT_STALLED
                client.cut_off()
            except asyncio.CancelledError:
                ending = self._account.client_left()
                raise
            except Exception as error:
                logger.exception("request %s", self._request.scheduling.request_id)
                await client.fail(Reason.INTERNAL, f"the gateway failed: {type(error).__name__}")
            finally:
                self._account.close(ending)

    async def _answer(self, client: ClientResponse) -> Ending:
        """Run the request; what keeps it from completing is told to the client."""
        try:
            async with client.unless_gone():
                return await self._run(client)
        except RefusedError as refusal:
            await client.fail(refusal.reason, str(refusal), refusal.retry_after_s)
            return Ending(Outcome.REJECTED, refusal.reason)
        except UpstreamError as error:
            request_id, replica_id = self._request.scheduling.request_id, self._account.replica_id
            logger.warning("request %s on %s: %s", request_id, replica_id, error)
            await client.fail(error.reason, error.told)
            return Ending(Outcome.FAILED, error.reason)

    async def _run(self, client: ClientResponse) -> Ending:
        """On a replica; if that breaks before its first byte, once more on another within the deadline."""
        request = self._request.scheduling
        try:
            return await self._attempt(request, client)
        except UpstreamError as error:
            age_s = self._account.age_s
            if client.has_begun or not self._account.replica_id or _is_late(request, age_s):
                raise
            if error.is_final:
                raise
            first = error
        logger.warning("request %s: %s; trying another replica", request.request_id, first)
        again = replace(
            request,
            request_id=f"{request.request_id}-again",
            age_s=age_s,
            max_queue_s=self._patience_left_s(),
            avoid_replica=self._account.replica_id,
        )
        return await self._run_again(again, client, first)

    def _patience_left_s(self) -> float | None:
        """How long it may still wait; the time on the replica that broke was no waiting."""
        patience_s = self._request.scheduling.max_queue_s
        return None if patience_s is None else max(0.0, patience_s - self._account.queued_s)

    async def _run_again(
        self, request: SchedulingRequest, client: ClientResponse, first: UpstreamError
    ) -> Ending:
        """The second try; when no replica is granted for it, the first error stands."""
        lane, ending = self._account.lane, Ending(Outcome.FAILED)
        try:
            ending = await self._attempt(request, client)
            return ending
        except RefusedError as refusal:
            ending = Ending(Outcome.REJECTED)
            raise UpstreamError(
                first.reason, f"{first}; no reroute: {refusal}", quoted=first.quoted
            ) from first
        except (asyncio.CancelledError, OSError):
            ending = self._account.client_left()
            raise
        finally:
            self._services.metrics.reroutes.labels(lane=lane, outcome=ending.outcome).inc()

    async def _attempt(self, request: SchedulingRequest, client: ClientResponse) -> Ending:
        """Lease a replica, post the body to it, relay its answer."""
        account, services = self._account, self._services
        with account.attempt(request.request_id):
            async with services.scheduler.lease(request) as held:
                with account.running_on(held):
                    granted = held.granted
                    client.placed = _placement_headers(granted)
                    post = services.server_keys.post(granted, self._request)
                    try:
                        async with services.upstream.post(
                            post.url + self._path,
                            post.body,
                            request.request_id,
                            {**account.trace_headers, **post.headers},
                            is_stream=self._request.is_stream,
                        ) as upstream:
                            check_status(granted, upstream.status)
                            account.first_byte()
                            return await relay(upstream, client, account.notes)
                    except UpstreamError as error:
                        if not (error.is_answer or error.was_begun):
                            raise
                        if await services.upstream.is_healthy(granted.url):
                            # What one request made of an engine that is well says nothing of the engine.
                            error.blames_replica = error.blames_replica and not error.is_answer
                        elif error.was_begun and not client.has_begun:
                            raise _first_step_death(error) from error
                        raise


def _placement_headers(granted: Granted) -> dict[str, str]:
    headers = {"x-tandem-lane": granted.lane, "x-tandem-replica": granted.replica_id}
    return headers | ({"x-tandem-placement": str(granted.choice)} if granted.choice else {})


def _first_step_death(error: UpstreamError) -> UpstreamError:
    """The engine died before the first token of a request, which may be why: it must not reach another engine."""
    return UpstreamError(
        Reason.ENGINE_DIED,
        f"{error}; the engine died in this request's first step, so it is not run again",
        quoted=error.quoted,
        is_final=True,
    )


def _is_late(request: SchedulingRequest, age_s: float) -> bool:
    return request.ttft_deadline_s is not None and age_s >= request.ttft_deadline_s
