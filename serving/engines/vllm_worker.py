"""Mends in vLLM's worker, the process that samples. Imported there by name: `--worker-extension-cls`.

vLLM 0.32.0 needs them; `tests/e2e/test_speculative_sampling.py` fails with the first that needs one no more.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

apply_top_k_to_rows = topk_topp_sampler.apply_top_k_only


def apply_top_k_only(logits: Any, k: Any) -> Any:
    """vLLM's, which asks for the highest `k` of the rows: a speculative step without drafts has none."""
    return apply_top_k_to_rows(logits, k) if len(logits) else logits


def expand_batch_to_tokens(
    x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Any:
    """A request's temperature, `top_k` or `top_p` for each of its drafts.

    vLLM's on CPU fills a copy and gives the memory it has not written: no two answers have the same temperature.
    """
    num_drafts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    replaced = x.masked_fill(x == replace_from, replace_to)
    return replaced.repeat_interleave(num_drafts, output_size=num_tokens)


topk_topp_sampler.apply_top_k_only = apply_top_k_only
rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


class WorkerExtension:
    """Adds nothing to vLLM's worker: naming it has this module imported."""
