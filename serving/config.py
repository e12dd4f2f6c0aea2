"""The lab's settings: one typed YAML file, read once, frozen.

Unknown keys, impossible values and doubled names are refused with the file, the key, the value and the bound.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from serving import hub
from serving.core import engine_options
from serving.core.addresses import GATEWAY_PORT, LOOPBACK, server_root, server_url_fault, without_secrets
from serving.core.errors import MAX_SHOWN_CHARS, ConfigError
from serving.core.lane import ANY_LANE, Strategy
from serving.core.request import TENANT_NAME
from serving.core.speculation.acceptance import Rates, checked_rates, geometric_rates

Host = Annotated[str, Field(min_length=1, max_length=253)]
NAME_PATTERN = r"^[a-z0-9][a-z0-9.\-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Port = Annotated[int, Field(ge=1, le=65535)]
Order = Literal["fcfs", "priority", "sjf", "edf", "fair"]
Placement = Literal["least_outstanding", "power_of_two", "prefix_affinity", "adaptive"]
EngineName = Literal["vllm", "simulated", "openai"]

ORDERS: tuple[str, ...] = get_args(Order)
PLACEMENTS: tuple[str, ...] = get_args(Placement)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
ENGINES_WITHOUT_MODEL: frozenset[EngineName] = frozenset({"simulated"})
# Keys of a lane that say how an engine of the lab's own is made; a server that already runs has none of them.
KEYS_OF_OWN_ENGINES = frozenset(
    {
        "kv_cache_gib",
        "gpu_memory_utilization",
        "prefix_caching",
        "num_cpus",
        "num_gpus",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "speculation",
        "refinement",
        "simulated",
        "autoscaling",
    }
)
KEYS_OF_SERVERS = frozenset({"urls", "api_key_env", "served_model", "health", "metrics"})
SERVER_PATH = r"^/[!-~]*$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# As a browser sends it: scheme, host and port, no path.
ORIGIN = re.compile(r"https?://[a-z0-9.\-\[\]:]{1,253}")
DEFAULT_KV_CACHE_GIB = 0.5
MAX_NODES = 100_000  # scalars, lists and mappings of a file, aliases written out
# Of times made of a `SimulatedProfile`: three steps of 10 ms are 30 ms, whatever floating point says.
ROUNDING_S = 1e-6


class _Settings(BaseModel):
    # strict: YAML has types of its own; `true` is no port and "2" is no count.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(_Settings):
    """The model that lanes serve, but for those with one of their own."""

    name: Name = "smollm2-135m"
    # `auto`: the default model, prepared on first use; `org/name@revision`: a hub's; else a checkpoint directory.
    path: str = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = Field(2048, ge=16, le=1_048_576)  # tokens, prompt and answer together


class GatewayConfig(_Settings):
    """The OpenAI-compatible front door."""

    host: Host = LOOPBACK
    port: Port = GATEWAY_PORT
    replicas: int | None = Field(None, ge=1, le=64)  # None: 2 where there are cores for it, else 1
    max_body_bytes: int = Field(
        1_048_576, ge=1024, le=16_777_216
    )  # reading one holds up all streams: 1 ms a MiB
    max_connections: int = Field(10_000, ge=1, le=1_000_000)  # of each gateway; more are answered 503
    header_timeout_s: Seconds = 10  # from a connection, or a request's first byte, to the end of its head
    upload_timeout_s: Seconds = 60  # from the end of a request's head to the last byte of its body
    # One key a line; a path on the gateway's node, read there. Without it TANDEM_API_KEYS counts alone.
    api_keys_file: str | None = Field(None, min_length=1, max_length=4096)
    # Of pages that browsers let use the API, such as `https://chat.example.org`; `*` is all of them.
    cors_allowed_origins: Annotated[tuple[str, ...], Strict(False)] = ()
    connect_timeout_s: Seconds = 5
    first_byte_timeout_s: Seconds = 300
    idle_timeout_s: Seconds = 60
    answer_timeout_s: Seconds = 1800  # for an answer that is not streamed: its first byte comes with its last
    client_stall_timeout_s: Seconds = 300  # how long a client may take nothing of its answer
    request_log: bool = False  # a line in the log for each request that ends; never what it said

    @field_validator("cors_allowed_origins")
    @classmethod
    def _origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for origin in given:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{_shown(origin)} must be an origin, such as https://chat.example.org, or *"
                )
        return given

    @field_validator("api_keys_file")
    @classmethod
    def _absolute(cls, given: str | None) -> str | None:
        if given is not None and not Path(given).is_absolute():
            raise ValueError(f"{_shown(given)} must be an absolute path: it is read where the gateway runs")
        return given


class SloConfig(_Settings):
    """What a stream must keep to count as good, and how many should."""

    ttft_s: Seconds = 2
    tpot_s: Seconds = 0.3
    objective: float = Field(0.95, ge=0.5, lt=1)  # share of streams


class TelemetryConfig(_Settings):
    """Where spans go."""

    # Base URL of an OTLP/HTTP collector; without it OpenTelemetry's own environment variables count.
    otlp_endpoint: str | None = Field(None, min_length=1, max_length=2048)

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, given: str | None) -> str | None:
        if given is not None and not given.startswith(("http://", "https://")):
            raise ValueError(f"{_shown(given)} must be a URL that begins with http:// or https://")
        if given is not None and urlsplit(given).username is not None:
            # Unlike the environment, a config is on pages, in reports and in what `tandem export` writes.
            raise ValueError("must hold no user and password; OTEL_EXPORTER_OTLP_HEADERS can")
        return given


class BandConfig(_Settings):
    """A priority band, highest first in the list."""

    name: Name
    reserved_share: float = Field(
        0, ge=0, lt=1
    )  # of slots and queue, kept free for this band and higher ones


class TenantConfig(_Settings):
    """What one tenant gets; tenants that are not listed get the defaults."""

    name: str = Field(min_length=1, max_length=128)
    weight: float = Field(1, gt=0, le=1000)  # served tokens in proportion to it, under order `fair`
    queue_share: float | None = Field(None, gt=0, le=1)  # overrides scheduler.tenant_queue_share

    @field_validator("name")
    @classmethod
    def _sendable(cls, given: str) -> str:
        if not TENANT_NAME.fullmatch(given):
            raise ValueError(
                f"{_shown(given)} must be printable ASCII without spaces: no header can carry it"
            )
        return given


class SchedulerConfig(_Settings):
    """Admission, order, placement, and how failures are met."""

    max_waiting_requests: int = Field(256, ge=0, le=1_000_000)
    max_waiting_tokens: int = Field(1_048_576, ge=1)  # reserved: prompt + maximum output
    max_queue_wait_s: Seconds = 600  # a request that waited this long is answered 504
    tenant_queue_share: float = Field(1, gt=0, le=1)  # part of the queue that one tenant may fill
    order: Order = "fcfs"
    ageing_tokens_per_s: float = Field(2, ge=0, le=1_000_000)  # sjf: what a second of waiting is worth
    bands: Annotated[tuple[BandConfig, ...], Strict(False)] = (
        BandConfig(name="high"),
        BandConfig(name="normal"),
        BandConfig(name="low"),
    )
    default_band: Name = "normal"
    tenants: Annotated[tuple[TenantConfig, ...], Strict(False)] = ()
    placement: Placement = "least_outstanding"
    prefix_gap_tokens: int = Field(1024, ge=0)  # prefix_affinity: load beats locality above this gap
    # adaptive: what `tandem calibrate` wrote, read where the lab is started
    profile: str | None = Field(None, min_length=1, max_length=4096)
    # adaptive: a lane is left for one that is better by this share
    placement_margin: float = Field(0.05, ge=0, le=10)
    breaker_failures: int = Field(3, ge=1, le=1000)  # in a row; they open a replica's breaker
    breaker_cooldown_s: Seconds = 5
    drain_timeout_s: Seconds = 30  # how long running streams may go on when the lab or a replica stops
    seed: int = Field(0, ge=0, le=2**63 - 1)  # of the random choice between equally loaded replicas

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for key, names in (
            ("bands", [b.name for b in self.bands]),
            ("tenants", [t.name for t in self.tenants]),
        ):
            doubled = [name for name, count in Counter(names).items() if count > 1]
            if doubled:
                raise ValueError(f"{key}: name {doubled[0]!r} is used twice; names must be distinct")
        if self.default_band not in [band.name for band in self.bands]:
            raise ValueError(
                f"default_band={self.default_band!r} is none of {[band.name for band in self.bands]}"
            )
        if self.placement == "adaptive" and self.profile is None:
            raise ValueError(
                "placement='adaptive' needs profile: the file that `tandem calibrate` writes of these lanes"
            )
        if (total := sum(band.reserved_share for band in self.bands)) >= 1:
            raise ValueError(f"bands: reserved_share adds up to {total:g}; it must stay below 1")
        return self

    def band_index(self, name: str) -> int | None:
        """Place of a band, 0 for the highest; None when there is none of that name."""
        names = [band.name for band in self.bands]
        return names.index(name) if name in names else None


# Methods whose drafts come from a checkpoint of their own: a head on the lane's model, or a smaller model.
METHODS_WITH_HEAD = frozenset({"eagle", "eagle3"})
METHODS_WITH_DRAFT = METHODS_WITH_HEAD | {"draft_model"}
Drafter = Literal["ngram", "eagle", "eagle3", "draft_model"]
# Of vLLM's; it gives a proposer of ours, as `oracle`, no length.
METHODS_WITH_TABLE = METHODS_WITH_DRAFT | {"ngram"}
# Keys of `SpeculationConfig` and the methods that have them: with another of these methods they are refused, and
# vLLM is not told them.
METHODS_OF_KEY = {
    "model": METHODS_WITH_DRAFT,
    "prompt_lookup_min": frozenset({"ngram"}),
    "prompt_lookup_max": frozenset({"ngram"}),
    "suffix_decoding_max_tree_depth": frozenset({"suffix"}),
    "suffix_decoding_max_cached_requests": frozenset({"suffix"}),
    "suffix_decoding_max_spec_factor": frozenset({"suffix"}),
    "suffix_decoding_min_token_prob": frozenset({"suffix"}),
    "num_speculative_tokens_per_batch_size": METHODS_WITH_TABLE,
    "profile": METHODS_WITH_TABLE | {"adaptive"},
    "drafter": frozenset({"adaptive"}),
    "costs": frozenset({"adaptive"}),
    "probe_steps": frozenset({"adaptive"}),
    "acceptance": frozenset({"oracle"}),
    "seed": frozenset({"oracle"}),
}
# Of these a lane that is `adaptive` has those of its drafter.
KEYS_OF_DRAFTERS = frozenset({"model", "prompt_lookup_min", "prompt_lookup_max"})
# What vLLM is never told.
KEYS_OF_OURS = frozenset({"profile", "drafter", "costs", "probe_steps", "acceptance", "seed"})
KNOWN_METHODS = frozenset().union(*METHODS_OF_KEY.values())
METHODS_WITH_PACKAGE = frozenset({"suffix"})  # that no lock has


CONTEXT_TOKENS = 512  # what a sequence is taken to hold where nobody says


class ProfileUse(_Settings):
    """What is read of a profile that `tandem calibrate` wrote."""

    path: str = Field(min_length=1, max_length=4096)  # from the config's directory
    lane: Name | None = None  # None: that of the same name
    workload: str | None = Field(None, min_length=1, max_length=1024)  # None: the mean of all
    context_tokens: int = Field(CONTEXT_TOKENS, ge=0, le=1_048_576)  # of each sequence, for the table


class StepCosts(_Settings):
    """What a step takes: fixed_s + token_s * positions + kv_token_s * positions in the KV cache, and with k drafts
    draft_step_s + k * (draft_pass_s + draft_pass_sequence_s * batch) beside it. Only their ratios decide."""

    fixed_s: float = Field(ge=0, le=3600)
    token_s: float = Field(ge=0, le=3600)
    kv_token_s: float = Field(0, ge=0, le=3600)
    draft_step_s: float = Field(0, ge=0, le=3600)
    draft_pass_s: float = Field(0, ge=0, le=3600)
    draft_pass_sequence_s: float = Field(0, ge=0, le=3600)

    @model_validator(mode="after")
    def _takes_time(self) -> StepCosts:
        if not self.fixed_s + self.token_s > 0:
            raise ValueError("fixed_s and token_s are 0: a step takes time")
        return self


TableRow = Annotated[tuple[int, int, int], Strict(False)]  # batch from, to, tokens of a draft


class SpeculationConfig(_Settings):
    """Draft and verify; the settings have the names of vLLM's `speculative_config`.

    What is not known here, a method or a key, is for vLLM to judge: `needs_vllm` says that it must be asked.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    method: str = Field("ngram", min_length=1, max_length=64)
    num_speculative_tokens: int = Field(4, ge=1, le=64)
    # A directory, or `org/name@revision`: a model with the same vocabulary, or a head on the lane's model;
    # `auto`: the default model, or the eagle3 head that comes with Tandem for it.
    model: str | None = Field(None, min_length=1, max_length=4096)
    prompt_lookup_min: int = Field(2, ge=1, le=16)  # ngram
    prompt_lookup_max: int = Field(4, ge=1, le=16)  # ngram
    suffix_decoding_max_tree_depth: int = Field(24, ge=1, le=1024)  # suffix: longest match and draft together
    suffix_decoding_max_cached_requests: int = Field(
        10_000, ge=0, le=10_000_000
    )  # suffix: answers remembered
    suffix_decoding_max_spec_factor: float = Field(1, ge=0, le=64)  # suffix: draft / match, in tokens
    suffix_decoding_min_token_prob: float = Field(0.1, ge=0, le=1)  # suffix: share of earlier continuations
    # Length of a draft by batch; `auto`: by the profile, which `tandem up` writes out.
    num_speculative_tokens_per_batch_size: (
        Literal["auto"] | Annotated[tuple[TableRow, ...], Strict(False), Field(min_length=1)] | None
    ) = None
    profile: ProfileUse | None = None
    drafter: Drafter = "ngram"  # adaptive: whose drafts
    costs: StepCosts | None = None  # adaptive; None: those of the profile, which `tandem up` writes out
    probe_steps: int = Field(
        16, ge=1, le=100_000
    )  # adaptive: steps without a draft before a row is tried again
    # oracle: chance of each token, or the share of drafts whose first i tokens are right, i = 1, 2, ...
    acceptance: float | Annotated[tuple[float, ...], Strict(False)] = 0.7
    seed: int = Field(0, ge=0, le=2**63 - 1)  # oracle: of its errors

    @model_validator(mode="after")
    def _window(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min={self.prompt_lookup_min} exceeds prompt_lookup_max={self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _of_its_method(self) -> Self:
        if self.method not in KNOWN_METHODS:
            # vLLM is not told these, so nobody would hear them; a profile may be for its table.
            for key in sorted(self.model_fields_set & KEYS_OF_OURS - {"profile"}):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key} is for method {_listed(METHODS_OF_KEY[key])} only; method={self.method}"
                    )
            return self
        whose = f"method={self.method}" + (f", drafter={self.drafter}" if self.method == "adaptive" else "")
        if (self.drafts_by in METHODS_WITH_DRAFT) != (self.model is not None):
            raise ValueError(
                f"model must be given for methods {_listed(METHODS_WITH_DRAFT)}, and not for "
                f"{_listed(KNOWN_METHODS - METHODS_WITH_DRAFT - {'adaptive'})}; {whose}"
            )
        # Of what was given, not of defaults; `tandem export` keeps them apart, for it writes only what was set.
        for key in sorted(self.model_fields_set & METHODS_OF_KEY.keys()):
            method = self.drafts_by if key in KEYS_OF_DRAFTERS else self.method
            if method not in METHODS_OF_KEY[key] and getattr(self, key) is not None:
                raise ValueError(f"{key} is for method {_listed(METHODS_OF_KEY[key])} only; {whose}")
        return self

    @field_validator("num_speculative_tokens_per_batch_size")
    @classmethod
    def _table(cls, given: str | tuple[TableRow, ...] | None) -> str | tuple[TableRow, ...] | None:
        """As vLLM wants it, which would say so half a minute later."""
        last = 0
        for first, to, num_drafts in given if isinstance(given, tuple) else ():
            if not (last < first <= to and num_drafts >= 0 and (last or first == 1)):
                raise ValueError(
                    f"[{first}, {to}, {num_drafts}] must be [batch from, to, tokens of a draft], the first from 1, "
                    f"none before the end of the one before it ({last})"
                )
            last = to
        return given

    @field_validator("acceptance")
    @classmethod
    def _rates(cls, given: float | tuple[float, ...]) -> float | tuple[float, ...]:
        checked_rates([given] if isinstance(given, float) else given)
        return given

    @model_validator(mode="after")
    def _has_what_it_decides_by(self) -> Self:
        if isinstance(self.acceptance, tuple) and len(self.acceptance) != self.num_speculative_tokens:
            raise ValueError(
                f"acceptance has {len(self.acceptance)} positions, num_speculative_tokens="
                f"{self.num_speculative_tokens}: they must be as many"
            )
        table = self.num_speculative_tokens_per_batch_size
        for row in table if isinstance(table, tuple) and self.method in KNOWN_METHODS else ():
            if row[2] > self.num_speculative_tokens:
                raise ValueError(
                    f"num_speculative_tokens_per_batch_size: {list(row)} drafts {row[2]} tokens, more than "
                    f"num_speculative_tokens={self.num_speculative_tokens}"
                )
        is_cut = self.method == "adaptive" and self.drafter in METHODS_WITH_DRAFT
        if is_cut and (self.model_extra or {}).get("disable_padded_drafter_batch"):
            raise ValueError(
                "disable_padded_drafter_batch=true must be left out: drafts are cut in vLLM's padded batch; "
                f"method=adaptive, drafter={self.drafter}"
            )
        if self.method == "adaptive" and self.costs is None and self.profile is None:
            raise ValueError("method=adaptive decides by what a step costs: give profile or costs")
        if self.num_speculative_tokens_per_batch_size == "auto" and self.profile is None:
            raise ValueError(
                "num_speculative_tokens_per_batch_size=auto is made from a profile, which must be given"
            )
        if (
            self.profile is not None
            and self.method != "adaptive"
            and not self.num_speculative_tokens_per_batch_size
        ):
            raise ValueError(
                "profile is read for method adaptive, or for num_speculative_tokens_per_batch_size=auto; "
                f"method={self.method}"
            )
        return self

    @property
    def drafts_by(self) -> str:
        """The method that makes the drafts."""
        return self.drafter if self.method == "adaptive" else self.method

    @property
    def rates(self) -> Rates:
        """Of `oracle`: the share of drafts whose first i tokens are right, i = 1, 2, ...; shape (k,)."""
        if isinstance(self.acceptance, tuple):
            return self.acceptance
        return geometric_rates(self.acceptance, self.num_speculative_tokens)

    @property
    def needs_vllm(self) -> bool:
        """Whether it holds what only vLLM can judge, such as whether a package is there."""
        return self.method not in KNOWN_METHODS - METHODS_WITH_PACKAGE or bool(self.model_extra)

    @property
    def is_shipped(self) -> bool:
        """Whether the drafts come from the head that comes with Tandem."""
        return self.drafts_by == "eagle3" and self.model == "auto"

    @property
    def draft_path(self) -> str | None:
        """The checkpoint of the drafts, as `model.path` has it; None where `model` is not given, may be something
        else, or comes with Tandem."""
        is_checkpoint = (
            self.model
            and not self.is_shipped
            and (self.drafts_by in METHODS_WITH_DRAFT or hub.hub_name(self.model))
        )
        return self.model if is_checkpoint else None


