"""Acceptance along the target's own greedy answers to held-out prompts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import HeldOut
from .head import DraftHead
from .target import Target

MAX_DRAFTS = 5
ANSWER_TOKENS = 48


def walk(
    accepted_run: list[int], prompt_tokens: int, drafts: int, answer_tokens: int
) -> tuple[int, list[int]]:
    """Decode one answer on paper.

    ``accepted_run[t]`` is how many drafts in a row are right when t + 2 is the first drafted position. Returns the
    number of speculative steps and how often draft i was accepted.
    """
    steps, accepted = 0, [0] * drafts
    place, stop = prompt_tokens, min(prompt_tokens + answer_tokens - 1, len(accepted_run) - MAX_DRAFTS - 2)
    while place < stop:
        kept = min(accepted_run[place - 1], drafts)
        steps += 1
        for i in range(kept):
            accepted[i] += 1
        place += kept + 1
    return steps, accepted


@torch.no_grad()
def evaluate(
    target: Target, head: DraftHead, draft_ids: Tensor, held: HeldOut, answer_tokens: int = ANSWER_TOKENS
) -> dict[str, dict[str, Any]]:
    """Mean accepted length (1 + accepted / steps) for 1 to 5 drafts, and acceptance by position, of each kind."""
    runs: list[list[int]] = []
    for tokens in held.tokens.split(16):
        batch = tokens.long().to(target.device)
        padded = F.pad(batch, (0, MAX_DRAFTS + 2))
        aux, _ = target.states(batch, head.shape.aux_layers)
        right = []
        for i, state in enumerate(head.unroll(aux, target.embed(padded), MAX_DRAFTS)):
            guess = draft_ids[head.lm_head(state).argmax(-1)]
            right.append(guess == padded[:, 2 + i : 2 + i + batch.shape[1]])
        runs += torch.stack(right, -1).long().cumprod(-1).sum(-1).tolist()
    report: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(held.kinds):
        rows = [i for i, k in enumerate(held.kinds) if k == kind]
        lengths: dict[str, float] = {}
        by_position: list[float] = []
        for drafts in range(1, MAX_DRAFTS + 1):
            walks = [walk(runs[i], held.prompt_tokens[i], drafts, answer_tokens) for i in rows]
            steps = max(sum(s for s, _ in walks), 1)
            by_position = [sum(a[i] for _, a in walks) / steps for i in range(drafts)]
            lengths[str(drafts)] = round(1 + sum(by_position), 3)
        report[kind] = {
            "prompts": len(rows),
            "mean_accepted_length": lengths,
            "acceptance_by_position": [round(x, 3) for x in by_position],
        }
    return report
