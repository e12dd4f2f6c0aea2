"""Variables that Ray, vLLM and prometheus-client would stumble over: found by name, before anything starts."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from serving import environment
from serving.environment import (
    RAY_VARIABLES_OF_OTHER_NAMES,
    metrics_faults,
    place_faults,
    ray_faults,
    vllm_faults,
)

LINK = "tcp://10.0.0.1:8000"
# A number that ends Ray if it is none; what Ray's own `env_integer` reads it warns of and ignores.
OF_THE_ENVIRONMENT = r"""os\.(?:environ\.get|getenv)\(\s*["'](\w+)["']"""
READ_AS_NUMBER = re.compile(rf"(?:int|float)\(\s*{OF_THE_ENVIRONMENT}(?:,\s*{OF_THE_ENVIRONMENT})?")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("VLLM_PORT", LINK, r"VLLM_PORT='tcp://10.0.0.1:8000' \(Kubernetes .*enableServiceLinks: false.*\): vLLM"),
        ("VLLM_PORT", "70000", "VLLM_PORT='70000': vLLM wants a port, 0 to 65535"),
        ("VLLM_DP_MASTER_PORT", LINK, "VLLM_DP_MASTER_PORT="),
        ("VLLM_CPU_KVCACHE_SPACE", "4GB", "VLLM_CPU_KVCACHE_SPACE='4GB': vLLM cannot read it: .*int"),
        ("VLLM_LOG_STATS_INTERVAL", "often", "VLLM_LOG_STATS_INTERVAL='often'"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "thread", "VLLM_WORKER_MULTIPROC_METHOD='thread'"),
    ],
)  # fmt: skip
def test_what_vllm_cannot_read_is_named(
    name: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vllm_faults() == []
    monkeypatch.setenv(name, value)
    (found,) = vllm_faults()
    assert re.match(fault, found), found


def test_asking_vllm_s_table_imports_no_vllm() -> None:
    code = "import sys; from serving.environment import vllm_faults; vllm_faults(); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets TMPDIR."""

    def set_it(folder: str) -> None:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)

    return set_it


@pytest.mark.parametrize(("num_bytes", "is_fault"), [(39, False), (40, True), (68, True)])
def test_a_temporary_directory_that_is_too_long_for_ray_s_sockets(
    num_bytes: int, is_fault: bool, temp_dir: Callable[[str], None]
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        folder = Path(name) / ("x" * (num_bytes - len(name) - 1))
        folder.mkdir()
        temp_dir(str(folder))
        faults = place_faults()
    assert bool(faults) == is_fault
    if is_fault:
        assert faults[0].startswith(f"TMPDIR='{folder}': has {num_bytes} bytes, and may have 39")


@pytest.mark.parametrize("folder", ["/absent", "", "relative"])
def test_a_temporary_directory_that_cannot_be_used(folder: str, temp_dir: Callable[[str], None]) -> None:
    temp_dir(folder)
    (fault,) = place_faults()
    assert "must be a directory that this user may write to" in fault


def test_ray_s_own_temporary_directory_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.temp_dirs() == [Path(tempfile.gettempdir())]
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
    assert place_faults()[0].startswith("RAY_TMPDIR=")


def test_a_home_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_faults() == []
    monkeypatch.setenv("HOME", "/absent")
    assert place_faults() == ["HOME='/absent': no such directory; set it to a directory of yours"]


def test_a_user_without_a_name_and_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    (fault,) = place_faults()
    assert fault.startswith(f"HOME is not set, and user {os.getuid()} has no name here")


@pytest.mark.parametrize("name", environment.MULTIPROCESS_VARIABLES)
def test_a_directory_of_all_processes_metrics_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert metrics_faults() == []
    monkeypatch.setenv(name, str(tmp_path / "absent"))
    (found,) = metrics_faults()
    assert found.startswith(f"{name}=")
    assert "unset it" in found


def test_ray_is_not_asked_about_numbers_and_variables_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_MAX_CACHED_HANDLES", "100")
    monkeypatch.setenv("PORT", LINK)
    assert ray_faults(lambda _: pytest.fail("asked")) == []


def test_of_several_variables_the_faulty_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("LOG_NAME_UPDATE_INTERVAL_S", LINK)
    asked: list[dict[str, str]] = []

    def ask(variables: dict[str, str]) -> str | None:
        asked.append(variables)
        return "no number" if "LOG_NAME_UPDATE_INTERVAL_S" in variables else None

    (found,) = ray_faults(ask)
    assert found.startswith(f"LOG_NAME_UPDATE_INTERVAL_S='{LINK}' (Kubernetes")
    assert found.endswith(": Ray cannot read it: no number")
    assert [variables.keys() & {"RAY_TMPDIR", "LOG_NAME_UPDATE_INTERVAL_S"} for variables in asked] == [
        {"RAY_TMPDIR", "LOG_NAME_UPDATE_INTERVAL_S"}, {"LOG_NAME_UPDATE_INTERVAL_S"}, {"RAY_TMPDIR"},
    ]  # fmt: skip


def test_variables_that_only_together_are_faulty_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    (found,) = ray_faults(lambda variables: "no" if {"RAY_TMPDIR", "RAY_ADDRESS"} <= set(variables) else None)
    assert found == "RAY_ADDRESS='auto', RAY_TMPDIR='/tmp': Ray does not start with them: no"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("RAY_NUM_REDIS_GET_RETRIES", "invalid literal for int"),
        ("LOG_NAME_UPDATE_INTERVAL_S", "could not convert string to float"),
        ("RAY_ROTATION_MAX_BYTES", "invalid literal for int"),  # read when a node starts
        ("RAY_worker_niceness", "SIGSEGV"),  # read in C++
    ],
)
def test_the_installed_ray_is_asked(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, LINK)
    (found,) = ray_faults()
    assert found.startswith(f"{name}='{LINK}'")
    assert fault in found


def test_the_installed_ray_reads_no_number_under_a_name_that_is_not_known_here() -> None:
    package = importlib.util.find_spec("ray")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent
    names = {
        name
        for part in ("_common", "_private", "dashboard", "serve")
        for path in (root / part).rglob("*.py")
        if not {"tests", "thirdparty", "thirdparty_files"} & set(path.parts)
        for found in READ_AS_NUMBER.findall(path.read_text(encoding="utf-8", errors="replace"))
        for name in found
        if name
    }
    assert "RAY_NUM_REDIS_GET_RETRIES" in names
    assert {name for name in names if not name.startswith(("RAY_", "TEST_"))} == RAY_VARIABLES_OF_OTHER_NAMES


def test_long_values_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "x" * 5000)
    assert len(os.environ["VLLM_PORT"]) == 5000
    assert vllm_faults()[0].startswith(f"VLLM_PORT='{'x' * 100}'")
