"""How an answer's bytes move: from the replica to the client, noted on the way."""

from __future__ import annotations

import time

from serving.core.errors import Reason, UpstreamError
from serving.core.request import Outcome
from serving.core.sse import EventTooLargeError, parse_answer
from serving.gateway.account import Ending
from serving.gateway.attached import without_key
from serving.gateway.client_response import ClientResponse
from serving.gateway.errors import error_headers, refusal_reason
from serving.gateway.stream import StreamNotes
from serving.gateway.upstream import UpstreamAnswer

MAX_QUOTED_BYTES = 300
# Of an answer that is no stream, which is held in memory until its end. A server that is not ours may never end it.
MAX_ANSWER_BYTES = 256 * 1024 * 1024
# A cache would keep a stream back until its end, and so would nginx, unless it is told not to.
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def relay(
    upstream: UpstreamAnswer, client: ClientResponse, notes: StreamNotes, *, key: str = ""
) -> Ending:
    """Pass a replica's answer on to its end; how it ended.

    A refusal keeps the replica's words: the client reads what it got wrong, its own input perhaps among it.

    Args:
        key: that the lab showed an attached server; a refusal or a fault that quotes it is passed on without it.

    Raises:
        UpstreamError: the replica broke, or answered with a fault of its own.
        ClientStalledError: the client took nothing for too long.
        OSError: the client's connection broke.
    """
    if upstream.status < 400 and upstream.content_type.startswith("text/event-stream"):
        await _pass_events(upstream, client, notes, key)
        return Ending(Outcome.COMPLETED)
    return await _pass_whole(upstream, client, notes, key)


async def _pass_events(
    upstream: UpstreamAnswer, client: ClientResponse, notes: StreamNotes, key: str
) -> None:
    while (block := await upstream.block()) is not None:
        if data := _noted(notes, block):
            await client.begin(upstream.status, upstream.content_type, STREAM_HEADERS)
            await client.write(data)
        _check(notes, key)
        if client.connection is not None and client.has_begun:
            await _pour(upstream, client, notes, key)
            break
    if not notes.has_ended:
        raise UpstreamError(Reason.UPSTREAM_BROKE, "the engine ended its stream before the last event")
    await client.end()


async def _pour(upstream: UpstreamAnswer, client: ClientResponse, notes: StreamNotes, key: str) -> None:
    """Pass on what is left of a stream, each block from the callback that received it."""
    connection = client.connection
    assert connection is not None

    def pass_on(block: bytes, is_last: bool) -> None:
        if data := _noted(notes, block):
            connection.write_chunk(data, hold=is_last)
        _check(notes, key)

    connection.hold_back(upstream)
    try:
        await upstream.pour(pass_on)
    finally:
        connection.hold_back(None)


def _noted(notes: StreamNotes, block: bytes) -> bytes:
    try:
        return notes.feed(block, time.monotonic())
    except EventTooLargeError as error:
        raise UpstreamError(Reason.UPSTREAM_BROKE, str(error)) from error


def _check(notes: StreamNotes, key: str) -> None:
    if notes.error is not None:
        message = "the engine reported an error"
        raise UpstreamError(
            Reason.UPSTREAM_BROKE,
            message,
            is_answer=True,
            was_begun=True,
            quoted=without_key(notes.error, key),
        )


async def _pass_whole(
    upstream: UpstreamAnswer, client: ClientResponse, notes: StreamNotes, key: str
) -> Ending:
    blocks, num_bytes = [], 0
    while (block := await upstream.block()) is not None:
        blocks.append(block)
        num_bytes += len(block)
        if num_bytes > MAX_ANSWER_BYTES:
            message = f"the engine's answer is longer than {MAX_ANSWER_BYTES} bytes"
            raise UpstreamError(
                Reason.UPSTREAM_BROKE, message, is_final=True, is_answer=True, was_begun=upstream.was_begun
            )
    body = b"".join(blocks)
    if key and upstream.status >= 400:
        body = without_key(body.decode(errors="surrogateescape"), key).encode(errors="surrogateescape")
    if upstream.status >= 500:
        quoted = body[:MAX_QUOTED_BYTES].decode(errors="replace")
        message = f"the engine answered {upstream.status}"
        raise UpstreamError(
            Reason.UPSTREAM_BROKE, message, is_answer=True, was_begun=upstream.was_begun, quoted=quoted
        )
    ending, extra = Ending(Outcome.COMPLETED), {}
    if upstream.status == 200:
        said = parse_answer(body)
        if said.error is not None:
            message = "the engine answered 200 with an error"
            raise UpstreamError(
                Reason.UPSTREAM_BROKE,
                message,
                is_answer=True,
                was_begun=True,
                quoted=without_key(said.error, key),
            )
        notes.usage.take(said)
    if upstream.status >= 400:
        reason = refusal_reason(body)
        ending, extra = Ending(Outcome.REJECTED, reason), error_headers(reason)
    await client.answer(upstream.status, upstream.content_type, body, extra)
    return ending
