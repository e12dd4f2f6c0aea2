"""Parsing of what the kernel and nvidia-smi print, from fixture text; and one look at this machine."""

from __future__ import annotations

import json
import socket

import pytest

from serving import machine

XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse2 avx avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
OLD_DESKTOP = "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i5-2500\nflags\t\t: fpu sse4_2 avx\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd bf16\n"


def test_instruction_sets_are_those_of_interest_only() -> None:
    assert machine.parse_instruction_sets(XEON) == {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
    assert machine.parse_instruction_sets(OLD_DESKTOP) == frozenset()


@pytest.mark.parametrize("text", [ARM, ""])
def test_instruction_sets_elsewhere_are_none(text: str) -> None:
    assert machine.parse_instruction_sets(text) == frozenset()


def test_avx512_by_prefix_is_not_avx512f() -> None:
    assert machine.parse_instruction_sets("flags : avx512bw avx512_vnni avx2x") == frozenset()


def test_cpu_model_is_that_of_the_first_processor() -> None:
    assert machine.parse_cpu_model(XEON) == "Intel(R) Xeon(R) Platinum 8480+"
    assert machine.parse_cpu_model(ARM) is None


def test_os_name() -> None:
    text = 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_ID="12"\n'
    assert machine.parse_os_name(text) == "Debian GNU/Linux 12 (bookworm)"
    assert machine.parse_os_name("NAME=x\n") is None


def test_gpus() -> None:
    text = "NVIDIA H200, 143771, 570.124.06\nNVIDIA L4, 23034, 570.124.06\n"
    assert machine.parse_gpus(text) == [
        {"name": "NVIDIA H200", "memory_bytes": 143771 * 1024 * 1024, "driver": "570.124.06"},
        {"name": "NVIDIA L4", "memory_bytes": 23034 * 1024 * 1024, "driver": "570.124.06"},
    ]


def test_gpu_that_hides_its_memory() -> None:
    assert machine.parse_gpus("NVIDIA GB10, [N/A], 580.95\n") == [
        {"name": "NVIDIA GB10", "memory_bytes": None, "driver": "580.95"}
    ]


def test_no_gpus() -> None:
    assert machine.parse_gpus("") == []
    assert machine.parse_gpus("No devices were found\n") == []


def test_description_is_json_and_plausible() -> None:
    described = json.loads(json.dumps(machine.describe()))
    assert 1 <= described["usable_cores"] <= described["logical_cores"]
    assert described["memory_bytes"] > 2**28
    assert set(described["instruction_sets"]) <= set(machine.INSTRUCTION_SETS)
    assert described["cpu_model"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "0.0.0.0", "localhost"])
def test_this_machine_has_its_own_addresses(host: str) -> None:
    assert machine.host_fault(host) is None


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("192.0.2.1", "Cannot assign requested address"),
        ("ü" * 70, "encoding of hostname failed"),
        ("x" * 70, ""),
        ("a\0b", ""),
        ("fe80::zz", ""),
    ],
)
def test_other_addresses_are_refused_in_the_system_s_words(host: str, fault: str) -> None:
    found = machine.host_fault(host)
    assert found
    assert fault in found


def test_a_port_is_free_until_someone_listens() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert machine.port_fault("127.0.0.1", port) == "Address already in use"
    assert machine.port_fault("127.0.0.1", port) is None
