"""A request, as the scheduler sees it: what it asks for, the room it is lent, how it ends."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from serving.core.speculation.text_kind import TextKind

# What a header can carry, and a label of a metric can show.
TENANT_NAME = re.compile(r"[\x21-\x7e]{1,128}")
DEFAULT_TENANT = "default"
BYTES_PER_TOKEN = 4  # a usual ratio for English text; good enough to book load, never used to count


class Outcome(StrEnum):
    """How a request ended; each ends in exactly one. Label `outcome` in metrics."""

    COMPLETED = "completed"
    REJECTED = "rejected"  # refused by Tandem, or a 4xx from the engine
    CANCELLED = "cancelled"  # the client left
    FAILED = "failed"  # the engine broke, or answered 5xx


@dataclass(frozen=True, slots=True)
class SchedulingRequest:
    """What the scheduler needs to know to queue and place a request.

    Attributes:
        request_id: unique among live requests.
        lane: the lane the client pinned, or None to let the scheduler choose.
        model: where it chooses, whose lanes: the name of another model than the lab's, or "".
        prompt_tokens: estimate of the prompt's length, >= 0.
        max_output_tokens: the most the answer may hold, >= 1.
        num_sequences: what the engine computes side by side for it, prompts x choices, >= 1; each takes a slot.
        needs_plain_decoding: True when it uses sampling options that a speculating engine refuses.
        tenant: who pays; fairness and shares are between tenants.
        band: index of its priority band, 0 for the highest.
        ttft_deadline_s: seconds from arrival within which the first token is wanted; None: no deadline.
        max_queue_s: seconds it may wait; 0: run now or be refused; None: as long as the scheduler allows.
        predicted_output_tokens: what the answer will probably hold, in 1..max_output_tokens; 0: not predicted.
        prefix_blocks: hashes of the prompt's leading blocks, each covering all before it.
        age_s: seconds since its first arrival, for one that is rerouted or submitted again.
        waited_s: those of them in which it waited for this lease; the rest it spent on a replica that broke.
        avoid_replica: a replica that just failed it.
        kind: of its text; told apart only where placement asks for it, else all are open.
    """

    request_id: str
    lane: str | None
    prompt_tokens: int
    max_output_tokens: int
    needs_plain_decoding: bool = False
    tenant: str = DEFAULT_TENANT
    band: int = 0
    ttft_deadline_s: float | None = None
    max_queue_s: float | None = None
    predicted_output_tokens: int = 0
    prefix_blocks: tuple[int, ...] = ()
    age_s: float = 0.0
    waited_s: float = 0.0
    avoid_replica: str | None = None
    num_sequences: int = 1
    model: str = ""
    kind: TextKind = TextKind.OPEN

    @property
    def is_patient(self) -> bool:
        """Whether its client set no limit to its waiting."""
        return self.max_queue_s is None and self.ttft_deadline_s is None

    @property
    def reserved_tokens(self) -> int:
        """Tokens booked on a replica while the request runs: prompt + maximum output."""
        return self.prompt_tokens + self.max_output_tokens


@dataclass(frozen=True, slots=True)
class Lease:
    """Room on one replica, held from dispatch until the stream ends.

    A lease names its borrower, so a double release is an error and not a counter that drifts.
    Nothing expires it by age: a long answer is not a leak.
    """

    request_id: str
    replica_id: str
    reserved_tokens: int  # prompt + maximum output, >= 1
    num_sequences: int = 1  # slots of the replica


class ReplicaVerdict(StrEnum):
    """What the end of a request says of its replica."""

    HEALTHY = "healthy"  # it answered, be it with a 4xx
    FAILED = "failed"  # connection refused or broken, timeout, 5xx
    DIED = "died"  # it broke with the request in its first step, which may be why
    UNTOLD = "untold"  # the client left first


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a granted request ended.

    Attributes:
        first_token_s: seconds from grant to first token; None when there was none.
        output_tokens: by the engine's usage; None when unknown.
        num_steps: engine steps that gave it tokens, of all its sequences together; None when unknown.
    """

    verdict: ReplicaVerdict = ReplicaVerdict.UNTOLD
    first_token_s: float | None = None
    output_tokens: int | None = None
    num_steps: int | None = None
