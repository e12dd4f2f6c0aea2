"""Training: the target's states computed online, the head unrolled over its own outputs."""

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import Attention, DraftHead, HeadShape, block_attention, dense_attention
from .target import ANSWER, LENGTHENED, Target, layer_forward

WEIGHT_OF_OTHERS = 0.1  # prompts and user turns teach a little, too
STEP_DECAY = 0.8
HARD_SHARE = 0.5
AFTER_A_MISS = 0.3  # weight of a step whose predecessor was wrong: decoding rarely gets there
WARMUP_STEPS = 100
LAST_RATE = 0.01  # of the learning rate, at the end of the cosine
EMA_DECAY = 0.999
STEADY_STEP = 4 * 2 + 1  # by then each kind of rows was most likely compiled for
STATS_TOKENS = 8192  # whose logits over the whole vocabulary are held at once
CHECKPOINT_S = 120.0
RESERVE_S = 8.0  # for the last checkpoint and what waits on the GPU


@dataclass(frozen=True, slots=True)
class Schedule:
    """One session of training: it ends ``budget_s`` after its start; the cosine goes from ``begin`` to ``end``."""

    budget_s: float
    begin: float
    end: float
    tokens_per_step: int
    unroll: int
    learning_rate: float
    report_every: int
    max_steps: int | None = (
        None  # of this session: where given, the cosine goes by steps unless time runs out
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one length: tokens (int32) and who wrote them (int8), [rows, length]."""

    tokens: Tensor
    writer: Tensor


@dataclass(slots=True)
class Trained:
    """All that training goes on from."""

    head: DraftHead
    average: dict[str, Tensor]  # moving average of the weights: what is exported
    optimizers: list[torch.optim.Optimizer]
    draft_ids: Tensor
    place: float = 0.0  # on the cosine
    steps: int = 0
    tokens_seen: int = 0


def shape_for(target: Target, draft_vocab: int, mlp: int, layers: int) -> HeadShape:
    """The head for a target; states are taken early, in the middle and late."""
    n = len(target.layers)
    aux = (min(2, n - 1), n // 2, max(n - 3, 0))
    return HeadShape(
        hidden=target.hidden,
        heads=target.sizes.heads,
        kv_heads=target.sizes.kv_heads,
        head_dim=target.sizes.head_dim,
        mlp=mlp,
        layers=layers,
        draft_vocab=draft_vocab,
        aux_layers=aux if aux[0] < aux[1] < aux[2] else tuple(sorted({0, n // 2, n})),
        rope_theta=target.theta,
        eps=target.sizes.eps,
    )


def choose_vocabulary(pools: list[Rows], vocabulary: int, size: int) -> tuple[Tensor, float]:
    """Ids of the ``size`` tokens most often in answers (ties by id), and their share of all tokens there."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for pool in pools:
        by = pool.writer
        counts += torch.bincount(
            pool.tokens[(by == ANSWER) | (by == LENGTHENED)].long(), minlength=vocabulary
        )
    ids = counts.argsort(descending=True, stable=True)[:size]
    return ids, float(counts[ids].sum() / counts.sum().clamp(min=1))


def start(target: Target, shape: HeadShape, draft_ids: Tensor) -> DraftHead:
    """A new head; its output layer begins as the target's own."""
    head = DraftHead(shape).to(target.device)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() > 1 and name != "fc.weight":
                weight.normal_(std=0.02)
        head.lm_head.weight.copy_(target.output[draft_ids].float())
        head.norm.weight.copy_(target.norm.float())
    return head


def optimizers_for(head: DraftHead, learning_rate: float, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon (Jordan et al. 2024) for the matrices between the embedding and the output layer.

    The output layer begins good and moves less; norms do not decay. A group's ``peak`` is its highest rate.
    """
    named = dict(head.named_parameters())
    unused = {f"layers.{i}.hidden_norm.weight" for i in range(1, head.shape.layers)}
    matrices = [p for k, p in named.items() if k != "lm_head.weight" and p.dim() > 1]
    groups: list[dict[str, Any]] = [
        {"params": [named["lm_head.weight"]], "peak": 0.3 * learning_rate, "weight_decay": 0.01},
        {"params": [p for k, p in named.items() if p.dim() == 1 and k not in unused], "peak": learning_rate,
         "weight_decay": 0.0},
    ]  # fmt: skip
    found: list[torch.optim.Optimizer] = []
    if kind == "muon":
        peaked = [{"params": matrices, "peak": learning_rate}]
        found.append(
            torch.optim.Muon(peaked, lr=learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
    else:
        groups.append({"params": matrices, "peak": learning_rate, "weight_decay": 0.01})
    fused = named["lm_head.weight"].is_cuda
    found.append(torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=fused))
    return found


def target_says(
    output: Tensor, last: Tensor, draft_ids: Tensor, end: int, no_end: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's probabilities of the draft vocabulary and its choice (its own id), of each state [n, hidden].

    Where ``no_end`` [n], the end token cannot be chosen, as when the text was written.
    """
    logits = F.linear(last, output)
    is_end = torch.arange(logits.shape[1], device=logits.device) == end
    logits = torch.where(no_end[:, None] & is_end, float("-inf"), logits)
    mass = logits.float().logsumexp(-1, keepdim=True)
    return (logits[:, draft_ids].float() - mass).exp().to(last.dtype), logits.argmax(-1)


def draft_loss(
    state: Tensor, output: Tensor, soft: Tensor, hard: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy to half the target's probabilities and half its choice, and where the draft is right.

    ``hard`` is an index into the draft vocabulary, -1 where the target's choice is not in it.
    """
    logits = F.linear(state, output.to(state.dtype)).float()
    is_choice = torch.arange(logits.shape[-1], device=logits.device) == hard[..., None]
    aim = HARD_SHARE * is_choice.float() + (1 - HARD_SHARE) * soft.float()
    each = logits.logsumexp(-1) * aim.sum(-1) - (aim * logits).sum(-1)
    return (each * weight).sum(), logits.argmax(-1) == hard


class Teacher:
    """Computes a batch's losses; ``compiled`` for a GPU."""

    def __init__(self, target: Target, draft_ids: Tensor, end: int, unroll: int, *, compiled: bool) -> None:
        self.target, self.draft_ids, self.end, self.unroll = target, draft_ids, end, unroll
        self.index = torch.full((target.vocabulary,), -1, dtype=torch.long, device=target.device)
        self.index[draft_ids] = torch.arange(len(draft_ids), device=target.device)
        self.attention: Attention = dense_attention
        self.says, self.loss = target_says, draft_loss
        if compiled:
            from torch._dynamo import config as dynamo_config

            dynamo_config.recompile_limit = 64  # shapes: two lengths, one key length for each step
            self.attention = block_attention
            self.says = torch.compile(target_says, dynamic=False)
            self.loss = torch.compile(draft_loss, dynamic=False)
            target.layer = torch.compile(layer_forward, dynamic=False)

    @torch.no_grad()
    def labels(self, tokens: Tensor, writer: Tensor, aux_layers: tuple[int, ...]) -> tuple[Any, ...]:
        """States, probabilities, choices and weights, padded on the right so that each step reads a slice of T."""
        aux, last = self.target.states(tokens, aux_layers)
        rows, length = tokens.shape
        more = self.unroll + 2
        own = (writer == ANSWER) | (writer == LENGTHENED)
        no_end = F.pad((writer == LENGTHENED)[:, 1:], (0, 1))
        soft = torch.zeros(rows, length + more, len(self.draft_ids), dtype=last.dtype, device=last.device)
        hard = torch.full((rows, length + more), -1, dtype=torch.long, device=last.device)
        some = max(1, STATS_TOKENS // length)
        for i in range(0, rows, some):
            states = last[i : i + some].reshape(-1, last.shape[-1])
            said, choice = self.says(
                self.target.output, states, self.draft_ids, self.end, no_end[i : i + some].reshape(-1)
            )
            soft[i : i + some, :length] = said.view(-1, length, said.shape[-1])
            hard[i : i + some, :length] = self.index[choice].view(-1, length)
        # The last position has no token after it in the row that could be a draft's.
        weight = F.pad(torch.where(own, 1.0, WEIGHT_OF_OTHERS), (0, more))
        return aux, soft, hard, weight, F.pad(tokens, (0, more))

    def __call__(self, head: DraftHead, tokens: Tensor, writer: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of all steps, and [steps, 2]: each step's loss and share of right drafts in answers."""
        aux, soft, hard, weight, padded = self.labels(tokens, writer, head.shape.aux_layers)
        length = tokens.shape[1]
        gate = torch.ones(tokens.shape, device=tokens.device)
        total = torch.zeros((), device=tokens.device)
        stats = []
        for i, state in enumerate(head.unroll(aux, self.target.embed(padded), self.unroll, self.attention)):
            of_text = weight[:, 2 + i : 2 + i + length]
            w = (of_text * (AFTER_A_MISS + (1 - AFTER_A_MISS) * gate)).contiguous()
            label = hard[:, 1 + i : 1 + i + length].contiguous()
            loss, hit = self.loss(state, head.lm_head.weight, soft[:, 1 + i : 1 + i + length], label, w)
            loss = loss / w.sum().clamp(min=1e-6)
            total = total + STEP_DECAY**i * loss
            gate = gate * hit
            own = of_text == 1
            stats.append(torch.stack([loss.detach(), (hit & own).sum() / own.sum().clamp(min=1)]))
        return total, torch.stack(stats)

    @torch.no_grad()
    def expected_length(self, head: DraftHead, rows: Rows, batch_rows: int, drafts: int = 3) -> float:
        """1 + the mean number of drafts in a row that are the target's choice, over all anchors in answers."""
        reached, anchors = 0.0, 0.0
        for tokens, by in zip(rows.tokens.split(batch_rows), rows.writer.split(batch_rows), strict=True):
            tokens, by = tokens.long().to(self.target.device), by.to(self.target.device)
            aux, _, hard, weight, padded = self.labels(tokens, by, head.shape.aux_layers)
            length = tokens.shape[1]
            good = torch.ones_like(tokens, dtype=torch.bool)
            for i, state in enumerate(head.unroll(aux, self.target.embed(padded), drafts, dense_attention)):
                good &= head.lm_head(state).argmax(-1) == hard[:, 1 + i : 1 + i + length]
                own = weight[:, 2 + i : 2 + i + length] == 1
                reached += float((good & own).sum())
                anchors += float(own.sum()) if i == 0 else 0.0
        return 1 + reached / max(anchors, 1.0)


def train(
    trained: Trained,
    teacher: Teacher,
    pools: list[Rows],
    schedule: Schedule,
    say: Callable[[str], None],
    checkpoint: Callable[[], None],
    peaks: list[list[float]],
) -> None:
    """Train until the budget is spent. ``checkpoint`` is called now and then, not at the end.

    Each step takes rows of one pool, drawn by the pools' sizes. The cosine moves with the clock, from the step at
    which everything is compiled. ``peaks`` are the highest rates of each optimizer's groups.
    """
    head, device = trained.head, teacher.target.device
    began = saved = time.monotonic()
    deadline = began + max(schedule.budget_s - RESERVE_S, 0.5 * schedule.budget_s)
    draw = random.Random(f"{schedule.begin}/{trained.steps}")
    shuffle = torch.Generator().manual_seed(draw.randrange(2**31))
    held = [Rows(p.tokens.to(device), p.writer.to(device)) for p in pools]
    queues: list[list[Tensor]] = [[] for _ in pools]
    sizes = [p.tokens.numel() for p in pools]
    parameters = dict(head.named_parameters())
    steady = shown = began
    step, shown_step = 0, 0
    stats: Tensor | float = 0.0
    max_steps = schedule.max_steps or sys.maxsize
    while step < 1 or (time.monotonic() < deadline and step < max_steps):
        if step == STEADY_STEP:
            steady = time.monotonic()
        share = (time.monotonic() - steady) / max(deadline - steady, 1e-6) if step >= STEADY_STEP else 0.0
        share = max(share, step / max_steps)
        trained.place = schedule.begin + (schedule.end - schedule.begin) * min(share, 1.0)
        warm = min(1.0, (trained.steps + 1) / WARMUP_STEPS)
        factor = warm * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * trained.place)))
        for optimizer, tops in zip(trained.optimizers, peaks, strict=True):
            for group, top in zip(optimizer.param_groups, tops, strict=True):
                group["lr"] = top * factor
        # The first steps take the pools in turn, so that all is compiled before the clock counts.
        which = step % len(pools) if step < STEADY_STEP else draw.choices(range(len(pools)), sizes)[0]
        rows = max(1, schedule.tokens_per_step // held[which].tokens.shape[1])
        if not queues[which]:
            order = torch.randperm(len(held[which].tokens), generator=shuffle).to(device)
            whole = [part for part in order.split(rows) if len(part) == rows]
            queues[which] = whole or [order]
        picked = queues[which].pop()
        loss, seen = teacher(head, held[which].tokens[picked].long(), held[which].writer[picked])
        for optimizer in trained.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in trained.optimizers:
            optimizer.step()
        decay = min(EMA_DECAY, (1 + trained.steps) / (10 + trained.steps))
        with torch.no_grad():
            torch._foreach_lerp_(
                [trained.average[k] for k in parameters], [p.detach() for p in parameters.values()], 1 - decay
            )
        step += 1
        trained.steps += 1
        trained.tokens_seen += picked.numel() * held[which].tokens.shape[1]
        stats = stats + seen
        if step in (1, STEADY_STEP) or step % schedule.report_every == 0:
            mean = (
                (stats / (step - shown_step)).tolist() if isinstance(stats, Tensor) else []
            )  # waits for the device
            now = time.monotonic()
            ms = 1000 * (now - shown) / (step - shown_step)
            say(
                f"train: step {trained.steps}, {trained.place:.3f} of the schedule, loss "
                f"{' '.join(f'{x:.3f}' for x, _ in mean)}, right {' '.join(f'{x:.3f}' for _, x in mean)}, "
                f"{ms:.1f} ms a step, {1000 * schedule.tokens_per_step / ms:,.0f} tokens/s, "
                f"{trained.tokens_seen / 1e6:.1f} M tokens seen, {max(deadline - now, 0):.0f} s left"
            )
            shown, shown_step, stats = now, step, 0.0
        if time.monotonic() - saved > CHECKPOINT_S:
            checkpoint()
            saved = time.monotonic()
    if device.type == "cuda":
        torch.cuda.synchronize()
    trained.place = schedule.end


def save_atomically(path: Path, state: dict[str, Any]) -> None:
    """Replace the file in one step, so that a run that is cut off leaves the one before."""
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
