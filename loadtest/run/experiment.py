"""What a bench run is asked to do: a YAML file, flags, or a file with flags over it; and the plan made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loadtest.client.lane_models import other_names
from loadtest.judge.slo import parse_slo
from loadtest.offer.arrivals import parse_load
from loadtest.offer.load import ClosedLoop, Load
from loadtest.offer.workload import load_workload
from loadtest.run.plan import (
    MAX_ERROR_RATE,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_STAGE_S,
    MAX_TIMEOUT_S,
    MAX_USERS,
    Plan,
    StagePlan,
)
from loadtest.run.planning import plan_stages
from serving.core.lane import ANY_LANE, Strategy
from serving.run_directory import RUN_NAME

MAX_FILE_BYTES = 65_536
MAX_REPEATS = 100
MAX_SEED = 2**31 - 1
DEFAULT_CONCURRENCY = (1, 4, 8)

# Lists of YAML become tuples; what is in them is not converted.
Texts = Annotated[tuple[str, ...], Field(strict=False, max_length=64)]


class Block(BaseModel):
    """Lanes x workloads x loads x repeats.

    Attributes:
        lanes: in the order they take turns; empty: all of the lab's.
        loads: each as `loadtest.offer.arrivals.parse_load` reads it, such as `8` or `poisson:2/s,60s`.
        concurrency: the closed loops without think time among the loads; 1, 4, 8 where no load is given at all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lanes: Texts = ()
    workloads: Annotated[Texts, Field(min_length=1)] = ("copy", "story")
    loads: Annotated[tuple[str | int, ...], Field(strict=False, max_length=64)] = ()
    concurrency: Annotated[
        tuple[Annotated[int, Field(ge=1, le=MAX_USERS)], ...], Field(strict=False, max_length=64)
    ] = ()
    repeats: int = Field(1, ge=1, le=MAX_REPEATS)

    @field_validator("workloads")
    @classmethod
    def _known(cls, workloads: tuple[str, ...]) -> tuple[str, ...]:
        for name in workloads:
            load_workload(name)
        return workloads

    @field_validator("loads")
    @classmethod
    def _readable(cls, loads: tuple[str | int, ...]) -> tuple[str | int, ...]:
        for text in loads:
            parse_load(str(text))
        return loads

    @property
    def all_loads(self) -> tuple[Load, ...]:
        """Levels of concurrency first, then the other loads as they were given."""
        levels = self.concurrency or (() if self.loads else DEFAULT_CONCURRENCY)
        closed: list[Load] = [ClosedLoop(users) for users in sorted(set(levels))]
        return (*closed, *(parse_load(str(text)) for text in self.loads))


class Experiment(Block):
    """A block, others that run after it, and what all of them share.

    Attributes:
        also: further blocks, such as a baseline that needs fewer repeats.
        output_tokens, prompt_tokens, tokenizer: as in `loadtest.run.plan.Plan`.
        seed: of prompts and arrivals; None: a fresh one.
        slo: the objective, such as `ttft_p95<2s,tpot_p95<300ms`.
        stop_early: end a stage as soon as the objective can no longer be attained.
        request_timeout_s, needs_done, max_error_rate: as in `loadtest.run.plan.Plan`.
        max_stage_s: time box of each stage; None: 180 s, or an open loop's length and 60 s.
        warmup_s: the first part of an open loop, which no figure counts.
        trace: record the engine steps of each stage, for the report's pictures of them.
    """

    name: Annotated[str, Field(pattern=f"^{RUN_NAME.pattern}$")] = "bench"
    also: Annotated[tuple[Block, ...], Field(strict=False, max_length=16)] = ()
    output_tokens: int | None = Field(None, ge=2, le=MAX_OUTPUT_TOKENS)
    prompt_tokens: int | None = Field(None, ge=1, le=MAX_PROMPT_TOKENS)
    tokenizer: str | None = None
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    slo: str | None = None
    stop_early: bool = False
    request_timeout_s: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    needs_done: bool = False
    max_error_rate: float = Field(MAX_ERROR_RATE, ge=0, le=1)
    max_stage_s: float | None = Field(None, ge=0.1, le=MAX_STAGE_S, allow_inf_nan=False)
    warmup_s: float = Field(0.0, ge=0, le=MAX_STAGE_S, allow_inf_nan=False)
    trace: bool = False

    @field_validator("slo")
    @classmethod
    def _an_objective(cls, slo: str | None) -> str | None:
        if slo is not None:
            parse_slo(slo)
        return slo

    @model_validator(mode="after")
    def _early_stops_have_an_objective(self) -> Self:
        if self.stop_early and self.slo is None:
            raise ValueError("stop_early needs an objective (slo)")
        return self


