"""``python deploy/experiments/openmp.py``: what Intel's OpenMP and a compiled model do for vLLM's CPU engine.

Prints a line of JSON for each engine: how it ran, whether it drafted, seconds from start to ready, and the least
time of a token, in ms, for batches of 1, 4 and 8 stories of 96 tokens. An engine at a time, all ways in turn; run
it on a machine that does nothing else. A second run shows what starts cost when the compiled code is there already.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from serving import model_store
from serving.config import LaneConfig, ModelConfig
from serving.engines.vllm import environment, openmp_library

WAYS = ("eager", "eager, OpenMP", "compiled, OpenMP")
BATCHES = (1, 4, 8)
TOKENS = 96
TOPICS = ("fox", "lamp", "river", "clock", "baker", "ship", "garden", "letter")
K = 3


def measure(way: str, *, drafts: bool) -> dict[str, Any]:
    """Of one engine, in this process."""
    began_s = time.monotonic()
    from vllm import LLM, SamplingParams

    head = {"method": "eagle3", "model": str(model_store.SHIPPED_HEAD), "num_speculative_tokens": K}
    engine = LLM(
        model=str(model_store.default_model_path()),
        dtype="bfloat16",
        enforce_eager=way != WAYS[-1],
        max_model_len=2048,
        max_num_seqs=16,
        kv_cache_memory_bytes=2**29,
        generation_config="vllm",
        enable_prefix_caching=False,
        speculative_config=head if drafts else None,
    )
    found: dict[str, Any] = {
        "way": way,
        "drafts": K if drafts else 0,
        "start_s": round(time.monotonic() - began_s, 1),
    }
    settings = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    for batch in BATCHES:
        asked = [[{"role": "user", "content": f"Write a story about a {topic}."}] for topic in TOPICS[:batch]]
        took_s = []
        for _ in range(4):
            asked_s = time.monotonic()
            engine.chat(asked, settings, use_tqdm=False)
            took_s.append(time.monotonic() - asked_s)
        found[f"tpot_ms at {batch}"] = round(min(took_s) / TOKENS * 1000, 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=WAYS, help="measure this one only, in this process")
    parser.add_argument(
        "--drafts", action="store_true", help="with --way: with the head that comes with Tandem"
    )
    parser.add_argument(
        "--cache", type=Path, help="where vLLM keeps compiled code (default: its own directory)"
    )
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, drafts=given.drafts)), flush=True)  # noqa: T201 - its answer
        return 0
    lane = LaneConfig.model_validate({"name": "batched", "strategy": "batched"})
    variables = os.environ | environment(lane, ModelConfig()) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    if given.cache:
        variables["VLLM_CACHE_ROOT"] = str(given.cache)
    for drafts in (False, True):
        for way in WAYS:
            own = dict(variables)
            if way == WAYS[0] and (library := openmp_library()):
                own["LD_PRELOAD"] = own["LD_PRELOAD"].replace(str(library), "").strip()
            command = [sys.executable, __file__, "--way", way, *(["--drafts"] if drafts else [])]
            subprocess.run(command, env=own, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
