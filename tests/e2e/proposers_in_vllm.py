"""Run as a program, for an engine has a process of its own: what one lane answers and drafts.

`python -m tests.e2e.proposers_in_vllm CONFIG LANE MAX_TOKENS` starts vLLM with the arguments of that lane,
reads a JSON list of groups of prompts, each group asked at once, and prints for each the greedy answers' tokens and
what was drafted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"
)

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from serving import model_store
from serving.cli.options import load_lab
from serving.engines import vllm_arguments
from serving.engines.vllm import command_line
from serving.metrics import names


def counts(engine: Any) -> tuple[int, int, list[int]]:
    """Drafts, tokens of drafts, and those accepted by position, since the engine started; zeros without drafts."""
    found: dict[str, Any] = {}
    for metric in engine.get_metrics():
        found[metric.name] = getattr(metric, "values", None) or getattr(metric, "value", 0)
    name = {
        each: each.removesuffix("_total")
        for each in (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_BY_POSITION)
    }
    drafts, tokens, by_position = (found.get(short, 0) for short in name.values())
    return int(drafts), int(tokens), [int(value) for value in by_position or []]


def ask(engine: Any, prompts: list[str], max_tokens: int) -> list[list[int]]:
    for number, text in enumerate(prompts):
        turns = [{"role": "user", "content": text}]
        ids = engine.get_tokenizer().apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    return [answers[str(number)] for number in range(len(prompts))]


def main(config: Path, name: str, max_tokens: int) -> list[dict[str, Any]]:
    groups = json.load(sys.stdin)
    lab = load_lab(config)
    lane = lab.lane(name)
    checkpoint = model_store.directory_of(lab.model.path)
    arguments = command_line(lane, lab.model, checkpoint, [lab.model.name], "cpu", lab.model.dtype)
    engine_args = EngineArgs.from_cli_args(vllm_arguments.parse(arguments))
    engine = LLMEngine.from_engine_args(engine_args)
    told = []
    for prompts in groups:
        before = counts(engine)
        answers = ask(engine, prompts, max_tokens)
        after = counts(engine)
        told.append(
            {
                "answers": answers,
                "drafts": after[0] - before[0],
                "draft_tokens": after[1] - before[1],
                "accepted": [a - b for a, b in zip(after[2], before[2] or [0] * len(after[2]), strict=True)],
            }
        )
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))) + "\n")
