"""Run as a program: what an iterative lane's drafts give on the real engine, in tokens per step and row.

    .venv/bin/python -m tests.e2e.tokens_per_step [ANSWERS [TOKENS]]

Greedy answers of TOKENS tokens in float32, ANSWERS of them at once, to the load lab's prompts of seed 1. Every step
of a row counts but that of its prompt, with a draft or without. No time is taken: a busy machine gives the same.
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
from serving.proposers.settings import KEY as PROPOSER_KEY

WORKLOADS = ("story", "chat", "copy")
NUM_DRAFTS = 4
SEED = 1
VARIANTS = {
    "Jacobi tails": RefinementConfig(num_speculative_tokens=NUM_DRAFTS, pool=False),
    "pool": RefinementConfig(num_speculative_tokens=NUM_DRAFTS, tails=False),
    "both": RefinementConfig(num_speculative_tokens=NUM_DRAFTS),
}


class Counted:
    """A proposer that counts the steps of its rows, but for those that read a prompt."""

    def __init__(self, proposer: Any) -> None:
        self._proposer = proposer
        self._propose = proposer.propose
        proposer.propose = self.propose
        self.begin(None)

    def begin(self, settings: RefinementConfig | None) -> None:
        """Begin to count; None drafts nothing."""
        self._drafts = settings is not None
        if settings is not None:
            self._proposer.settings = settings
            self._proposer.rows = Rows(settings)
        self.steps = self.drafted = 0

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        for new, (row, drafted, _) in zip(sampled_token_ids, self._proposer.rows, strict=True):
            if new and row.num_tokens:
                self.steps += 1
                self.drafted += len(drafted)
        drafts: list[list[int]] = self._propose(sampled_token_ids, *args, **kwargs)
        return drafts if self._drafts else [[]] * len(drafts)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main(num_answers: int, num_tokens: int) -> None:
    llm = LLM(
        str(model_store.prepare(say)),
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
        additional_config={PROPOSER_KEY: RefinementConfig().model_dump()},
        worker_extension_cls="serving.engines.vllm_worker.WorkerExtension",
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    counted = Counted(runner.drafter)
    asked = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    say("| workload | drafts | steps | tokens per step | passes per token | drafted per step |")
    for workload in WORKLOADS:
        prompts: list[Any] = [
            list(load_workload(workload).request(SEED, number).messages) for number in range(num_answers)
        ]
        plain: list[Any] | None = None
        for name, settings in {"none": None, **VARIANTS}.items():
            counted.begin(settings)
            answers = [each.outputs[0].token_ids for each in llm.chat(prompts, asked, use_tqdm=False)]
            plain = plain or answers
            assert answers == plain, f"{workload}, {name}: the texts differ"
            per_step = num_answers * (num_tokens - 1) / counted.steps  # the prompt's step gives the first
            say(
                f"| {workload} | {name} | {counted.steps} | {per_step:.2f} | {1 / per_step:.2f} "
                f"| {counted.drafted / counted.steps:.2f} |"
            )


if __name__ == "__main__":
    main(*(int(word) for word in (*sys.argv[1:], *("8", "64")[len(sys.argv) - 1 :])))
