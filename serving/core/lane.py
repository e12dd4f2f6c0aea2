"""Lanes and replicas, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ANY_LANE = "any"  # label of requests that leave the lane to the scheduler, until it has chosen one


class Strategy(StrEnum):
    """How a lane decodes."""

    SEQUENTIAL = "sequential"
    BATCHED = "batched"
    SPECULATIVE = "speculative"
    ITERATIVE = "iterative"


# Those whose steps verify drafts, wherever the drafts come from.
DRAFTING = frozenset({Strategy.SPECULATIVE, Strategy.ITERATIVE})


@dataclass(frozen=True, slots=True)
class AttachedServer:
    """A server that somebody else runs, as requests reach it.

    Attributes:
        url: base URL of its API, `http://` or `https://`, without `/v1`.
        model: its own name of the model.
        takes_stream_options: whether it takes a stream that asks for usage.
    """

    url: str
    model: str
    takes_stream_options: bool = True


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a ready engine replica tells the scheduler about itself.

    Attributes:
        replica_id: unique over the cluster's life; a restarted replica has a new one.
        lane: name of its lane.
        strategy: how it decodes.
        url: base URL of its HTTP server, `http://host:port`; of an attached server's agent.
        max_running: requests the scheduler may have running on it at once, >= 1.
        takes_unpinned: whether requests that pin no lane may come here.
        server: where requests go instead of `url`; None for an engine of the lab's own.
        model: whose such requests: the name of another model than the lab's, or "".
        cores: what it computes on, as a name: replicas that say the same take turns there; "": what no other has,
            as far as it knows.
    """

    replica_id: str
    lane: str
    strategy: Strategy
    url: str
    max_running: int
    takes_unpinned: bool
    server: AttachedServer | None = None
    model: str = ""
    cores: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is.

    Attributes:
        name: as `lanes[].engine` has it.
        has_model: whether it computes with a model; figures of one that does not say nothing of a model.
        device, dtype: `none` without a model, `unknown` of a server that somebody else runs.
        niceness: of its process; None where it is not told.
        group_niceness: of its scheduling group; None where it has none of its own.
        arguments: options of `vllm serve` that it was started with; none of an engine that has none.
        lacks: what it was found not to do, in sentences.
        tokenizer: tells tokenizers apart, by their files; "" where they are not known.
        max_step_tokens: positions of one step at most; None where it is not known.
        kv_tokens: positions that its KV cache holds; None likewise.
    """

    name: str
    version: str
    has_model: bool
    device: str
    dtype: str
    niceness: int | None = None
    group_niceness: int | None = None
    arguments: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    tokenizer: str = ""
    max_step_tokens: int | None = None
    kv_tokens: int | None = None


def has_model(replica: Mapping[str, Any]) -> bool:
    """Whether a replica's engine computes with a model, by what `/replicas`, `/lab` and run.json hold of it."""
    # Labs of before this key had but one engine without.
    return bool(replica.get("has_model", replica.get("engine") != "simulated"))
