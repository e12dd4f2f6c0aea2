"""Run as a program: what an iterative lane's drafts give on the real engine, in tokens per step and row.

    .venv/bin/python -m tests.e2e.tokens_per_step [ANSWERS [TOKENS]]

Greedy answers of TOKENS tokens in float32, ANSWERS of them at once, to the load lab's prompts of seed 1. Every step of
a row counts but that of its prompt, with a draft or without. No time is taken, so a busy machine gives the same.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# In this process, so that the proposer can be told other settings and be watched.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams

from loadtest.offer.workload import load_workload
from serving import model_store
from serving.config import RefinementConfig
from serving.proposers.refinement import Rows

WORKLOADS = ("story", "chat", "copy")
NUM_DRAFTS = 4
SEED = 1
VARIANTS = {
    "Jacobi tails": RefinementConfig(num_speculative_tokens=NUM_DRAFTS, pool=False),
    "pool": RefinementConfig(num_speculative_tokens=NUM_DRAFTS, tails=False),
    "both": RefinementConfig(num_speculative_tokens=NUM_DRAFTS),
}


class Watched:
    """Counts what a proposer sees and proposes."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self._propose = proposer.propose
        proposer.propose = self
        self.begin(None)

    def begin(self, settings: RefinementConfig | None) -> None:
        """Begin to count; None drafts nothing."""
        self._drafts = settings is not None
        self._proposer._settings = settings or RefinementConfig()
        self._proposer._rows = Rows(self._proposer._settings)
        self.steps = self.tokens = self.drafted = 0

    def __call__(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        for new, (row, drafted, _) in zip(sampled_token_ids, self._proposer._rows, strict=True):
            if new and row.num_tokens:
                self.steps += 1
                self.tokens += len(new)
                self.drafted += len(drafted)
        drafts: list[list[int]] = self._propose(sampled_token_ids, *args, **kwargs)
        return drafts if self._drafts else [[]] * len(drafts)


def main(num_answers: int, num_tokens: int) -> None:
    llm = LLM(
        str(model_store.prepare(print)),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=num_answers,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**29,
        speculative_config={
            "method": "custom_class",
            "model": "serving.proposers.lookahead.Lookahead",
            "num_speculative_tokens": NUM_DRAFTS,
        },
        additional_config={"refinement": RefinementConfig().model_dump()},
        worker_extension_cls="serving.engines.vllm_worker.WorkerExtension",
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    watched = Watched(runner.drafter)
    asked = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    print("| workload | drafts | steps | tokens | tokens per step | passes per token | drafted per step |")
    for workload in WORKLOADS:
        prompts: list[Any] = [
            list(load_workload(workload).request(SEED, number).messages) for number in range(num_answers)
        ]
        plain: list[Any] | None = None
        for name, settings in {"none": None, **VARIANTS}.items():
            watched.begin(settings)
            answers = [each.outputs[0].token_ids for each in llm.chat(prompts, asked, use_tqdm=False)]
            plain = plain or answers
            assert answers == plain, f"{workload}, {name}: the texts differ"
            steps, tokens = watched.steps, watched.tokens
            print(
                f"| {workload} | {name} | {steps} | {tokens} | {tokens / steps:.2f} | {steps / tokens:.2f} "
                f"| {watched.drafted / steps:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*(int(word) for word in (*sys.argv[1:], *("8", "64")[len(sys.argv) - 1 :])))