def split_names(text: str) -> tuple[str, ...]:
    """Names parted by commas; one within `mixed:chat=3,copy=1` parts nothing."""
    return tuple(part.strip() for part in re.split(r",(?![\w-]+=)", text) if part.strip())


def read_file(path: Path) -> dict[str, Any]:
    """The keys and values of an experiment file, not yet checked.

    Raises:
        ValueError: with the file and the fault.
    """
    try:
        content = path.read_bytes()
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {len(content)} bytes; the limit is {MAX_FILE_BYTES}")
        text = content.decode("utf-8")
        # An alias can make millions of values of a few lines; an experiment needs none.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError(f"{path}: aliases (`*name`) are not allowed")
        data = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8: {error.reason} at byte {error.start}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected keys and values at the top, got {str(data)[:80]!r}")
    return data


def check(data: Mapping[str, Any], origin: str) -> Experiment:
    """The experiment that these keys and values describe.

    Args:
        origin: where they come from, for errors.

    Raises:
        ValueError: for each fault the key, the value and the bound.
    """
    try:
        return Experiment.model_validate(dict(data))
    except ValidationError as error:
        raise ValueError("\n".join(f"{origin}: {_explain(fault)}" for fault in error.errors())) from None


def choose_lanes(
    wanted: Sequence[str], description: Mapping[str, Any], setting: str
) -> list[tuple[str, Strategy]]:
    """The wanted lanes with their strategies; all of the lab's, in its order, when none is named.

    `any` leaves each request's lane to the scheduler, where a lane takes such requests.

    Args:
        setting: where they were named, for errors.

    Raises:
        ValueError: one is not in the lab that describes itself so.
    """
    lanes = description["config"]["lanes"]
    own = {lane["name"]: Strategy(lane["strategy"]) for lane in lanes}
    anywhere = any(lane.get("takes_unpinned", True) and lane.get("model") is None for lane in lanes)
    known = ({ANY_LANE: Strategy.BATCHED} if anywhere else {}) | own
    for lane in wanted:
        if lane not in known:
            raise ValueError(
                f"lane {lane!r} is not in the lab, which has {', '.join(own)}"
                + (f"; {ANY_LANE} leaves it to the scheduler" if ANY_LANE in known else "")
                + f" ({setting})"
            )
    return [(lane, known[lane]) for lane in wanted or own]


def make_plan(experiment: Experiment, base_url: str, description: Mapping[str, Any], seed: int) -> Plan:
    """The stages of an experiment on the lab that describes itself so.

    Args:
        seed: used where the experiment has none.

    Raises:
        ValueError: a lane is not in the lab, or a load does not fit its time box.
    """
    seed = seed if experiment.seed is None else experiment.seed
    stages: list[StagePlan] = []
    for block in (experiment, *experiment.also):
        stages += plan_stages(
            choose_lanes(block.lanes, description, "lanes"),
            block.workloads,
            block.all_loads,
            output_tokens=experiment.output_tokens,
            seed=seed,
            repeats=block.repeats,
            max_stage_s=experiment.max_stage_s,
            warmup_s=experiment.warmup_s,
            stop_early=experiment.stop_early,
            first_prompt=max((stage.prompts_end for stage in stages), default=0),
        )
    return Plan(
        base_url=base_url,
        model=description["model"]["name"],
        models=other_names(description["config"]),
        stages=tuple(stages),
        name=experiment.name,
        seed=seed,
        output_tokens=experiment.output_tokens,
        request_timeout_s=experiment.request_timeout_s,
        needs_done=experiment.needs_done,
        max_error_rate=experiment.max_error_rate,
        slo=experiment.slo,
        prompt_tokens=experiment.prompt_tokens,
        tokenizer=experiment.tokenizer,
        trace=experiment.trace,
    )


def _explain(fault: Any) -> str:
    key = ".".join(map(str, fault["loc"])) or "(top)"
    shown = repr(fault["input"])[:100]
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key (value {shown})"
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("a valid tuple", "a list")
    return f"{key} = {shown}: {message}"
