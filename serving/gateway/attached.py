"""What a request needs on its way to a server that somebody else runs: its name of the model, and the lab's key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from serving.config import LaneConfig
from serving.core.errors import Reason, UpstreamError
from serving.core.lane import AttachedServer
from serving.core.server_key import server_key
from serving.gateway.openai_request import RoutedRequest
from serving.scheduler.protocol import Granted

NOT_THE_CLIENT = (401, 403, 404)  # the lab chose key, path and model
UNAVAILABLE = 503  # while it loads its model, or has no room
# Nobody knows when such a server closes a connection that it keeps: llama.cpp does it right after a stream, others
# after some seconds. A request on one that closes is lost, and whether it was begun is not known.
ONCE = {"connection": "close"}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


@dataclass(frozen=True, slots=True)
class Post:
    """A request as it is sent to a replica.

    Attributes:
        url: without the path.
        headers: beside those of every request.
        key: of the lab, in them; empty where it shows none.
    """

    url: str
    body: bytes
    headers: Mapping[str, str]
    key: str = ""


class ServerKeys:
    """The keys that the lab shows to attached servers.

    Args:
        keys: by lane and URL. Who else claims to be a server of that lane is shown none.
    """

    def __init__(self, keys: Mapping[tuple[str, str], str]) -> None:
        self._keys = dict(keys)

    @classmethod
    def of(cls, lanes: Iterable[LaneConfig], environment: Mapping[str, str] = os.environ) -> ServerKeys:
        """Those that the lanes name.

        Raises:
            ConfigError: an environment variable is not set, or no header can carry its value.
        """
        keys: dict[tuple[str, str], str] = {}
        for lane in lanes:
            if key := server_key(lane.api_key_env, f"lanes[{lane.name}].api_key_env", environment):
                keys |= {(lane.name, url): key for url in lane.urls}
        return cls(keys)

    def post(self, granted: Granted, request: RoutedRequest) -> Post:
        """The request for the replica that was granted."""
        if (server := granted.server) is None:
            return Post(granted.url, request.body, {})
        key = self._keys.get((granted.lane, server.url), "")
        shown = {"authorization": f"Bearer {key}"} if key else {}
        return Post(server.url, body_for(server, request), shown | ONCE, key)


def body_for(server: AttachedServer, request: RoutedRequest) -> bytes:
    """The body with the server's name of the model, and no wish for usage that it would refuse; else as it came."""
    fields = _fields(request.body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(server.model))
    if request.strip_usage and not server.takes_stream_options:
        fields.pop("stream_options", None)
    return msgspec.json.encode(fields)


def without_key(said: str, key: str) -> str:
    """A server's words without the key that the lab showed it, which are for a client that must not know it."""
    if not key:
        return said
    for written in (key, json.dumps(key)[1:-1]):
        said = said.replace(written, "[key]")
    return said


def check_status(granted: Granted, status: int) -> None:
    """See that an attached server's answer is one to the client.

    Raises:
        UpstreamError: it refuses what the lab has added, is elsewhere, or takes no requests now. The request was
            not begun, and its words are not for the client. Of the first two its health check says whether they
            are its fault: one that lacks a path refuses that path alone.
    """
    if granted.server is None:
        return
    what = f"the server of lane {granted.lane} answered the lab {status}"
    if status in NOT_THE_CLIENT or 300 <= status < 400:
        settings = f"lanes[{granted.lane}]: urls, api_key_env, served_model"
        raise UpstreamError(Reason.UPSTREAM_BROKE, f"{what} ({settings})", is_answer=True)
    if status == UNAVAILABLE:
        raise UpstreamError(Reason.UPSTREAM_BROKE, what)
