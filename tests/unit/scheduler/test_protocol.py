"""The words on the control channel: read back as they were said, and nothing else is taken for one of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from serving.core.lane import EngineFacts
from serving.core.request import Lease, ReplicaVerdict, RequestEnd
from serving.scheduler.protocol import (
    GatewayHello,
    Release,
    ReplicaHello,
    ReplicaLeaving,
    Submit,
    ToScheduler,
    Withdraw,
    decode_to_scheduler,
    encode,
)
from tests.unit.scheduler.examples import replica, request

MESSAGES: list[ToScheduler] = [
    GatewayHello("g", "127.0.0.1:9", [Lease("a", "r", 10)]),
    ReplicaHello(
        replica("r"), EngineFacts("simulated", "simulated 1", has_model=False, device="none", dtype="none")
    ),
    ReplicaLeaving(),
    Submit(request("a", "batched", prefix_blocks=(1, 2), max_queue_s=0.5)),
    Release("a", RequestEnd(ReplicaVerdict.HEALTHY, 0.25, 7)),
    Withdraw("a"),
]
PARTS = [
    (0, ("leases", 0)),
    (1, ("info",)),
    (1, ("engine",)),
    (3, ("request",)),
    (4, ("end",)),
    *((number, ()) for number in range(len(MESSAGES))),
]


def said(message: ToScheduler, part: tuple[str | int, ...], **fields: Any) -> str:
    """The message as JSON, with fields put into a part of it; None takes one out."""
    body: Any = json.loads(encode(message))
    place = body
    for key in part:
        place = place[key]
    place.update(fields)
    for name in [name for name, value in fields.items() if value is None]:
        del place[name]
    return json.dumps(body)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_said(message: ToScheduler) -> None:
    assert decode_to_scheduler(encode(message).decode()) == message


@pytest.mark.parametrize(("number", "part"), PARTS)
def test_an_unknown_field_is_refused_wherever_it_stands(number: int, part: tuple[str | int, ...]) -> None:
    text = said(MESSAGES[number], part, colour="red")
    with pytest.raises(msgspec.ValidationError, match=f"unknown.*`{part[0] if part else 'colour'}`"):
        decode_to_scheduler(text)


@pytest.mark.parametrize("name", ["request_id", "tenant", "age_s"])
def test_a_missing_field_is_refused_though_it_has_a_default(name: str) -> None:
    text = said(MESSAGES[3], ("request",), **{name: None})
    with pytest.raises(msgspec.ValidationError, match="missing"):
        decode_to_scheduler(text)


@pytest.mark.parametrize(
    ("number", "part", "fields"),
    [
        (0, ("leases", 0), {"reserved_tokens": "10"}),
        (1, ("info",), {"max_running": 1.5}),
        (1, ("info",), {"strategy": "guessing"}),
        (3, ("request",), {"prompt_tokens": "9"}),
        (3, ("request",), {"needs_plain_decoding": 1}),
        (3, ("request",), {"prefix_blocks": ["1"]}),
        (4, ("end",), {"verdict": "fine"}),
    ],
)
def test_a_value_of_another_type_is_refused(
    number: int, part: tuple[str | int, ...], fields: dict[str, Any]
) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(fields))):
        decode_to_scheduler(said(MESSAGES[number], part, **fields))


def test_the_predicted_output_is_for_the_scheduler_to_say() -> None:
    with pytest.raises(msgspec.ValidationError, match="predicted_output_tokens=5 must be 0"):
        decode_to_scheduler(said(MESSAGES[3], ("request",), predicted_output_tokens=5))
    with pytest.raises(ValueError, match="predicted_output_tokens=5 must be 0"):
        Submit(request("a", predicted_output_tokens=5))
