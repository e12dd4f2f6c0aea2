"""N-gram drafts, as many for each row as pay. vLLM finds `AdaptiveNgram` by name: `method: custom_class`."""

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from serving.proposers.decide import RowHistory
from serving.proposers.rows import Rows
from serving.proposers.settings import policy_of, settings_of


class AdaptiveNgram:
    """vLLM's interface of a proposer, around vLLM's own n-gram drafts."""

    def __init__(self, vllm_config: Any) -> None:
        settings = settings_of(vllm_config)
        speculation = copy.copy(vllm_config.speculative_config)
        # vLLM sets both to 0 for a class that is not its own.
        speculation.prompt_lookup_min = settings["prompt_lookup_min"]
        speculation.prompt_lookup_max = settings["prompt_lookup_max"]
        of_ngram = copy.copy(vllm_config)
        of_ngram.speculative_config = speculation
        self._ngram = NgramProposer(of_ngram)
        self._policy = policy_of(settings, speculation.num_speculative_tokens)
        self._rows: Rows[RowHistory] = Rows(lambda prompt: RowHistory())

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none; vLLM's CPU engine calls it all the same."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row, perhaps none; rows are as `Rows.follow` has them."""
        rows = self._rows.follow(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        found: list[list[int]] = self._ngram.propose(
            self._policy.max_drafts, sampled_token_ids, num_tokens_no_spec, token_ids_cpu
        )
        kv_tokens = float(num_tokens_no_spec[: len(rows)].sum())
        histories = [row or RowHistory() for row in rows]  # one within its prompt has no draft to give
        for history, new in zip(histories, sampled_token_ids, strict=True):
            if new:
                history.learn(len(new))
        chosen = self._policy.choose(histories, [len(draft) for draft in found], kv_tokens)
        return [draft[:num_drafts] for draft, num_drafts in zip(found, chosen, strict=True)]
