"""Run as a program, for vLLM changes what others find in the interpreter: what its rejection sampler answers.

`own` is vLLM as installed, `mended` with `serving.engines.vllm_worker`. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

NUM_ANSWERS = 20_000
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 0.5, 0.2, -0.3])
CASES: list[tuple[float, int | None, float | None]] = [
    (1.0, None, None), (0.5, None, None), (2.0, None, None), (1.0, 3, None), (1.0, None, 0.7), (0.7, 4, 0.8),
]  # fmt: skip


@dataclass
class Sampling:
    """What vLLM's `SamplingMetadata` says to its rejection sampler, of requests that are all alike."""

    temperature: Any
    top_k: Any
    top_p: Any
    all_greedy: bool = False
    all_random: bool = True
    generators: dict[int, Any] = field(default_factory=dict)


def of_each(value: float | None, dtype: Any) -> Any:
    return None if value is None else torch.full((NUM_ANSWERS,), value, dtype=dtype)


def wanted(temperature: float, top_k: int | None, top_p: float | None) -> Any:
    """The distribution that a client asks for."""
    logits = LOGITS / temperature
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    chances, order = logits.softmax(-1).sort(descending=True)
    if top_p is not None:
        chances[chances.cumsum(0) - chances >= top_p] = 0
    return torch.zeros_like(chances).scatter(0, order, chances / chances.sum())


def error(temperature: float, top_k: int | None, top_p: float | None, draft: int) -> float:
    """How far the share of any token is from its chance, when one token is drafted for each answer."""
    asked = Sampling(
        of_each(temperature, torch.float), of_each(top_k, torch.int32), of_each(top_p, torch.float)
    )
    num_drafts = torch.arange(1, NUM_ANSWERS + 1, dtype=torch.int32)
    logits = rejection_sampler.apply_sampling_constraints(LOGITS.repeat(NUM_ANSWERS, 1), num_drafts, asked)
    bonus = torch.zeros((NUM_ANSWERS, 1), dtype=torch.int32)
    drafts = torch.full((NUM_ANSWERS,), draft, dtype=torch.int32)
    answers = rejection_sampler.rejection_sample(
        drafts, [1] * NUM_ANSWERS, 1, num_drafts, None, logits, bonus, asked
    )
    shares = torch.bincount(answers[:, 0].long(), minlength=len(LOGITS)) / NUM_ANSWERS
    return float((shares - wanted(temperature, top_k, top_p)).abs().max())


def lets_no_row_through() -> bool:
    """Whether `top_k` can be applied in a step without drafts."""
    try:
        topk_topp_sampler.apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))
    except RuntimeError:
        return False
    return True


def expands() -> bool:
    """Whether each draft gets its request's own temperature."""
    given = torch.tensor([0.7, 0.0, 1.5])
    found = rejection_sampler.expand_batch_to_tokens(
        given, torch.tensor([2, 3, 5], dtype=torch.int32), 5, 0, 1
    )
    return bool(torch.equal(found, torch.tensor([0.7, 0.7, 1.0, 1.5, 1.5])))


def refuses_logprob_token_ids() -> bool:
    """Whether vLLM refuses by itself what its rejection sampler cannot do."""
    try:
        SamplingParams(logprob_token_ids=[1])._validate_spec_decode(object())  # noqa: SLF001
    except VLLMValidationError:
        return True
    return False


if __name__ == "__main__":
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    found: dict[str, Any] = {
        "refuses_logprob_token_ids": refuses_logprob_token_ids(),
    }
    if sys.argv[1] == "mended":
        import serving.engines.vllm_worker  # noqa: F401

        found["errors"] = {str((*case, draft)): error(*case, draft) for case in CASES for draft in (0, 4)}
    found |= {"lets_no_row_through": lets_no_row_through(), "expands": expands()}
    print(json.dumps(found))  # noqa: T201
