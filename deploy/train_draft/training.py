"""Training: the target's states computed online, the head unrolled over its own outputs."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import DraftHead, HeadShape
from .target import ANSWER, states

WEIGHT_OF_OTHERS = 0.1  # prompts and user turns teach a little, too
STEP_DECAY = 0.8
HARD_SHARE = 0.5
AFTER_A_MISS = 0.3  # weight of a step whose predecessor was wrong: decoding rarely gets there
WARMUP_STEPS = 100


@dataclass(frozen=True, slots=True)
class Schedule:
    """One session of training: it ends after ``budget_s``; the cosine runs from ``begin`` to ``end`` of 1."""

    budget_s: float
    begin: float
    end: float
    rows: int
    steps: int
    learning_rate: float


def shape_for(config: Any, draft_vocab: int, mlp: int) -> HeadShape:
    """The head for a Llama-like target; states are taken early, in the middle and late."""
    n = config.num_hidden_layers
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or config.rope_theta
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = (min(2, n - 1), n // 2, max(n - 3, 0))
    return HeadShape(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        mlp=mlp,
        draft_vocab=draft_vocab,
        aux_layers=layers if len(set(layers)) == 3 else (0, 1, n - 1),
        rope_theta=float(theta),
        eps=float(config.rms_norm_eps),
    )


def choose_vocabulary(tokens: Tensor, writer: Tensor, vocabulary: int, size: int) -> Tensor:
    """Ids of the ``size`` tokens that the target writes most often in answers; ties by id."""
    counts = torch.bincount(tokens[writer == ANSWER].long(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size]


def start(model: Any, shape: HeadShape, draft_ids: Tensor) -> DraftHead:
    """A new head; its output layer begins as the target's own."""
    head = DraftHead(shape).to(model.device)
    with torch.no_grad():
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[draft_ids].float())
        head.norm.weight.copy_(model.model.norm.weight.float())
    return head


def loss_of(
    head: DraftHead, model: Any, tokens: Tensor, writer: Tensor, draft_ids: Tensor, steps: int
) -> tuple[Tensor, list[float]]:
    """Loss of all steps, and each step's share of right tokens in answers (where the target's is in the vocabulary)."""
    vocabulary = model.config.vocab_size
    index = torch.full((vocabulary,), -1, dtype=torch.long, device=tokens.device)
    index[draft_ids] = torch.arange(len(draft_ids), device=tokens.device)
    aux, last = states(model, tokens, head.shape.aux_layers)
    with torch.no_grad():
        # Position by position through the whole vocabulary, a few rows at a time: all at once would not fit.
        best, share = [], []
        for rows in last.split(8):
            logits = model.get_output_embeddings()(rows).float()
            best.append(index[logits.argmax(-1)])
            share.append((logits[..., draft_ids] - logits.logsumexp(-1, keepdim=True)).exp().to(last.dtype))
        hard, soft = torch.cat(best), torch.cat(share)
        weight = torch.where(writer == ANSWER, 1.0, WEIGHT_OF_OTHERS)
        embedded = model.get_input_embeddings()(F.pad(tokens, (0, steps + 1)))
    length = tokens.shape[1]
    gate: Tensor = torch.ones(tokens.shape, device=tokens.device)
    total: Tensor = torch.zeros((), device=tokens.device)
    right = []
    for i, logits in enumerate(head.unroll(aux, embedded, steps)):
        n = length - 2 - i  # anchors whose label, the target's choice after t + 1 + i, lies inside the row
        guess = logits[:, :n].float().log_softmax(-1)
        label = hard[:, 1 + i : 1 + i + n]
        known = label >= 0
        w = weight[:, 2 + i : 2 + i + n]
        picked = guess.gather(-1, label.clamp(min=0)[..., None])[..., 0]
        soft_loss = -(soft[:, 1 + i : 1 + i + n].float() * guess).sum(-1)
        each = HARD_SHARE * -picked * known + (1 - HARD_SHARE) * soft_loss
        gated = w * (AFTER_A_MISS + (1 - AFTER_A_MISS) * gate[:, :n])
        total = total + STEP_DECAY**i * (each * gated).sum() / gated.sum().clamp(min=1e-6)
        hit = (guess.argmax(-1) == label).detach()
        gate = gate[:, :n] * hit
        own = w == 1
        right.append((hit & own).sum() / own.sum().clamp(min=1))
    return total, torch.stack(right).tolist() if not total.is_cuda else right  # type: ignore[return-value]


def train(
    model: Any,
    head: DraftHead,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    writer: Tensor,
    draft_ids: Tensor,
    schedule: Schedule,
    say: Callable[[str], None],
    checkpoint: Callable[[float], None],
) -> float:
    """Train until the budget is spent; returns the place on the cosine. ``checkpoint`` is called about each minute."""
    device = model.device
    cuda = device.type == "cuda"
    draw = torch.Generator().manual_seed(int(schedule.begin * 1e6))
    began = saved = time.monotonic()
    place, step = schedule.begin, 0
    while True:
        for rows in torch.randperm(len(tokens), generator=draw).split(schedule.rows):
            spent = (time.monotonic() - began) / schedule.budget_s
            if spent >= 1 and step:
                return schedule.end
            place = schedule.begin + (schedule.end - schedule.begin) * min(spent, 1.0)
            factor = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * place)) * min(1.0, (step + 1) / WARMUP_STEPS)
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate * group["factor"] * factor
            batch, by = tokens[rows].long().to(device), writer[rows].to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss, right = loss_of(head, model, batch, by, draft_ids, schedule.steps)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step in (1, 10) or step % 100 == 0:
                shares = " ".join(f"{float(x):.3f}" for x in right)
                ms = 1000 * (time.monotonic() - began) / step
                say(f"train: step {step}, {place:.2f} of the schedule, loss {float(loss):.3f}, right {shares}, {ms:.0f} ms a step")
            if time.monotonic() - saved > 60:
                checkpoint(place)
                saved = time.monotonic()


def optimizer_for(head: DraftHead, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; the output layer begins good and moves less, norms do not decay."""
    named = dict(head.named_parameters())
    output = [named["lm_head.weight"]]
    rest = [p for k, p in named.items() if k != "lm_head.weight" and p.dim() > 1]
    norms = [p for p in named.values() if p.dim() == 1]
    groups = [
        {"params": output, "factor": 0.3, "weight_decay": 0.01},
        {"params": rest, "factor": 1.0, "weight_decay": 0.01},
        {"params": norms, "factor": 1.0, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint in one step, so that a run that is cut off leaves the one before."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
