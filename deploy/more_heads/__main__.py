"""``python -m deploy.more_heads --heads N --out DIR [--model DIR]``: the same model with N attention heads.

Tensor parallelism wants heads that its ranks divide; the default model has 9, which two cards do not. The heads
added are zero where the layer reads them (`o_proj`), so they add nothing to any token, only work. Groups keep their
size: heads that share keys and values still do. Takes checkpoints of the Llama kind, EAGLE-3 heads among them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from deploy.checkpoint import config_of, make, parser_of, tensors_of, write_like

# Axis of a matrix's heads: queries have `num_attention_heads`, keys and values `num_key_value_heads`.
QUERY_AXES = {"q_proj.weight": 0, "o_proj.weight": 1}
KEY_AXES = {"k_proj.weight": 0, "v_proj.weight": 0}


def wider(config: dict[str, Any], heads: int) -> dict[str, Any]:
    """The `config.json` of the same model with `heads` heads.

    Raises:
        ValueError: `heads` are fewer than it has, or not a whole number of groups.
    """
    has, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = has // groups
    if heads <= has or heads % size:
        raise ValueError(f"--heads {heads}: must be above its {has} heads, in groups of {size}")
    head_dim = config.get("head_dim") or config["hidden_size"] // has
    return config | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // size,
        "head_dim": head_dim,
    }


def padded(weight: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The matrix with zeros behind, `size` long along `axis`."""
    shape = list(weight.shape)
    shape[axis] = size - shape[axis]
    return torch.cat([weight, weight.new_zeros(shape)], dim=axis).contiguous()


def widen(source: Path, target: Path, heads: int) -> None:
    """Write the checkpoint `target`.

    Raises:
        FileExistsError: `target` is there.
        ValueError: as `wider`.
    """
    config = wider(config_of(source), heads)
    rows = config["num_attention_heads"] * config["head_dim"]
    key_rows = config["num_key_value_heads"] * config["head_dim"]
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in tensors_of(source):
        matrix = ".".join(name.split(".")[-2:])
        if matrix in QUERY_AXES:
            weight = padded(weight, QUERY_AXES[matrix], rows)
        elif matrix in KEY_AXES:
            weight = padded(weight, KEY_AXES[matrix], key_rows)
        tensors[name] = weight
    write_like(source, target, tensors, config)


def main(argv: list[str] | None = None) -> int:
    def write(source: Path, given: argparse.Namespace) -> str:
        widen(source, given.out, given.heads)
        return f"{given.heads} heads"

    parser = parser_of("deploy.more_heads", __doc__)
    parser.add_argument("--heads", type=int, required=True, help="attention heads it is to have")
    return make(parser, argv, write)


if __name__ == "__main__":
    sys.exit(main())
