"""What a load run will do: its stages, written down before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from loadtest.client.record import faults_in_words
from loadtest.judge.slo import parse_slo
from loadtest.offer.arrivals import notes, schedule
from loadtest.offer.load import Arrival, ClosedLoop, Load, OpenLoop, TraceReplay
from loadtest.offer.workload import load_workload
from serving.tracing.events import MAX_RECORDING_S

DEFAULT_MAX_STAGE_S = 180.0

MAX_USERS = 1024  # of one process
MAX_REQUESTS = 1_000_000  # of one stage
MAX_STAGE_S = 86_400.0
MAX_STAGES = 1_000
MAX_OUTPUT_TOKENS = 131_072
MAX_PROMPT_TOKENS = 1_048_576
MAX_TIMEOUT_S = 3_600.0
MAX_ERROR_RATE = 0.5  # unless told otherwise
# What a recording may take beyond a stage's time box: the lab is read before and after it.
STEP_TRACE_MARGIN_S = 60.0


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One lane under one workload and one load.

    Attributes:
        load: users in a closed loop, arrivals at a rate, or a recorded trace.
        requests: how many count; in a closed loop at least one for each user. A closed loop sends more: the first
            of each user while they are coming, and others until the last that counts has ended.
        first_prompt: number of the first prompt; the stage uses the next ones from there on.
        max_stage_s: time box; a stage that reaches it is cut and marked.
        estimated_s: how long it should take.
        repeat: 0 for the first time this stage runs, 1 for the second, and so on.
        warmup_requests: the first arrivals of an open loop, sent before `requests` and left out of every figure.
        stop_early: end it as soon as the plan's SLO can no longer be attained.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    lane: str
    workload: str
    load: Load
    requests: int
    first_prompt: int = 0
    max_stage_s: float = DEFAULT_MAX_STAGE_S
    estimated_s: float = 10.0
    repeat: int = 0
    warmup_requests: int = 0
    stop_early: bool = False

    def __post_init__(self) -> None:
        load_workload(self.workload)
        users = self.load.users if isinstance(self.load, ClosedLoop) else 1
        self._check("users", users, 1, MAX_USERS)
        if self.requests < users:
            raise ValueError(
                f"stage {self.key}: requests={self.requests} is below {users}: some users would send nothing"
            )
        self._check("requests", self.requests, 1, MAX_REQUESTS)
        self._check("first_prompt", self.first_prompt, 0, 10**9)
        self._check("max_stage_s", self.max_stage_s, 0.1, MAX_STAGE_S)
        self._check("estimated_s", self.estimated_s, 0, math.inf)
        self._check("repeat", self.repeat, 0, MAX_STAGES)
        most_warmup = 0 if isinstance(self.load, ClosedLoop) else MAX_REQUESTS
        self._check("warmup_requests", self.warmup_requests, 0, most_warmup)

    def _check(self, name: str, value: float, lowest: float, highest: float) -> None:
        if not lowest <= value <= highest:  # not a number is outside too
            raise ValueError(f"stage {self.key}: {name}={value} must be in {lowest:g}..{highest:g}")

    @property
    def group(self) -> str:
        """What the repeats of one stage share."""
        return f"{self.lane}/{self.workload}/{self.load.label}"

    @property
    def key(self) -> str:
        return self.group + (f"/repeat {self.repeat + 1}" if self.repeat else "")

    @property
    def num_before(self) -> int:
        """Requests sent before those that count."""
        return self.load.users if isinstance(self.load, ClosedLoop) else self.warmup_requests

    def prompt_of(self, offset: int) -> int:
        """Number of the prompt of the stage's request `offset`, from 0; those after what counts share a few."""
        counted_end = self.num_before + self.requests
        return self.first_prompt + (
            offset if offset < counted_end else counted_end + (offset - counted_end) % self.num_before
        )

    @property
    def prompts_end(self) -> int:
        """Number just past the last prompt that the stage uses."""
        num_after = self.num_before if isinstance(self.load, ClosedLoop) else 0
        return self.first_prompt + self.num_before + self.requests + num_after


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole load run: stages in the order they run, one after another.

    Attributes:
        stages: empty for a capacity search, which plans as it goes.
        seed: of prompts and arrivals.
        output_tokens: length of an answer, where a workload's text or a recorded trace does not give its own; None:
            as long as the workload has it.
        request_timeout_s: from the sending of a request to the end of its answer; None: as long as it takes.
        needs_done: an answer without the closing `[DONE]` is cut off, even if it is whole by all other signs.
        max_error_rate: share of a stage's requests that may fail, 0 to 1; above it the stage ends. 1: never.
        slo: the objective, in the form `loadtest.judge.slo` reads.
        prompt_tokens: size of a prompt, where a recorded trace does not give its own; None: the workload's own.
        tokenizer: file or model directory that counts them; None: the served model's if it is at hand.
        trace: record the engine steps of each stage.
        models: by lane, what it is asked for by where that is not `model`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    base_url: str
    model: str
    stages: tuple[StagePlan, ...]
    name: str = "bench"
    seed: int = 0
    output_tokens: int | None = None
    connect_timeout_s: float = 5
    idle_timeout_s: float = 300
    request_timeout_s: float | None = None
    needs_done: bool = False
    max_error_rate: float = MAX_ERROR_RATE
    slo: str | None = None
    prompt_tokens: int | None = None
    tokenizer: str | None = None
    trace: bool = False
    models: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.stages) > MAX_STAGES:
            raise ValueError(f"{len(self.stages)} stages are more than {MAX_STAGES}")
        longest_s = MAX_RECORDING_S - STEP_TRACE_MARGIN_S
        for stage in self.stages:
            if self.trace and stage.max_stage_s > longest_s:
                raise ValueError(
                    f"stage {stage.key}: max_stage_s={stage.max_stage_s:g} must be at most {longest_s:g} "
                    f"where steps are recorded (trace)"
                )
        if self.output_tokens is not None and not 2 <= self.output_tokens <= MAX_OUTPUT_TOKENS:
            raise ValueError(
                f"output_tokens={self.output_tokens} must be in 2..{MAX_OUTPUT_TOKENS}: one token has no TPOT"
            )
        if self.prompt_tokens is not None and not 1 <= self.prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ValueError(f"prompt_tokens={self.prompt_tokens} must be in 1..{MAX_PROMPT_TOKENS}")
        for name in ("connect_timeout_s", "idle_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_TIMEOUT_S:
                raise ValueError(f"{name}={value} must be above 0, at most {MAX_TIMEOUT_S:g}")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate={self.max_error_rate} must be in 0..1")
        if self.slo is not None:
            parse_slo(self.slo)
        by_key: dict[str, StagePlan] = {}
        for stage in self.stages:
            if other := by_key.get(stage.key):
                raise ValueError(f"stage {stage.key} is planned twice{_namesakes(other.load, stage.load)}")
            by_key[stage.key] = stage

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes in the order they first run."""
        return tuple(dict.fromkeys(stage.lane for stage in self.stages))

    @property
    def num_requests(self) -> int:
        """Requests of all stages, warm-up left out."""
        return sum(stage.requests for stage in self.stages)

    @property
    def estimated_s(self) -> float:
        return sum(stage.estimated_s for stage in self.stages)

    @property
    def longest_stage_s(self) -> float:
        """The largest time box."""
        return max((stage.max_stage_s for stage in self.stages), default=0.0)


def _namesakes(load: Load, other: Load) -> str:
    """How two loads of one name differ, where they do."""
    match load, other:
        case OpenLoop(), OpenLoop() if load.duration_s != other.duration_s:
            difference = f"for {load.duration_s:g} s and for {other.duration_s:g} s"
        case TraceReplay(), TraceReplay() if load.path != other.path:
            difference = f"from {load.path} and from {other.path}"
        case TraceReplay(), TraceReplay() if load.unit != other.unit:
            difference = f"with unit={load.unit} and with unit={other.unit}"
        case _:
            return ""
    return f", {difference}: a load's name does not tell them apart; measure them in two runs"


def schedule_seed(stage: StagePlan, seed: int) -> str:
    """The lane has no part in it: lanes get the same arrivals, repeats get others."""
    return f"{seed}/{stage.workload}/{stage.load.label}/{stage.repeat}"


def arrivals_of(stage: StagePlan, seed: int) -> tuple[Arrival, ...]:
    """What an open loop or a recorded trace sends when, warm-up first.

    Raises:
        ValueError: the schedule holds fewer requests than the plan.
    """
    assert not isinstance(stage.load, ClosedLoop)
    planned = stage.warmup_requests + stage.requests
    arrivals = schedule(stage.load, schedule_seed(stage, seed))
    if len(arrivals) < planned:
        raise ValueError(
            f"stage {stage.key}: {planned} requests are planned (requests, warmup_requests), "
            f"but its schedule of seed {seed} holds {len(arrivals)}"
        )
    return arrivals[:planned]


def notes_of(plan: Plan) -> tuple[str, ...]:
    """What of the files that a plan names is not sent, a line each, each once.

    Raises:
        ValueError: one of them cannot be read.
    """
    return tuple(
        dict.fromkeys(
            note
            for stage in plan.stages
            for note in (*notes(stage.load), *load_workload(stage.workload).notes)
        )
    )


_ADAPTER = TypeAdapter(Plan)


def read_plan(path: Path) -> Plan:
    """Read a plan written by hand or by `write_plan`.

    Raises:
        ValueError: with the file, the field and the fault.
    """
    try:
        plan = _ADAPTER.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: {faults_in_words(error)}") from None
    if not plan.stages:
        raise ValueError(
            f"{path}: stages: the plan has none; a sweep's has none either: `tandem sweep --resume` goes on with it"
        )
    return plan


def write_plan(plan: Plan, path: Path) -> None:
    path.write_bytes(_ADAPTER.dump_json(plan, indent=1) + b"\n")
