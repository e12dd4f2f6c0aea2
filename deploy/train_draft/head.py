"""The draft head: decoder layers over the target's states, as vLLM's ``Eagle3LlamaForCausalLM`` computes them.

Source: Li et al., EAGLE-3 (arXiv 2503.01840); vLLM 0.32, ``model_executor/models/llama_eagle3.py``.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .target import rms_norm, rope_table, rotate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the head and its target; ``aux_layers[i]`` counts the target's layers before the state."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    layers: int
    draft_vocab: int
    aux_layers: tuple[int, ...]
    rope_theta: float
    eps: float


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """Kept in float32, used in the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class DraftLayer(nn.Module):
    """The first layer reads the token beside the state (``inputs`` = 2 x hidden), a later one the stream alone."""

    def __init__(self, shape: HeadShape, inputs: int) -> None:
        super().__init__()
        h, d = shape.hidden, shape.head_dim
        self.head_dim = d
        self.input_layernorm = RmsNorm(h, shape.eps)
        self.hidden_norm = RmsNorm(
            h, shape.eps
        )  # of the state; vLLM has it in later layers, too, and leaves it
        self.post_attention_layernorm = RmsNorm(h, shape.eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": Linear(inputs, shape.heads * d),
                "k_proj": Linear(inputs, shape.kv_heads * d),
                "v_proj": Linear(inputs, shape.kv_heads * d),
                "o_proj": Linear(shape.heads * d, h),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": Linear(h, shape.mlp),
                "up_proj": Linear(h, shape.mlp),
                "down_proj": Linear(shape.mlp, h),
            }
        )

    def project(
        self, embedded: Tensor | None, stream: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, tokens, head_dim]."""
        if embedded is None:
            x = self.input_layernorm(stream)
        else:
            x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(stream)], -1)

        def heads(name: str) -> Tensor:
            y: Tensor = self.self_attn[name](x)
            return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

        return (
            rotate(heads("q_proj"), cos, sin),
            rotate(heads("k_proj"), cos, sin),
            heads("v_proj").contiguous(),
        )

    def finish(self, mixed: Tensor, stream: Tensor) -> Tensor:
        """The stream after attention's output ``mixed`` and the MLP."""
        batch, _, tokens, _ = mixed.shape
        stream = stream + self.self_attn["o_proj"](mixed.transpose(1, 2).reshape(batch, tokens, -1))
        y = self.post_attention_layernorm(stream)
        gated = F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)
        return stream + self.mlp["down_proj"](gated)


def sees(tokens: int, query: Tensor, key: Tensor) -> Tensor:
    """Whether anchor ``query`` sees ``key``: the text up to itself, and of each later step only its own draft."""
    return ((key < tokens) & (query >= key)) | ((key >= tokens) & (key % tokens == query))


@lru_cache(maxsize=64)
def dense_mask(tokens: int, keys: int, device: torch.device) -> Tensor:
    at = torch.arange(keys, device=device)
    return sees(tokens, at[:tokens, None], at[None])


@lru_cache(maxsize=64)
def block_mask(tokens: int, keys: int, device: torch.device) -> BlockMask:
    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(tokens, query, key)

    return create_block_mask(mask, None, None, tokens, keys, device=str(device))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention under ``sees``; all scores are computed."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(q.shape[2], k.shape[2], q.device))


@lru_cache(maxsize=1)
def compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention under ``sees``; blocks that nobody sees are left out. For a GPU."""
    mask = block_mask(q.shape[2], k.shape[2], q.device)
    mixed = compiled_flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(mixed, Tensor)
    return mixed


class DraftHead(nn.Module):
    """Weights under vLLM's names, so that a checkpoint is the state dict and nothing is renamed."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        h = shape.hidden
        self.fc_norm = nn.ModuleList(RmsNorm(h, shape.eps) for _ in shape.aux_layers)
        self.fc = Linear(len(shape.aux_layers) * h, h)
        self.midlayer = DraftLayer(shape, 2 * h)
        if shape.layers > 1:
            self.layers = nn.ModuleDict({str(i): DraftLayer(shape, h) for i in range(1, shape.layers)})
        self.norm = RmsNorm(h, shape.eps)
        self.lm_head = Linear(h, shape.draft_vocab)

    @property
    def stack(self) -> list[DraftLayer]:
        later = (
            [m for m in self.layers.values() if isinstance(m, DraftLayer)] if self.shape.layers > 1 else []
        )
        return [self.midlayer, *later]

    def compile_parts(self) -> None:
        """Compile what lies between the attentions; one compilation serves all steps."""
        for layer in self.stack:
            layer.project = torch.compile(layer.project, dynamic=False)  # type: ignore[method-assign]
            layer.finish = torch.compile(layer.finish, dynamic=False)  # type: ignore[method-assign]
        self.combine = torch.compile(self.combine, dynamic=False)  # type: ignore[method-assign]

    def combine(self, aux: list[Tensor]) -> Tensor:
        """The target's states [batch, tokens, hidden] as one; each normed, for a stream grows with depth."""
        state: Tensor = self.fc(torch.cat([norm(x) for norm, x in zip(self.fc_norm, aux, strict=True)], -1))
        return state

    def unroll(
        self, aux: list[Tensor], embeddings: Tensor, steps: int, attention: Attention = dense_attention
    ) -> Iterator[Tensor]:
        """Normed outputs of step 0, 1, ...; through ``lm_head``, step i at anchor t predicts token t + 2 + i.

        ``embeddings`` [batch, at least tokens + steps, hidden] are of the text itself: what is drafted after an
        accepted draft is all that counts, and an accepted draft is the text.
        """
        state = self.combine(aux)
        tokens = state.shape[1]
        cos, sin = rope_table(tokens + steps, self.shape.head_dim, self.shape.rope_theta, state.device)
        caches: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.stack]
        for i in range(steps):
            embedded: Tensor | None = embeddings[:, 1 + i : 1 + i + tokens]
            stream = state
            for layer, (keys, values) in zip(self.stack, caches, strict=True):
                q, k, v = layer.project(embedded, stream, cos[i : i + tokens], sin[i : i + tokens])
                keys.append(k)
                values.append(v)
                stream = layer.finish(attention(q, torch.cat(keys, 2), torch.cat(values, 2)), stream)
                embedded = None
            state = self.norm(stream)
            yield state


def shape_fields(shape: HeadShape) -> dict[str, Any]:
    return {**asdict(shape), "aux_layers": list(shape.aux_layers)}


def shape_from(fields: dict[str, Any]) -> HeadShape:
    return HeadShape(**{**fields, "aux_layers": tuple(fields["aux_layers"])})


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
        "dtype": "bfloat16",
        "num_hidden_layers": shape.layers,
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
    return (directory / "model.safetensors").stat().st_size


def load(directory: Path) -> tuple[DraftHead, Tensor]:
    """An exported head and the target ids of its vocabulary."""
    c = json.loads((directory / "config.json").read_text())
    shape = HeadShape(
        hidden=c["hidden_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        mlp=c["intermediate_size"],
        layers=c["num_hidden_layers"],
        draft_vocab=c["draft_vocab_size"],
        aux_layers=tuple(c["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        rope_theta=float((c.get("rope_parameters") or {}).get("rope_theta") or c["rope_theta"]),
        eps=float(c["rms_norm_eps"]),
    )
    head = DraftHead(shape)
    weights = load_file(directory / "model.safetensors")
    offsets = weights.pop("d2t")
    weights.pop("t2d", None)  # some exporters add the same the other way round
    head.load_state_dict({k: v.float() for k, v in weights.items()})
    return head, offsets + torch.arange(len(offsets))
