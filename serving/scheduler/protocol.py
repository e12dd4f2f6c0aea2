"""The words on the control channel: one WebSocket from each gateway and each replica to the scheduler.

Each message is one JSON text frame. A connection that closes is its owner's death notice: what a gateway
held is released, and a replica takes no more requests.
"""

from __future__ import annotations

import msgspec

from serving.core.errors import Reason
from serving.core.lane import Strategy
from serving.core.request import ReplicaVerdict


class Message(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of all messages; the field `type` says which one it is."""


class HeldLease(msgspec.Struct, frozen=True):
    """One live lease, as a gateway reports it."""

    request_id: str
    replica_id: str
    reserved_tokens: int


class GatewayHello(Message, frozen=True, tag="gateway_hello"):
    """First message of a gateway: who it is, and the leases it still holds from an earlier connection."""

    gateway_id: str
    metrics_address: str  # host:port
    leases: list[HeldLease] = []


class ReplicaHello(Message, frozen=True, tag="replica_hello"):
    """First message of a replica, sent when its engine is warm; see `serving.core.lane.ReplicaInfo`."""

    replica_id: str
    lane: str
    strategy: Strategy
    url: str
    max_running: int
    takes_unpinned: bool
    engine: str  # `vllm` or `simulated`
    engine_version: str
    dtype: str
    device: str


class ReplicaLeaving(Message, frozen=True, tag="replica_leaving"):
    """Replica: send me no more requests; I stay until my streams have ended."""


class Submit(Message, frozen=True, tag="submit"):
    """Gateway: please run this request; see `serving.core.request.SchedulingRequest`."""

    request_id: str
    lane: str | None
    prompt_tokens: int
    max_output_tokens: int
    needs_plain_decoding: bool
    tenant: str
    band: int
    ttft_deadline_s: float | None
    max_queue_s: float | None
    prefix_blocks: tuple[int, ...]
    age_s: float
    avoid_replica: str | None


class Release(Message, frozen=True, tag="release"):
    """Gateway: a granted request ended; see `serving.core.request.RequestEnd`."""

    request_id: str
    verdict: ReplicaVerdict
    first_token_s: float | None
    output_tokens: int | None


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
decode_to_scheduler = msgspec.json.Decoder(ToScheduler).decode
decode_from_scheduler = msgspec.json.Decoder(FromScheduler).decode
decode_replica_update = msgspec.json.Decoder(ReplicaUpdate).decode
