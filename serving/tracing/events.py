"""What a trace is made of: an engine's steps, and requests as a gateway saw them.

All instants are CLOCK_MONOTONIC in nanoseconds, which every process of a machine shares.
`docs/tracing.md` gives the file that they are written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_RECORDING_S: Final = 3600.0


class Phase(StrEnum):
    """What a step did for a request: computed a part of its prompt, or went on with its answer."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One engine step and one request in it. The events of a step share its number and its instants.

    Attributes:
        replica_id: whose engine.
        step: number of the step within its engine's life, from 1; recorded steps only, gaps are possible.
        started_ns: the step could begin: it was scheduled, and the one before it had ended.
        ended_ns: its tokens were there. Steps of an engine never overlap.
        request_id: the engine's own id; it contains the id that the gateway gave the request.
        scheduled_tokens: positions computed, >= 1: of the prompt, or the last token and the drafts behind it.
        drafted_tokens: drafts verified in this step, >= 0.
        accepted_tokens: of them; 0..drafted_tokens.
        emitted_tokens: tokens the answer grew by, accepted drafts included; 0 while the prompt is not whole.
            In an answer's last step it may be fewer than were accepted: the answer stops at its limit.
        drafted_ids, emitted_ids: the tokens themselves where the recording asked for them, else None. The accepted
            drafts are the first `accepted_tokens` of both. `drafted_ids` is also None where the drafts stay
            in the engine's worker, as those of a draft model do.
    """

    replica_id: str
    step: int
    started_ns: int
    ended_ns: int
    request_id: str
    phase: Phase
    scheduled_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    drafted_ids: tuple[int, ...] | None = None
    emitted_ids: tuple[int, ...] | None = None


def to_last_token(steps: Sequence[StepEvent]) -> tuple[StepEvent, ...]:
    """A request's steps up to the one that gave its last token.

    An engine that schedules ahead computes one more for an answer whose end it does not know yet.
    """
    end = max((place for place, event in enumerate(steps, start=1) if event.emitted_tokens), default=0)
    return tuple(steps[:end])


@dataclass(slots=True)
class Attempt:
    """One try on a replica; a request that is rerouted has two.

    Attributes:
        request_id: the id the scheduler and the engine know; it contains the request's own.
        submitted_ns: the gateway asked the scheduler for a replica.
        granted_ns: it got one; None when it did not.
        first_byte_ns: the first bytes of the replica's answer; None when there were none.
        ended_ns: the replica was given back; None while it goes on.
        placement: why there, as the response header has it; empty where no lanes were compared.
    """

    request_id: str
    submitted_ns: int
    granted_ns: int | None = None
    first_byte_ns: int | None = None
    ended_ns: int | None = None
    lane: str = ""
    replica_id: str = ""
    placement: str = ""


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request from arrival to last byte, as its gateway saw it.

    Attributes:
        request_id: what the gateway calls it; it begins with `client_request_id` and is unique.
        client_request_id: the client's `x-request-id`, or the one made for it.
        first_token_ns: the first chunk with text; None for answers in one piece, and before it.
        ended_ns: last byte given to the server; None while it goes on.
        outcome: a `serving.core.request.Outcome`; None while it goes on.
        reason: a `serving.core.errors.Reason`; empty when it completed or goes on.
        prompt_tokens, output_tokens: the engine's usage; None when it gave none.
    """

    gateway_id: str
    request_id: str
    client_request_id: str
    arrived_ns: int
    attempts: tuple[Attempt, ...] = ()
    first_token_ns: int | None = None
    ended_ns: int | None = None
    outcome: str | None = None
    reason: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GatewaySpans:
    """What a gateway remembers of its requests: the page `/tandem/spans`.

    Attributes:
        is_complete: False when it had more requests since then than it remembers.
    """

    gateway_id: str
    is_complete: bool
    spans: list[RequestSpan]


@dataclass(frozen=True, slots=True)
class TracedReplica:
    """A replica whose steps were recorded.

    Attributes:
        events: how many were recorded.
        lost_events: how many more there were when the log was full; anything but 0 means a hole at the end.
    """

    replica_id: str
    lane: str
    strategy: str
    engine: str
    events: int
    lost_events: int


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What a trace covers.

    Attributes:
        started_ns, ended_ns: the recording, on CLOCK_MONOTONIC.
        realtime_offset_ns: add it to an instant to get nanoseconds since the epoch.
        spans_complete: False when a gateway had more requests than it remembers.
        share: of the requests that are in it, chosen by `serving.tracing.sampling`.
    """

    tandem_version: str
    model: str
    started_ns: int
    ended_ns: int
    realtime_offset_ns: int
    replicas: tuple[TracedReplica, ...]
    gateways: tuple[str, ...]
    spans_complete: bool
    share: float = 1.0
