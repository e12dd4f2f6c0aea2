"""The draft head: one decoder layer over the target's states, as vLLM's ``LlamaForCausalLMEagle3`` computes it.

Source: Li et al., EAGLE-3 (arXiv 2503.01840); vLLM 0.32, ``model_executor/models/llama_eagle3.py``.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the head and of the target it reads; ``aux_layers[i]`` counts the target's layers before the state."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    draft_vocab: int
    aux_layers: tuple[int, int, int]
    rope_theta: float
    eps: float


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32, returned in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight.to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of ``x`` [batch, heads, tokens, head_dim] at ``positions`` [tokens]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None].float() * frequency
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class DraftHead(nn.Module):
    """Weights under vLLM's names, so that a checkpoint is the state dict and nothing is renamed."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden, shape.head_dim
        self.fc_norm = nn.ModuleList(RmsNorm(h, shape.eps) for _ in shape.aux_layers)
        self.fc = nn.Linear(3 * h, h, bias=False)
        attention = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * h, shape.heads * d, bias=False),
                "k_proj": nn.Linear(2 * h, shape.kv_heads * d, bias=False),
                "v_proj": nn.Linear(2 * h, shape.kv_heads * d, bias=False),
                "o_proj": nn.Linear(shape.heads * d, h, bias=False),
            }
        )
        mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(h, shape.mlp, bias=False),
                "up_proj": nn.Linear(h, shape.mlp, bias=False),
                "down_proj": nn.Linear(shape.mlp, h, bias=False),
            }
        )
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.midlayer = nn.ModuleDict({name: RmsNorm(h, shape.eps) for name in norms})
        self.midlayer["self_attn"], self.midlayer["mlp"] = attention, mlp
        self.norm = RmsNorm(h, shape.eps)
        self.lm_head = nn.Linear(h, shape.draft_vocab, bias=False)

    def combine(self, aux: list[Tensor]) -> Tensor:
        """The three states [batch, tokens, hidden] as one; each normed, for a residual stream grows with depth."""
        return self.fc(torch.cat([norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)], -1))

    def step(
        self, embedded: Tensor, state: Tensor, first_position: int, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """One drafted token after every position at once.

        ``keys[0]`` is of the pass over the text and is seen causally; each later one belongs to the same
        anchor's own drafts only. Returns the normed output and the lists with this step's entry added.
        """
        s, layer = self.shape, self.midlayer
        batch, tokens, _ = state.shape
        x = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](state)], -1)
        attention = layer["self_attn"]
        positions = torch.arange(first_position, first_position + tokens, device=x.device)

        def split(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, s.head_dim).transpose(1, 2)

        q = rotate(split(attention["q_proj"](x)), positions, s.rope_theta) * s.head_dim**-0.5
        keys = [*keys, rotate(split(attention["k_proj"](x)), positions, s.rope_theta)]
        values = [*values, split(attention["v_proj"](x))]
        group = s.heads // s.kv_heads
        wide_keys = [k.repeat_interleave(group, 1) for k in keys]
        wide_values = [v.repeat_interleave(group, 1) for v in values]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        scores = [(q @ wide_keys[0].transpose(-1, -2)).float().masked_fill(~causal, float("-inf"))]
        scores += [(q * k).sum(-1, keepdim=True).float() for k in wide_keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
        mixed = weights[..., :tokens] @ wide_values[0]
        for i, v in enumerate(wide_values[1:]):
            mixed = mixed + weights[..., tokens + i, None] * v
        residual = state + attention["o_proj"](mixed.transpose(1, 2).reshape(batch, tokens, -1))
        y = layer["post_attention_layernorm"](residual)
        mlp = layer["mlp"]
        residual = residual + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
        return self.norm(residual), keys, values

    def unroll(self, aux: list[Tensor], embeddings: Tensor, steps: int) -> Iterator[Tensor]:
        """Draft logits of step 0, 1, ...; at anchor t, step i predicts the token at t + 2 + i.

        ``embeddings`` [batch, tokens + steps, hidden] are of the text itself: what is drafted after an accepted
        draft is all that counts, and an accepted draft is the text.
        """
        state = self.combine(aux)
        tokens = state.shape[1]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for i in range(steps):
            state, keys, values = self.step(embeddings[:, 1 + i : 1 + i + tokens], state, i, keys, values)
            yield self.lm_head(state)


def export(head: DraftHead, draft_ids: Tensor, target_config: dict[str, Any], directory: Path) -> int:
    """Write config.json and model.safetensors (bf16) in vLLM's layout; returns the bytes of the weights' file."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in head.state_dict().items()}
    weights["d2t"] = draft_ids.cpu().long() - torch.arange(len(draft_ids))
    save_file(weights, directory / "model.safetensors")
    shape = head.shape
    dropped = ("_name_or_path", "_model_name_or_path")
    config = {k: v for k, v in target_config.items() if k not in dropped} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": shape.mlp,
        "draft_vocab_size": shape.draft_vocab,
        "tie_word_embeddings": False,
        "target_hidden_size": shape.hidden,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        },
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "shape.json").write_text(json.dumps(asdict(shape), indent=2) + "\n")
    return (directory / "model.safetensors").stat().st_size


def load(directory: Path) -> tuple[DraftHead, Tensor]:
    """An exported head and the target ids of its vocabulary."""
    fields = json.loads((directory / "shape.json").read_text())
    head = DraftHead(HeadShape(**{**fields, "aux_layers": tuple(fields["aux_layers"])}))
    weights = load_file(directory / "model.safetensors")
    offsets = weights.pop("d2t")
    head.load_state_dict({k: v.float() for k, v in weights.items()})
    return head, offsets + torch.arange(len(offsets))