class RefinementConfig(_Settings):
    """Guess and verify: the drafts of a step are the lane's own model's guesses in the steps before."""

    num_speculative_tokens: int = Field(4, ge=1, le=64)
    tails: bool = True  # Jacobi: what the model said after the first wrong guess is guessed next
    pool: bool = True  # lookahead: what followed what, in the request's text and in earlier guesses
    lookup_min: int = Field(1, ge=1, le=16)  # shortest run of tokens that is looked up in the pool
    lookup_max: int = Field(3, ge=1, le=16)
    max_ngrams: int = Field(8192, ge=1, le=1_048_576)  # in the pool of each running request

    @model_validator(mode="after")
    def _guesses(self) -> Self:
        if not (self.tails or self.pool):
            raise ValueError("tails=false and pool=false leave nothing to guess with: one must be true")
        if self.lookup_min > self.lookup_max:
            raise ValueError(f"lookup_min={self.lookup_min} exceeds lookup_max={self.lookup_max}")
        return self


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


class SimulatedProfile(_Settings):
    """The simulated engine's behaviour, for tests and policy studies only.

    A step that decodes b requests takes step_ms + step_ms_per_request * (b - 1), and each request gets
    `tokens_per_chunk` + (accepted drafts) tokens from it, sent as one chunk. The chunk that brings an answer to
    `stall_after_tokens` is followed by a pause: the next comes with the first step `stall_ms` or more later.
    """

    ttft_ms: float = Field(50, ge=0, le=60_000)
    step_ms: float = Field(20, gt=0, le=60_000)
    step_ms_per_request: float = Field(0, ge=0, le=60_000)
    tokens_per_chunk: int = Field(1, ge=1, le=64)
    acceptance_rate: float = Field(0, ge=0, le=1)
    num_speculative_tokens: int = Field(0, ge=0, le=16)
    stall_after_tokens: int = Field(0, ge=0, le=1_048_576)  # 0: no stall
    stall_ms: float = Field(0, ge=0, le=60_000)
    seed: int = Field(0, ge=0, le=2**63 - 1)
    killed_by: str | None = Field(
        None, min_length=1, max_length=100
    )  # a prompt with this in it ends the process in its first step
    prepared: bool = (
        False  # for `make bench-gateway`: bytes made once a stream, cheap enough for 1,000 of them
    )

    @model_validator(mode="after")
    def _prepared(self) -> Self:
        others = sorted(self.model_fields_set - {"prepared", "ttft_ms", "step_ms"})
        if self.prepared and others:
            raise ValueError(f"prepared knows ttft_ms and step_ms only; {others[0]} is given")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens_per_chunk > 1 and self.num_speculative_tokens:
            raise ValueError(
                f"tokens_per_chunk={self.tokens_per_chunk} fixes what num_speculative_tokens="
                f"{self.num_speculative_tokens} leaves to chance: give one of them"
            )
        if bool(self.stall_after_tokens) != bool(self.stall_ms):
            raise ValueError(
                f"a stall needs both: stall_after_tokens={self.stall_after_tokens}, stall_ms={self.stall_ms:g}"
            )
        return self


