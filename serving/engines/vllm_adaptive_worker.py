"""Drafts of a learned draft, as many for each row as pay, in vLLM's CPU worker. Imported there by name.

vLLM gives a proposer of another's (`custom_class`) no hidden states, which a head needs, so its own proposes and
this says how many: the longest draft of a step bounds the passes of the draft model, and each row keeps what pays.
The draft's first pass, over what was accepted, runs even then when no row wants drafts: it fills the draft's KV
cache, without which no later draft would be any good. vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from serving.engines.vllm_worker import WorkerExtension as _Mends
from serving.proposers.chooser import Chooser
from serving.proposers.settings import policy_of, settings_of

propose_for_all = GPUModelRunner.propose_draft_token_ids
fits_draft = GPUModelRunner._input_fits_in_drafter  # noqa: SLF001 - asked in each step, before drafts are made
drafts_of_all = GPUModelRunner._get_draft_token_ids_cpu  # noqa: SLF001 - where rows become lists


def propose_draft_token_ids(runner: Any, scheduled: Any, sampled: Any, *rest: Any) -> Any:
    """vLLM's, for drafts of the length that pays."""
    if not hasattr(runner, "tandem_chooser"):
        settings = settings_of(runner.vllm_config)
        most = runner.speculative_config.num_speculative_tokens
        runner.tandem_chooser = Chooser(policy_of(settings, most))
    requests = runner.input_batch.req_ids
    num_sampled = (sampled >= 0).sum(dim=1)  # -1 stands for a draft token that was refused
    num_sampled.masked_fill_(runner.discard_request_mask.gpu[: len(requests)], 0)
    kv_tokens = float(runner.input_batch.num_tokens_no_spec[: len(requests)].sum())
    scheduled.num_spec_tokens_to_schedule = runner.tandem_chooser.choose(
        list(requests), num_sampled.tolist(), kv_tokens
    )
    return propose_for_all(runner, scheduled, sampled, *rest)


def input_fits_in_drafter(runner: Any, metadata: Any) -> bool:
    """vLLM's; where a row is near the model's length it makes no drafts in that step, and gives zeros for all."""
    fits = bool(fits_draft(runner, metadata))
    if not fits and hasattr(runner, "tandem_chooser"):
        runner.tandem_chooser.skip()
    return fits


def get_draft_token_ids_cpu(runner: Any) -> Any:
    """vLLM's, cut for each row."""
    drafts, requests = drafts_of_all(runner)
    if hasattr(runner, "tandem_chooser"):
        drafts = runner.tandem_chooser.cut(requests, drafts)
    return drafts, requests


GPUModelRunner.propose_draft_token_ids = propose_draft_token_ids
GPUModelRunner._input_fits_in_drafter = input_fits_in_drafter  # noqa: SLF001 - as above
GPUModelRunner._get_draft_token_ids_cpu = get_draft_token_ids_cpu  # noqa: SLF001 - as above


class WorkerExtension(_Mends):
    """Adds nothing to vLLM's worker: naming it has this module imported."""
