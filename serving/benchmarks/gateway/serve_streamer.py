"""A plain streamer on Ray Serve: a FastAPI deployment that passes an engine's bytes on, behind Serve's HTTP proxy.

    python -m serving.benchmarks.gateway.serve_streamer --port 8200 URL...

It schedules nothing, counts nothing and reads no event: what it costs is what Serve's way costs. A Ray of its own.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import AsyncIterator

import aiohttp
import click

from serving import ray_environment  # isort: skip - must come before Ray

import ray
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation

from serving.core.addresses import LOOPBACK
from serving.core.ray_application import OBJECT_STORE_BYTES

UNBOUNDED = 1_000_000
api = FastAPI()


@serve.deployment(max_ongoing_requests=UNBOUNDED, ray_actor_options={"num_cpus": 0})
@serve.ingress(api)
class Streamer:
    """Passes each request on to the next engine."""

    async def __init__(self, urls: list[str]) -> None:  # type: ignore[misc]
        self._turns = itertools.cycle(urls)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    @api.post("/v1/chat/completions")
    async def complete(self, request: Request) -> StreamingResponse:
        """The engine's answer, as it comes."""
        answer = await self._session.post(
            f"{next(self._turns)}/v1/chat/completions",
            data=await request.body(),
            headers={"content-type": "application/json"},
        )

        async def relay() -> AsyncIterator[bytes]:
            async with answer:
                async for data in answer.content.iter_any():
                    yield data

        return StreamingResponse(relay(), status_code=answer.status, media_type=answer.content_type)


@click.command()
@click.option("--port", type=int, required=True)
@click.argument("urls", nargs=-1, required=True)
def main(port: int, urls: tuple[str, ...]) -> None:
    """Serve until a signal comes."""
    ray_environment.start_needed_processes_only()
    ray.init(
        address="local",
        _node_ip_address=LOOPBACK,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host=LOOPBACK, port=port))
        serve.run(Streamer.bind(list(urls)))  # type: ignore[attr-defined]
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
