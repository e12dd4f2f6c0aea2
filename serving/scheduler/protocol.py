"""The words on the control channel: one WebSocket from each gateway and each replica to the scheduler.

A message is one line of JSON, and a text frame holds one or more: what was said while the last was sent goes
together. A connection that closes is its owner's death notice: what a gateway
held is released, and a replica takes no more requests. The first message of a connection is a hello.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from serving import __version__
from serving.core.choice import Choice
from serving.core.errors import Reason, TandemError
from serving.core.lane import AttachedServer, EngineFacts, ReplicaInfo
from serving.core.request import Lease, RequestEnd, SchedulingRequest

# Raise it with every change of a message, or of what one means. Scheduler, gateways and replicas come from one
# release; the number tells them apart where two of them meet.
PROTOCOL_VERSION = 6
CONTROL_PATH = "/control"
MAX_MESSAGES_A_FRAME = 64  # a hello that reports many leases is one message, and longer
# Why the scheduler closes a channel, as codes of RFC 6455; the close frame says more.
BAD_HELLO = 1002
BAD_MESSAGE = 1008
REPLACED = 1001


class HelloError(TandemError):
    """A first message that the scheduler does not take; the text says why, and what to do."""


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages; the field `type` says which one it is."""


class GatewayHello(Message, frozen=True, tag="gateway_hello"):
    """First message of a gateway: who it is, and the leases it still holds from an earlier connection."""

    gateway_id: str
    metrics_address: str  # host:port
    leases: list[Lease] = []
    protocol_version: int = PROTOCOL_VERSION


class ReplicaHello(Message, frozen=True, tag="replica_hello"):
    """First message of a replica, sent when its engine is warm."""

    info: ReplicaInfo
    engine: EngineFacts
    protocol_version: int = PROTOCOL_VERSION


class AbsentHello(Message, frozen=True, tag="absent_hello"):
    """First and only message for an attached server that cannot serve; true as long as the connection is open."""

    lane: str
    url: str
    why: str
    protocol_version: int = PROTOCOL_VERSION


class ReplicaLeaving(Message, frozen=True, tag="replica_leaving"):
    """Replica: send me no more requests; I stay until my streams have ended."""


class Submit(Message, frozen=True, tag="submit"):
    """Gateway: please run this request. What it will probably hold is for the scheduler to say, which learns it."""

    request: SchedulingRequest

    def __post_init__(self) -> None:
        if predicted := self.request.predicted_output_tokens:
            raise ValueError(f"predicted_output_tokens={predicted} must be 0: the scheduler predicts")


class Release(Message, frozen=True, tag="release"):
    """Gateway: a granted request ended."""

    request_id: str
    end: RequestEnd


class Withdraw(Message, frozen=True, tag="withdraw"):
    """Gateway: the client left while its request waited; the answer may be on its way already."""

    request_id: str


class Welcome(Message, frozen=True, tag="welcome"):
    """Scheduler to a gateway: your hello is taken. What was said behind it is heard, too."""


class Granted(Message, frozen=True, tag="granted"):
    """Scheduler: run it there; why there, where lanes were compared."""

    request_id: str
    replica_id: str
    lane: str
    url: str
    server: AttachedServer | None = None  # where to send it instead of `url`
    choice: Choice | None = None


class Refused(Message, frozen=True, tag="refused"):
    """Scheduler: no, and why."""

    request_id: str
    reason: Reason
    message: str
    retry_after_s: int | None


class ReplicaUpdate(Message, frozen=True, tag="replica_update"):
    """Scheduler to a replica: what is booked on it, with its part of what waits for its lane."""

    outstanding_tokens: int
    has_grace: bool  # False: the drain limit has passed, running streams need not be waited for


ToScheduler = GatewayHello | ReplicaHello | AbsentHello | ReplicaLeaving | Submit | Release | Withdraw
FromScheduler = Welcome | Granted | Refused
Hello = GatewayHello | ReplicaHello | AbsentHello
HELLO_TYPES = ("gateway_hello", "replica_hello", "absent_hello")


class _AnyHello(msgspec.Struct, frozen=True):
    """What the hellos of all releases have in common. No release may rename these fields, or the two types."""

    type: str
    protocol_version: Any = None  # there was none before 1


encode = msgspec.json.Encoder().encode
decode_from_scheduler = msgspec.json.Decoder(FromScheduler).decode
decode_replica_update = msgspec.json.Decoder(ReplicaUpdate).decode
_decode_message = msgspec.json.Decoder(ToScheduler).decode
_decode_json = msgspec.json.Decoder().decode
_decode_any_hello = msgspec.json.Decoder(_AnyHello).decode


async def next_frame(outbox: asyncio.Queue[str]) -> str:
    """The messages that wait in an outbox, at least one, as one frame."""
    lines = [await outbox.get()]
    while len(lines) < MAX_MESSAGES_A_FRAME and not outbox.empty():
        lines.append(outbox.get_nowait())
    return "\n".join(lines)


def read_hello(text: str) -> Hello:
    """Read the first message of a connection, which another release may have written.

    Raises:
        HelloError: it is of another version, or no hello at all.
    """
    try:
        said = _decode_any_hello(text)
        if said.type not in HELLO_TYPES and said.protocol_version is None:
            raise HelloError(f"first message must be a hello, got {said.type:.40}")
        if said.protocol_version != PROTOCOL_VERSION:
            theirs = "none" if said.protocol_version is None else f"{said.protocol_version!r:.10}"
            raise HelloError(
                f"{said.type:.20} of control protocol {theirs}, but this scheduler (tandem {__version__}) speaks "
                f"{PROTOCOL_VERSION}: start all from one release"
            )
        hello = decode_to_scheduler(text)
    except msgspec.DecodeError as error:
        raise HelloError(f"no hello of control protocol {PROTOCOL_VERSION}: {error}") from None
    assert isinstance(hello, Hello), "other messages have no version"
    return hello


def decode_to_scheduler(text: str) -> ToScheduler:
    """Read a message that holds every field of its type, and no other.

    Raises:
        msgspec.DecodeError: it does not, a value has another type, or it is no message at all.
    """
    message: ToScheduler = _decode_message(text)
    # Of a dataclass msgspec skips the fields that it does not know; so what was understood is said again.
    understood = encode(message).decode()
    if understood != text and (parts := _different_parts(text, understood)):
        raise msgspec.ValidationError(f"unknown or missing fields in {parts}")
    return message


def _different_parts(said: str, understood: str) -> str:
    """Whose values differ, between two messages as JSON; spaces and the order of fields are no difference."""
    ours, theirs = _decode_json(understood), _decode_json(said)
    names = sorted(ours.keys() | theirs.keys())
    return ", ".join(f"`{name}`" for name in names if ours.get(name) != theirs.get(name))
