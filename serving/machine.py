"""What this machine is: processor, instruction sets, memory, GPUs; and what keeps an address from being used."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil

# Named as /proc/cpuinfo names them. AVX2 carries the CPU engine; the others make bfloat16 worth while.
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
CPUINFO = Path("/proc/cpuinfo")
OS_RELEASE = Path("/etc/os-release")
NVIDIA_SMI_TIMEOUT_S = 10
CONNECT_TIMEOUT_S = 5
GIB = 2**30


def describe() -> dict[str, Any]:
    """The machine, as JSON: sizes in bytes, cores as counts.

    `usable_cores` honours the CPU affinity of this process; `physical_cores` is the machine's own count,
    or None where the kernel does not tell.
    """
    return {
        "cpu_model": parse_cpu_model(_read(CPUINFO)) or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(logical=True),
        "usable_cores": usable_cores(),
        "instruction_sets": sorted(instruction_sets()),
        "memory_bytes": psutil.virtual_memory().total,
        "os": parse_os_name(_read(OS_RELEASE)) or platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpus": gpus(),
    }


def instruction_sets() -> frozenset[str]:
    """Those of `INSTRUCTION_SETS` that this processor has; empty on another architecture than x86-64."""
    return parse_instruction_sets(_read(CPUINFO))


def usable_cores() -> int:
    """Logical cores this process may run on."""
    return len(os.sched_getaffinity(0))


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs as `nvidia-smi` lists them: name, memory_bytes, driver; empty where there is none."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        # The tool without a working driver is the same as no GPU: CUDA would find none either.
        return []
    return parse_gpus(done.stdout)


def host_fault(host: str) -> str | None:
    """Why no server could listen on that host, whatever the port, in the system's words; None when one could."""
    return port_fault(host, 0)  # 0: any free one


def port_fault(host: str, port: int) -> str | None:
    """Why a server could not listen on host:port now, in the system's words; None when it could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: without it a port whose last connection closed a minute ago would look taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
        except (TypeError, ValueError) as error:  # not even the form of a host name
            return str(error)
    return None


def reach_fault(host: str, port: int) -> str | None:
    """Why nobody answers at host:port, in the system's words; None when somebody does."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, OverflowError) as error:  # not even the form of an address
        return str(error)
    return None


def parse_cpu_model(cpuinfo: str) -> str | None:
    """Name of the first processor in the text of /proc/cpuinfo, or None."""
    return _first_value(cpuinfo, "model name")


def parse_instruction_sets(cpuinfo: str) -> frozenset[str]:
    """Those of `INSTRUCTION_SETS` among the flags of the first processor in the text of /proc/cpuinfo."""
    flags = (_first_value(cpuinfo, "flags") or "").split()
    return frozenset(INSTRUCTION_SETS) & frozenset(flags)


def parse_os_name(os_release: str) -> str | None:
    """PRETTY_NAME in the text of /etc/os-release, or None."""
    for line in os_release.splitlines():
        key, _, value = line.partition("=")
        if key == "PRETTY_NAME":
            return value.strip().strip('"')
    return None


def parse_gpus(csv: str) -> list[dict[str, Any]]:
    """Rows `name, memory in MiB, driver` of nvidia-smi; memory_bytes is None where the card hides it."""
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in csv.splitlines() if line.strip()]
    return [
        {
            "name": name,
            "memory_bytes": int(memory_mib) * 2**20 if memory_mib.isdigit() else None,
            "driver": driver,
        }
        for name, memory_mib, driver in (row for row in rows if len(row) == 3)
    ]


def _first_value(cpuinfo: str, key: str) -> str | None:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
