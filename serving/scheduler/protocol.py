"""The words on the control channel: one WebSocket from each gateway and each replica to the scheduler.

Each message is one JSON text frame. A connection that closes is its owner's death notice: what a gateway
held is released, and a replica takes no more requests.
"""

from __future__ import annotations

import msgspec

from serving.core.errors import Reason
from serving.core.lane import EngineFacts, ReplicaInfo
from serving.core.request import Lease, RequestEnd, SchedulingRequest


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages; the field `type` says which one it is."""


class GatewayHello(Message, frozen=True, tag="gateway_hello"):
    """First message of a gateway: who it is, and the leases it still holds from an earlier connection."""

    gateway_id: str
    metrics_address: str  # host:port
    leases: list[Lease] = []


class ReplicaHello(Message, frozen=True, tag="replica_hello"):
    """First message of a replica, sent when its engine is warm."""

    info: ReplicaInfo
    engine: EngineFacts


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


class Granted(Message, frozen=True, tag="granted"):
    """Scheduler: run it there."""

    request_id: str
    replica_id: str
    lane: str
    url: str


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


ToScheduler = GatewayHello | ReplicaHello | ReplicaLeaving | Submit | Release | Withdraw
FromScheduler = Granted | Refused

encode = msgspec.json.Encoder().encode
decode_from_scheduler = msgspec.json.Decoder(FromScheduler).decode
decode_replica_update = msgspec.json.Decoder(ReplicaUpdate).decode
_decode_message = msgspec.json.Decoder(ToScheduler).decode
_decode_json = msgspec.json.Decoder().decode


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
