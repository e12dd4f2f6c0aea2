"""One request to one engine replica, with a limit on every wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import aiohttp

from serving.config import GatewayConfig
from serving.core.errors import Reason, UpstreamError


@dataclass(frozen=True, slots=True)
class Upstream:
    """A replica's answer, headers read and body still to come.

    Attributes:
        chunks: the body, once; each wait for more of it has its limit.

    Raises:
        UpstreamError: from `chunks`: the answer broke off, or fell silent.
    """

    status: int
    content_type: str
    chunks: AsyncIterator[bytes]


class UpstreamClient:
    """Pooled connections to the replicas; one per gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        # limit=0: the scheduler bounds what runs; a second, hidden bound here would be a queue nobody sees.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @contextlib.asynccontextmanager
    async def post(
        self, url: str, body: bytes, request_id: str, carried: Mapping[str, str]
    ) -> AsyncIterator[Upstream]:
        """Send a request; leaving the block closes the connection, which stops the generation.

        Args:
            carried: further headers.

        Raises:
            UpstreamError: no connection, no answer in time, or the answer broke off.
        """
        headers = {"content-type": "application/json", "x-request-id": request_id, **carried}
        try:
            async with asyncio.timeout(self._config.first_byte_timeout_s):
                response = await self._session.post(url, data=body, headers=headers)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _explain(error, url, "first byte", self._config) from error
        try:
            content_type = response.headers.get("content-type", "application/json")
            yield Upstream(response.status, content_type, self._chunks(response, url))
        finally:
            # A response read to its end is back in the pool already; any other is cut off.
            response.close()

    async def _chunks(self, response: aiohttp.ClientResponse, url: str) -> AsyncIterator[bytes]:
        limit_s = self._config.first_byte_timeout_s
        phase = "first byte"
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    chunk = await response.content.readany()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise _explain(error, url, phase, self._config) from error
            if not chunk:
                return
            yield chunk
            limit_s, phase = self._config.idle_timeout_s, "next byte"


def _explain(error: Exception, url: str, phase: str, config: GatewayConfig) -> UpstreamError:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        limit = f"gateway.connect_timeout_s={config.connect_timeout_s:g}"
        return UpstreamError(
            Reason.UPSTREAM_TIMEOUT, f"the engine replica at {url} took no connection in time ({limit})"
        )
    if isinstance(error, TimeoutError):
        limits = f"gateway.first_byte_timeout_s={config.first_byte_timeout_s:g}, "
        limits += f"gateway.idle_timeout_s={config.idle_timeout_s:g}"
        return UpstreamError(Reason.UPSTREAM_TIMEOUT, f"the engine sent no {phase} in time ({limits})")
    return UpstreamError(
        Reason.UPSTREAM_BROKE, f"the engine replica broke before its {phase}: {error or type(error).__name__}"
    )
