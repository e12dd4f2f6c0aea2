"""The iterative lane's drafts as vLLM has them proposed: `method: custom_class`, in the process that samples.

vLLM gives a proposer neither whose rows they are nor what the model predicted behind a wrong draft. Importing this
module, which nothing but such a lane does, has vLLM's runner tell it. vLLM 0.32.0, its first model runner.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from serving.config import RefinementConfig
from serving.proposers.refinement import Rows, Verified
from serving.proposers.settings import settings_of

sample = GPUModelRunner._sample  # noqa: SLF001


def sample_and_tell(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    """vLLM's; the proposer is told first what is about to be verified."""
    runner.drafter.see(runner.input_batch.req_ids, logits, spec_decode_metadata)
    return sample(runner, logits, spec_decode_metadata)


GPUModelRunner._sample = sample_and_tell  # noqa: SLF001


class Lookahead:
    """One for an engine; what it remembers of a request goes when the request is not in a step."""

    def __init__(self, vllm_config: Any) -> None:
        self.settings = RefinementConfig.model_validate(settings_of(vllm_config))
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self.rows = Rows(self.settings)

    def load_model(self, model: Any) -> None:
        """vLLM calls it; there is none to load."""

    def see(self, request_ids: list[str], logits: Any, metadata: Any) -> None:
        """Keep what a step verifies.

        Args:
            logits: of the model behind each row's last token and each of its drafts, row after row.
            metadata: vLLM's `SpecDecodeMetadata`; None where no row has a draft.
        """
        if metadata is None:
            self.rows.see(request_ids, [], [], [])
            return
        predicted = logits.argmax(dim=-1).tolist()
        self.rows.see(request_ids, metadata.num_draft_tokens, metadata.draft_token_ids.tolist(), predicted)

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """The next draft of each row.

        Args:
            sampled_token_ids: what each row's text grew by; nothing while its prompt is being read.
            num_tokens: length of each row's text, shape (rows,).
            token_ids: their tokens, shape (rows, longest).
            slot_mappings: not needed; vLLM gives it by name.
        """
        drafts: list[list[int]] = []
        rows = zip(sampled_token_ids, self.rows, strict=True)
        for place, (new, (row, drafted, predicted)) in enumerate(rows):
            length = int(num_tokens[place])
            # The step after next must fit, too: its text has one token more than what is drafted here.
            max_tokens = min(self.settings.num_speculative_tokens, self._max_model_len - length - 1)
            if not new or max_tokens < 1:
                drafts.append([])
                continue
            more = token_ids[place, row.num_tokens : length].tolist()
            drafts.append(row.draft(more, Verified(drafted, predicted, len(new)), max_tokens))
        return drafts