class AutoscalingConfig(_Settings):
    """Replicas follow the lane's outstanding tokens, waiting ones included."""

    min_replicas: int = Field(1, ge=1, le=1000)
    max_replicas: int = Field(4, ge=1, le=1000)
    target_outstanding_tokens: int = Field(4096, ge=1)  # per replica
    upscale_delay_s: float = Field(3, ge=0, le=3600)
    downscale_delay_s: float = Field(60, ge=0, le=3600)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} exceeds max_replicas={self.max_replicas}")
        return self


class LaneModelConfig(_Settings):
    """Another model than the lab's, for one lane; whatever else `model` sets holds for it, too."""

    path: str  # as `model.path`
    # None: the lab's, and it takes no requests but those that pin the lane.
    name: str | None = Field(None, pattern=NAME_PATTERN)


class LaneConfig(_Settings):
    """One decoding strategy with its own replicas."""

    name: Name
    model: LaneModelConfig | None = None  # None: the lab's
    strategy: Annotated[Strategy, Strict(False)]
    engine: EngineName = "vllm"
    replicas: int = Field(1, ge=1, le=1000)
    max_num_seqs: int = Field(16, ge=1, le=4096)
    dispatch_margin: int = Field(0, ge=0, le=256)  # requests sent to a replica beyond max_num_seqs
    takes_unpinned: bool = True  # may the scheduler choose it for requests that name no lane
    # None: on CPU DEFAULT_KV_CACHE_GIB, on CUDA what `gpu_memory_utilization` leaves beside weights and buffers.
    kv_cache_gib: float | None = Field(None, gt=0, le=1024)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)  # CUDA engines
    prefix_caching: bool = False
    num_cpus: float = Field(0, ge=0, le=1024)  # what Ray reserves; 0: engines may share cores
    # What Ray reserves. None: a card for each of several ranks, else nothing. 0: engines may share cards.
    num_gpus: float | None = Field(None, ge=0, le=64)
    # One engine over several cards of one machine.
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    pipeline_parallel_size: int = Field(1, ge=1, le=64)
    # Options of `vllm serve` in its own spelling; what the lab sets itself is refused.
    engine_args: dict[str, JsonValue] | None = None
    speculation: SpeculationConfig | None = None
    refinement: RefinementConfig | None = None
    simulated: SimulatedProfile | None = None
    autoscaling: AutoscalingConfig | None = None  # `replicas` is then where it starts
    # Engine openai: servers that already run, each a replica.
    urls: Annotated[tuple[str, ...], Strict(False)] = ()
    api_key_env: str | None = Field(None, pattern=VARIABLE, max_length=256)
    served_model: str | None = Field(None, min_length=1, max_length=1024)  # None: the only one it serves
    health: str | None = Field(
        None, pattern=SERVER_PATH, max_length=1024
    )  # None: /health, or /v1/models where there is none
    metrics: str = Field("/metrics", pattern=SERVER_PATH, max_length=1024)

    @field_validator("urls")
    @classmethod
    def _urls(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for url in given:
            if fault := server_url_fault(url):
                raise ValueError(f"{_shown(without_secrets(url))}: {fault}")
        urls = tuple(map(server_root, given))
        if doubled := [url for url, count in Counter(urls).items() if count > 1]:
            raise ValueError(f"{_shown(doubled[0])} is given twice; each is a replica")
        return urls

    @model_validator(mode="before")
    @classmethod
    def _a_replica_each(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("engine") == "openai":
            urls = data.get("urls")
            return {"replicas": len(urls)} | data if isinstance(urls, list) and urls else data
        return data

    @model_validator(mode="after")
    def _attached(self) -> Self:
        if self.is_attached and self.model is not None:
            raise ValueError(
                f"model is for engines of the lab's own only; engine={self.engine}: the servers' own name of their "
                "model is served_model"
            )
        wrong = KEYS_OF_OWN_ENGINES if self.is_attached else KEYS_OF_SERVERS
        # Of what was given, not of defaults; a default written out says nothing.
        for key in sorted(self.model_fields_set & wrong):
            if getattr(self, key) != LaneConfig.model_fields[key].default:
                who = "engines of the lab's own" if self.is_attached else "engine openai"
                raise ValueError(f"{key} is for {who} only; engine={self.engine}")
        if self.is_attached and not self.urls:
            raise ValueError("urls must be given for engine openai: the servers that already run")
        if self.is_attached and self.replicas != len(self.urls):
            raise ValueError(
                f"replicas={self.replicas} must be left out, or be {len(self.urls)}: each of urls is one"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.strategy is Strategy.SEQUENTIAL and self.max_running != 1:
            raise ValueError(
                f"a sequential lane runs one request at a time: max_num_seqs={self.max_num_seqs} must be 1 "
                f"and dispatch_margin={self.dispatch_margin} must be 0"
            )
        for key, strategy in (("speculation", Strategy.SPECULATIVE), ("refinement", Strategy.ITERATIVE)):
            is_given = getattr(self, key) is not None
            if not self.is_attached and is_given != (self.strategy is strategy):
                raise ValueError(
                    f"{key} must be given for strategy {strategy}, and only there; strategy={self.strategy}"
                )
        if (self.engine == "simulated") != (self.simulated is not None):
            raise ValueError(
                f"simulated must be given for engine simulated, and only there; engine={self.engine}"
            )
        return self

    @field_validator("engine_args")
    @classmethod
    def _a_lanes_own(cls, given: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        if faults := engine_options.faults(given or {}):
            raise ValueError("; ".join(faults))
        return given

    @model_validator(mode="after")
    def _tells_its_proposer(self) -> Self:
        """vLLM's `additional_config` is how a proposer of ours is told what to do."""
        method = "" if self.speculation is None else self.speculation.method
        options = map(engine_options.option_of, self.engine_args or {})
        if (method in ("oracle", "adaptive") or self.refinement) and "additional-config" in options:
            who = "refinement" if self.refinement else f"speculation; method={method}"
            raise ValueError(f"engine_args.additional_config is set by {who}")
        return self

    @model_validator(mode="after")
    def _engine_has_args(self) -> Self:
        if self.engine_args and self.engine != "vllm":
            raise ValueError(f"engine_args are options of `vllm serve`; engine={self.engine}")
        return self

    @model_validator(mode="after")
    def _a_card_each(self) -> Self:
        if self.num_ranks > 1 and self.engine != "vllm":
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} and pipeline_parallel_size="
                f"{self.pipeline_parallel_size} are for engine vllm; engine={self.engine}"
            )
        if self.num_ranks > 1 and self.num_gpus not in (None, 0, self.num_ranks):
            raise ValueError(
                f"num_gpus={self.num_gpus:g} must be left out or be tensor_parallel_size x "
                f"pipeline_parallel_size = {self.num_ranks}, a card for each, or be 0 where engines share the cards"
            )
        return self

    @model_validator(mode="after")
    def _starts_in_bounds(self) -> Self:
        scaling = self.autoscaling
        if scaling and not scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            raise ValueError(
                f"replicas={self.replicas} is outside autoscaling {scaling.min_replicas}..{scaling.max_replicas}"
            )
        return self

    @property
    def max_running(self) -> int:
        """Requests the scheduler keeps on one replica at once."""
        return self.max_num_seqs + self.dispatch_margin

    @property
    def num_ranks(self) -> int:
        """Processes that one engine computes in, each on a card of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def cpu_kv_cache_gib(self) -> float:
        """KV cache of an engine on CPU, where vLLM does not measure what is free."""
        return DEFAULT_KV_CACHE_GIB if self.kv_cache_gib is None else self.kv_cache_gib

    def reserved_gpus(self, device: str) -> float:
        """What Ray reserves for a replica, on `cpu` or `cuda`."""
        if self.num_gpus is not None:
            return self.num_gpus
        return self.num_ranks if self.num_ranks > 1 and device == "cuda" else 0

    @property
    def unpinned_model(self) -> str | None:
        """Whose requests that pin no lane it takes: a model's name, "" for the lab's own; None: nobody's."""
        if not self.takes_unpinned:
            return None
        return "" if self.model is None else self.model.name

    @property
    def model_setting(self) -> str:
        """What names the checkpoint of its model, for errors."""
        return "model.path" if self.model is None else f"lanes[{self.name}].model.path"

    @property
    def has_model(self) -> bool:
        """Whether its engines compute here with a model; not those that only act as if."""
        return self.engine not in ENGINES_WITHOUT_MODEL and not self.is_attached

    @property
    def is_attached(self) -> bool:
        """Whether its replicas are servers that somebody else runs."""
        return self.engine == "openai"


class ProcessorConfig(_Settings):
    """Who gets the processors first."""

    engines_yield: bool = True  # to the gateway, the scheduler, the load client and other programs


class LabConfig(_Settings):
    """The whole lab."""

    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    slo: SloConfig = SloConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    processor: ProcessorConfig = ProcessorConfig()
    lanes: Annotated[tuple[LaneConfig, ...], Strict(False)] = Field(min_length=1)

    @field_validator("lanes")
    @classmethod
    def _distinct(cls, lanes: tuple[LaneConfig, ...]) -> tuple[LaneConfig, ...]:
        doubled = [name for name, count in Counter(lane.name for lane in lanes).items() if count > 1]
        if doubled:
            raise ValueError(f"lane name {doubled[0]!r} is used twice; names must be distinct")
        if any(lane.name == ANY_LANE for lane in lanes):
            raise ValueError(
                f"a lane may not be named {ANY_LANE!r}: metrics call so the requests that pin none"
            )
        if not any(lane.unpinned_model == "" for lane in lanes):
            raise ValueError(
                "no lane of the lab's model takes unpinned requests; set takes_unpinned: true on at least one"
            )
        paths: dict[str, str] = {}
        for lane in lanes:
            if lane.model is None or lane.model.name is None:
                continue
            name, path = lane.model.name, lane.model.path
            if paths.setdefault(name, path) != path:
                raise ValueError(
                    f"lanes[{lane.name}].model.path = {_shown(path)}: another lane's model {name!r} has path "
                    f"{_shown(paths[name])}; give one of them another name"
                )
        return lanes

    @model_validator(mode="after")
    def _names_of_their_own(self) -> Self:
        for lane in self.lanes:
            if lane.model is not None and lane.model.name == self.model.name:
                raise ValueError(
                    f"lanes[{lane.name}].model.name = {lane.model.name!r} is the lab's (model.name): leave it out, "
                    "or give another"
                )
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        for lane in self.lanes:
            drafts = lane.speculation
            if drafts is None or drafts.model != "auto" or drafts.drafts_by not in METHODS_WITH_HEAD:
                continue
            path = self.model_of(lane).path
            if not drafts.is_shipped or path != "auto":
                raise ValueError(
                    f"lanes[{lane.name}].speculation.model = 'auto' is an eagle3 head for the default model; "
                    f"method={drafts.method}, {lane.model_setting}={_shown(path)}"
                )
        return self

    @property
    def num_engines(self) -> int:
        """Replicas that the lab itself starts."""
        return sum(lane.replicas for lane in self.lanes if not lane.is_attached)

    def model_name(self, lane: LaneConfig) -> str:
        """What clients call the lane's model."""
        return (lane.model and lane.model.name) or self.model.name

    def model_of(self, lane: LaneConfig) -> ModelConfig:
        """What the lane serves: the lab's model, or its own with the lab's other settings."""
        if lane.model is None:
            return self.model
        return self.model.model_copy(update={"path": lane.model.path, "name": self.model_name(lane)})

    @property
    def needs_model(self) -> bool:
        """Whether any of its engines computes with the lab's model."""
        return any(lane.has_model and lane.model is None for lane in self.lanes)

    @property
    def checkpoints(self) -> dict[str, str]:
        """What its engines read, by the setting that names it."""
        found = {"model.path": self.model.path} if self.needs_model else {}
        for lane in self.lanes:
            if not lane.has_model:
                continue
            if lane.model is not None:
                found[lane.model_setting] = lane.model.path
            if lane.speculation is not None and (path := lane.speculation.draft_path):
                found[f"lanes[{lane.name}].speculation.model"] = path
        return found

    def with_paths(self, change: Callable[[str], str]) -> Self:
        """The same lab with each path of `checkpoints` put through `change`."""
        lanes = []
        for lane in self.lanes:
            speculation = lane.speculation
            if speculation is not None and (path := speculation.draft_path):
                speculation = speculation.model_copy(update={"model": change(path)})
            model = lane.model and lane.model.model_copy(update={"path": change(lane.model.path)})
            lanes.append(lane.model_copy(update={"model": model, "speculation": speculation}))
        own = self.model.model_copy(update={"path": change(self.model.path)})
        return self.model_copy(update={"model": own, "lanes": tuple(lanes)})

    def lane(self, name: str) -> LaneConfig:
        """The lane of that name; KeyError when there is none."""
        for lane in self.lanes:
            if lane.name == name:
                return lane
        raise KeyError(name)


MERGE_TAG = "tag:yaml.org,2002:merge"  # the key `<<`


# What PyYAML makes of a scalar, by the end of its tag.
SCALAR_KINDS = {
    "timestamp": "a date",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "binary": "base64",
}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that names the place of a fault, and refuses a key given twice, where PyYAML keeps the last."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, ArithmeticError, LookupError, AttributeError):
            # PyYAML lets through what Python says of a value that only has the form of a date or a number.
            kind = SCALAR_KINDS.get(node.tag.rpartition(":")[2], "keys and values")
            written = _shown(node.value) if isinstance(node, yaml.ScalarNode) else "what begins here"
            raise ConfigError(
                f"{_place(node.start_mark)}: {written} cannot be read as {kind}; quote what is meant as text"
            ) from None


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value if key.tag != MERGE_TAG]
    doubled = [key for key, count in Counter(map(str, keys)).items() if count > 1]
    if doubled:
        raise ConfigError(f"key {_shown(doubled[0])} is given twice (line {node.start_mark.line + 1})")
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path) -> LabConfig:
    """Read and check a config file.

    Raises:
        ConfigError: with the file, and for each fault the key, the value and the bound.
    """
    try:
        text = path.read_text(encoding="utf-8")
        _bounded(yaml.compose(text, Loader=_StrictLoader))
        data = yaml.load(text, Loader=_StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8: {error.reason} at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {_yaml_fault(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    return from_data(data, str(path))


def from_data(data: Any, origin: str) -> LabConfig:
    """Check what a config file holds.

    Args:
        origin: where it comes from, for errors.

    Raises:
        ConfigError: with the origin, and for each fault the key, the value and the bound.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{origin}: expected keys and values at the top, got {_shown(data)}")
    try:
        return LabConfig.model_validate(data)
    except ValidationError as error:
        faults = _without_echoes(error.errors())
        raise ConfigError("\n".join(f"{origin}: {_explain(fault, data)}" for fault in faults)) from None


def _bounded(root: yaml.Node | None) -> None:
    """Refuse a few lines of aliases that stand for millions of values.

    Raises:
        ConfigError: the document, its aliases written out, holds more than `MAX_NODES` values.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 1  # an alias within its own anchor counts once
            children = node.value if isinstance(node, yaml.CollectionNode) else []
            flat = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
            sizes[id(node)] = 1 + sum(map(size, flat))
        return sizes[id(node)]

    if root is not None and (total := size(root)) > MAX_NODES:
        raise ConfigError(f"{total} values with all aliases written out; the limit is {MAX_NODES}")


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"{_place(error.problem_mark)}: {_cut(error.problem)}"
    return _cut(" ".join(str(error).split()))


def _without_echoes(faults: list[Any]) -> list[Any]:
    """Drop "too short" where items were given and are at fault themselves: pydantic counts only the good ones."""
    return [fault for fault in faults if fault["type"] != "too_short" or not fault["input"]]


# Faults of type and form in a reader's words; pydantic's own speak of Python.
PLAIN_WORDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is out of all bounds",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "model_type": "must be keys and values",
    "model_attributes_type": "must be keys and values",
    "invalid_key": "a key must be text",
    "invalid-json-value": "must be text, a number, true, false, a list, or keys and values",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must not be empty",
}
WORDS_OF_PATTERN = {
    NAME_PATTERN: "must be 1 to 63 of lower case letters, digits, '.' and '-', and begin with a letter or digit",
    SERVER_PATH: "must begin with / and be printable ASCII without spaces",
    VARIABLE: "must be the name of an environment variable: letters, digits and '_', and no digit first",
}


def _key(loc: tuple[int | str, ...], data: Any) -> str:
    """Where a fault is: `lanes[batched].replicas`, or `lanes.0.replicas` where an entry has no name of its own."""
    key = ""
    for part in loc:
        name = _own_name(data, part) if loc[-1] != "name" else None
        key += f".{_cut(str(part))}" if name is None else f"[{_cut(name)}]"
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):  # a key that is missing, or one that is at fault itself
            data = None
    return key.removeprefix(".") or "(top)"


def _own_name(entries: Any, part: int | str) -> str | None:
    """What an entry of a list calls itself, if no other entry has that name."""
    if not isinstance(entries, list) or not isinstance(part, int):
        return None
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    name = names[part]
    return name if isinstance(name, str) and name and name.isprintable() and names.count(name) == 1 else None


def _explain(fault: Any, data: Any) -> str:
    key = _key(fault["loc"], data)
    message = str(fault["msg"])
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key (value {_shown(fault['input'])})"
    if fault["type"] == "missing":
        return f"{key}: missing"
    if fault["type"] == "value_error":
        return f"{key}: {message.removeprefix('Value error, ')}"
    pattern = fault.get("ctx", {}).get("pattern")
    if pattern == VARIABLE:  # the value may well be the key itself
        return f"{key}: {WORDS_OF_PATTERN[VARIABLE]}"
    if words := WORDS_OF_PATTERN.get(pattern) or PLAIN_WORDS.get(fault["type"]):
        words = words.format_map(fault.get("ctx", {}))
    else:
        words = message.replace("Input should be", "must be")
    return f"{key} = {_shown(fault['input'])}: {words}"


def _shown(value: Any) -> str:
    """A value as a line can hold it."""
    if value is None:
        return "null"
    try:
        return _cut(str(value) if isinstance(value, date) else repr(value))
    except ValueError:  # Python writes out no number of more digits than sys.get_int_max_str_digits()
        return "a number of thousands of digits"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
