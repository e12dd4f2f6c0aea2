"""`lanes[].engine_args`: options of `vllm serve`, and those among them that are not a lane's to give."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# An option, or one key of an option that takes keys and values: `compilation-config.mode`.
_SPELLING = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_.-]+)?")
_SPECULATION = "is set by lanes[].speculation"
_ONE_ENGINE = "a replica is one engine with one server; use lanes[].replicas"
_OWN_SERVER = "the replica's server is the lab's own, and vLLM's option would change nothing"
_METRICS = "reports and dashboards need it as it is"

SECRETS = frozenset({"api-key", "hf-token"})  # an error does not repeat the value
# Options that the lab sets, or that would go unheard in it: why, and what to use. Aliases stand for themselves.
REFUSED = {
    "model": "is set by model.path",
    "served-model-name": "is set by model.name",
    "dtype": "is set by model.dtype",
    "max-model-len": "is set by model.max_model_len",
    "max-num-seqs": "is set by lanes[].max_num_seqs",
    "max-num-active-seqs": "would keep requests waiting in the engine; use lanes[].max_num_seqs",
    "sse-keep-alive-interval": "would hide a silent engine from gateway.first_byte_timeout_s and idle_timeout_s",
    "enable-prefix-caching": "is set by lanes[].prefix_caching",
    "kv-cache-memory-bytes": "is set by lanes[].kv_cache_gib",
    "gpu-memory-utilization": "is set by lanes[].gpu_memory_utilization",
    "device-memory-utilization": "is set by lanes[].gpu_memory_utilization",
    "tensor-parallel-size": "is set by lanes[].tensor_parallel_size",
    "pipeline-parallel-size": "is set by lanes[].pipeline_parallel_size",
    "speculative-config": _SPECULATION,
    "spec-method": _SPECULATION,
    "spec-model": _SPECULATION,
    "spec-tokens": _SPECULATION,
    "worker-extension-cls": "the lab mends vLLM's sampler with it",
    "host": "engines listen where the lab finds them; use gateway.host",
    "port": "engines listen where the lab finds them; use gateway.port",
    "uds": "engines listen where the lab finds them; use gateway.host",
    "grpc": _ONE_ENGINE,
    "grpc-port": _ONE_ENGINE,
    "headless": _ONE_ENGINE,
    "api-server-count": _ONE_ENGINE,
    "api-key": "is a secret of the gateway; use gateway.api_keys_file or TANDEM_API_KEYS",
    "hf-token": "is a secret, and a config is shown on pages; use HF_TOKEN in the engine's environment",
    "allowed-origins": "use gateway.cors_allowed_origins",
    "allowed-methods": "use gateway.cors_allowed_origins",
    "allowed-headers": "use gateway.cors_allowed_origins",
    "allow-credentials": "use gateway.cors_allowed_origins",
    "uvicorn-log-level": _OWN_SERVER,
    "disable-uvicorn-access-log": _OWN_SERVER,
    "disable-access-log-for-endpoints": _OWN_SERVER,
    "h11-max-incomplete-event-size": _OWN_SERVER,
    "h11-max-header-count": _OWN_SERVER,
    "disable-log-stats": _METRICS,
    "enable-mfu-metrics": _METRICS,
    "config": "would read another file; write its options here",
    "help": "is no option of an engine",
}
_REFUSED_BEGINNINGS = {
    "data-parallel-": _ONE_ENGINE,
    "dp-supervisor-": _ONE_ENGINE,
    "ssl-": "engines speak HTTP within the lab; put a proxy with TLS in front of the gateway",
    "enable-ssl-": "engines speak HTTP within the lab; put a proxy with TLS in front of the gateway",
}


def option_of(key: str) -> str:
    """The option that a key gives, with dashes: `compilation_config.mode` gives `compilation-config`."""
    return key.partition(".")[0].replace("_", "-")


def faults(engine_args: Mapping[str, Any]) -> list[str]:
    """Keys that no lane may give, a line each with key and value; vLLM has still to be asked about the others."""
    twice = Counter(map(_long_name, engine_args))
    found = []
    for key, value in engine_args.items():
        if (reason := _fault(key, value)) is None and twice[_long_name(key)] > 1:
            reason = "is given twice, in two spellings"
        if reason is not None:
            shown = "***" if option_of(key).removeprefix("no-") in SECRETS else repr(value)
            found.append(f"{key} = {shown}: {reason}")
    return found


def _long_name(key: str) -> str:
    option, dot, rest = key.partition(".")
    return option.replace("_", "-") + dot + rest


def _fault(key: str, value: Any) -> str | None:
    if not _SPELLING.fullmatch(key):
        return "must be the long name of an option of `vllm serve`, without its leading dashes"
    option = option_of(key)
    for name in (option, option.removeprefix("no-")):
        if reason := REFUSED.get(name):
            return reason
        for beginning, reason in _REFUSED_BEGINNINGS.items():
            if name.startswith(beginning):
                return reason
    if value is None:
        return "null gives no value; leave the key out"
    # On a command line it would be an option of its own, and none of those above.
    if isinstance(value, list) and any(isinstance(one, str) and one.startswith("-") for one in value):
        return "no entry of a list may begin with a dash"
    return None


def as_arguments(key: str, value: Any) -> list[str]:
    """A key and its value as `vllm serve` takes them: `true` and `false` are an option and its `--no-` form."""
    option, dot, rest = key.partition(".")
    name = f"--{option.replace('_', '-')}"
    if dot:
        return [f"{name}.{rest}={json.dumps(value)}"]
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    if option.replace("_", "-") == "middleware" and isinstance(value, list):
        return [f"{name}={_word(one)}" for one in value]  # vLLM takes one at a time
    if isinstance(value, list):
        return [name, *map(_word, value)]
    return [f"{name}={_word(value)}"]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
