"""Builds the requests of a run, each with its id and its place."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from loadtest.client.record import RequestLabel
from loadtest.client.sse_client import ClientSettings, StreamingClient
from loadtest.offer.load import Arrival
from loadtest.offer.prompt_tokens import BYTE_ESTIMATE, TokenCounter
from loadtest.offer.workload import Workload, load_workload
from loadtest.run.plan import Plan, StagePlan
from serving.core.client_key import client_key
from serving.core.lane import ANY_LANE

Clock = Callable[[], float]

MAX_SLUG = 60
BEFORE_THE_STAGE = -1
FIRST_WARM_UP_PROMPT = 2 * 10**9  # above all that a plan may have


def slug(key: str) -> str:
    """A stage's key as part of an id: ASCII, of bounded length, still its own."""
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", key)
    return (
        slug
        if len(slug) <= MAX_SLUG and key.isascii()
        else f"{slug[:MAX_SLUG]}-{zlib.crc32(key.encode()):08x}"
    )


@dataclass(frozen=True, slots=True)
class MadeRequest:
    """A request that only has to be sent.

    Attributes:
        offset: its place in its stage, counted from 0 with those before what counts; -1 for a warm-up of the lane.
    """

    offset: int
    label: RequestLabel
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sender:
    """Builds the requests of a run and connects those who send them.

    Attributes:
        id_prefix: what the ids of its requests begin with; they show up in the gateway's log.
        salt: what must not find its prompts in a cache is given another.
        clock: seconds since the run started.
        counter: counts the tokens of a prompt whose size is given.
        counters: by lane, what counts instead where it has a model of its own.
    """

    plan: Plan
    id_prefix: str
    salt: str
    clock: Clock
    counter: TokenCounter = BYTE_ESTIMATE
    counters: Mapping[str, TokenCounter] = field(default_factory=dict)

    def connect(self) -> StreamingClient:
        """A client that opens its connection with its first request."""
        plan = self.plan
        settings = ClientSettings(
            plan.base_url,
            plan.connect_timeout_s,
            plan.idle_timeout_s,
            plan.request_timeout_s,
            client_key(),
            plan.needs_done,
        )
        return StreamingClient(settings, self.clock)

    def workload(self, stage: StagePlan) -> Workload:
        """The stage's workload in the sizes of this run."""
        return load_workload(
            stage.workload,
            prompt_tokens=self.plan.prompt_tokens,
            output_tokens=self.plan.output_tokens,
            counter=cast(
                "Any", self.counters.get(stage.lane, self.counter)
            ),  # is hashable, which the cache wants and the protocol does not say
        )

    def warm_up(self, stage: StagePlan, output_tokens: int | None = None) -> MadeRequest:
        """One request before a stage. No stage has its prompt, nor has a warm-up before another stage of the lane:
        nothing of it is in a cache.

        Args:
            output_tokens: None: as many as one of the stage.
        """
        number = FIRST_WARM_UP_PROMPT + stage.first_prompt
        label = RequestLabel(
            f"{self.id_prefix}-{slug(stage.key)}-warmup",
            stage.lane,
            stage.workload,
            "warmup",
            number,
            is_warmup=True,
        )
        return self._made(stage, BEFORE_THE_STAGE, label, Arrival(0.0, output_tokens=output_tokens))

    def request(self, stage: StagePlan, offset: int, arrival: Arrival | None = None) -> MadeRequest:
        """The stage's request number `offset`, counted from 0 with those before what counts.

        A prompt of a given size takes a millisecond or more to make: make it before its request is due.
        """
        label = RequestLabel(
            request_id=f"{self.id_prefix}-{slug(stage.key)}-{stage.first_prompt + offset}",
            lane=stage.lane,
            workload=stage.workload,
            stage=stage.key,
            number=stage.prompt_of(offset),
            is_warmup=offset < stage.num_before,
            is_tail=offset >= stage.num_before + stage.requests,
        )
        return self._made(stage, offset, label, arrival)

    def _made(
        self, stage: StagePlan, offset: int, label: RequestLabel, arrival: Arrival | None
    ) -> MadeRequest:
        model = self.plan.models.get(stage.lane, self.plan.model)
        body = self.workload(stage).body(
            # Without a lane the scheduler chooses one.
            model=model if stage.lane == ANY_LANE else f"{model}:{stage.lane}",
            seed=self.plan.seed,
            number=label.number,
            arrival=arrival,
            salt=self.salt,
        )
        return MadeRequest(offset, label, body)
