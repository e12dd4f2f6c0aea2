"""Run as a program, for vLLM changes what others find in the interpreter: what it drafts with an exported head.

`python -m tests.e2e.draft_head_in_vllm MODEL FOLDER LAYERS` exports a head of random weights and prints, as JSON,
vLLM's drafts after a few prompts beside those that the training code computes from the same states. In float32.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind"
)

import torch
from vllm import LLM, SamplingParams
from vllm.v1.spec_decode import llm_base_proposer

from deploy.train_draft import head as head_module
from deploy.train_draft import training
from deploy.train_draft.target import load_target

DRAFTS = 3
PROMPTS = (
    "Write a story about an old radio.",
    "Why is the sky blue?",
    "Repeat this text:\n\nThe ferry leaves at nine and does not wait for anybody.",
)


def export_random_head(model: Path, folder: Path, layers: int) -> None:
    """All weights differ from what they begin as, norms too, so that each must be loaded in its place."""
    target = load_target(model, "cpu")
    torch.manual_seed(5)
    draft_ids = torch.randperm(target.vocabulary)[:2048]
    head = training.start(target, training.shape_for(target, 2048, 256, layers), draft_ids)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() == 1:
                weight.mul_(1 + 0.2 * torch.randn_like(weight))
            elif not name.startswith(("lm_head", "fc")):
                weight.normal_(std=0.06)
    head_module.export(head, draft_ids, json.loads((model / "config.json").read_text()), folder)


def main(model: Path, folder: Path, layers: int) -> list[dict[str, Any]]:
    export_random_head(model, folder, layers)
    calls: list[tuple[Any, ...]] = []
    propose = llm_base_proposer.SpecDecodeBaseProposer.propose

    def recorded(self: Any, **given: Any) -> Any:
        names = ("target_hidden_states", "target_token_ids", "next_token_ids")
        before = [given[name].clone() for name in names]
        drafts = propose(self, **given)
        calls.append((*before, drafts.clone()))
        return drafts

    llm_base_proposer.SpecDecodeBaseProposer.propose = recorded
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": DRAFTS}
    llm = LLM(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=1,
        enforce_eager=True,
        speculative_config=speculation,
    )
    target = load_target(model, "cpu")
    head, draft_ids = head_module.load(folder)
    found = []
    for text in PROMPTS:
        turns = [{"role": "user", "content": text}]
        ids = llm.get_tokenizer().apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        calls.clear()
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        n = len(ids)
        states, _, after, drafts = next(call for call in calls if call[1][:n].tolist() == ids)
        theirs = drafts[0].tolist()
        aux = [part[None] for part in states[:n].split(target.hidden, -1)]
        # The text that the drafts are computed along is vLLM's own: the token after the prompt, then its drafts.
        tokens = torch.tensor([[*ids, int(after[0]), *theirs, 0, 0]])
        with torch.no_grad():
            own_aux, _ = target.states(tokens[:, :n], head.shape.aux_layers)
            logits = [head.lm_head(x[0, -1]) for x in head.unroll(aux, target.embed(tokens), DRAFTS)]
        difference = max(float((a - b).norm() / b.norm()) for a, b in zip(own_aux, aux, strict=True))
        ours = [int(draft_ids[x.argmax()]) for x in logits]
        found.append({"vllm": theirs, "ours": ours, "states_differ": difference})
    return found


if __name__ == "__main__":
    answer = main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.write(f"{json.dumps(answer)}\n")
