"""The control channel, as a gateway and a replica hold it: always on its way to a scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import aiohttp

from serving import __version__
from serving.core.errors import TandemError
from serving.scheduler.protocol import BAD_HELLO, BAD_MESSAGE, CONTROL_PATH, PROTOCOL_VERSION
from serving.scheduler.quiet_log import QuietLog

logger = logging.getLogger(__name__)
RECONNECT_DELAY_S = 0.2
# A refusal stays until somebody starts other processes. Less than the scheduler's SETTLE_S: one of the right
# release hears of held leases before it places anything.
REFUSED_DELAY_S = 2.0
HEARTBEAT_S = 5.0


class ChannelRefusedError(TandemError):
    """The scheduler closed the channel because of what was said on it; the text is its reason."""


async def keep_connected(
    address: Callable[[], Awaitable[str]],
    talk: Callable[[aiohttp.ClientWebSocketResponse], Awaitable[None]],
) -> None:
    """Hold a control channel open for ever: connect, talk until it breaks, connect again.

    Args:
        address: host:port of the scheduler, asked before each attempt, for it may have moved;
            raises an OSError while it is not to be found.
        talk: says hello and listens.
    """
    faults = QuietLog(logger)
    async with aiohttp.ClientSession() as session:
        while True:
            delay_s = RECONNECT_DELAY_S
            try:
                url = f"http://{await address()}{CONTROL_PATH}"
                async with session.ws_connect(url, heartbeat=HEARTBEAT_S) as channel:
                    await talk(channel)
            except ChannelRefusedError as refusal:
                delay_s = REFUSED_DELAY_S
                faults.log(
                    logging.ERROR,
                    f"the scheduler refuses the control channel of this process (tandem {__version__}, control "
                    f"protocol {PROTOCOL_VERSION}): {refusal}; trying again every {delay_s:g} s",
                )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                faults.log(logging.WARNING, f"control channel: {error}; trying again")
            await asyncio.sleep(delay_s)


async def listen(channel: aiohttp.ClientWebSocketResponse, hear: Callable[[str], None]) -> None:
    """Hand on what the scheduler says, message by message, until the channel ends.

    Raises:
        ChannelRefusedError: the scheduler ended it, because of what it was told.
        ConnectionError: the scheduler fell silent.
    """
    while True:
        frame = await channel.receive()
        if frame.type is aiohttp.WSMsgType.TEXT:
            for line in frame.data.split("\n"):
                hear(line)
        elif frame.type is aiohttp.WSMsgType.ERROR:
            # A heartbeat that stayed unanswered comes as a frame, not as an exception.
            raise ConnectionError(f"the scheduler fell silent: {frame.data!r}")
        elif frame.type is aiohttp.WSMsgType.CLOSE and frame.data in (BAD_HELLO, BAD_MESSAGE):
            raise ChannelRefusedError(frame.extra)
        else:
            return
