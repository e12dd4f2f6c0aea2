"""``python -m deploy.quantise --out DIR [--model DIR]``: a checkpoint whose matrices are in 8 bits.

Each row of a matrix is rounded to 127 steps of its largest weight, without data and without training; activations
are rounded as they come. vLLM multiplies these in 8 bits on CPU and GPU. It is the simplest way there is, to have
something to measure against; what it costs in quality is not measured. For a model that matters take
`llm-compressor` of PyPI.

Format: int-quantized of compressed-tensors, https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from serving import model_store
from serving.core.errors import ConfigError

STEPS = 127
MATRIX = (
    "proj.weight"  # how the names of all matrices of the Llama kind end, but of embedding and output layer
)
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
    },
}


def in_steps(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in 8 bits, and the step of each row; shapes (rows, columns) and (rows, 1)."""
    exact = weight.float()
    step = (exact.abs().amax(dim=1, keepdim=True) / STEPS).clamp(min=torch.finfo(torch.float32).tiny)
    return (exact / step).round().to(torch.int8), step


def quantise(source: Path, target: Path) -> int:
    """Write the checkpoint `target`; how many matrices were rounded.

    Raises:
        FileExistsError: `target` is there.
        ValueError: `source` has no such matrix, or is quantised already.
    """
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ValueError(f"{source}: config.json has a quantization_config: it is quantised already")
    tensors: dict[str, torch.Tensor] = {}
    num_matrices = 0
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                tensors[name] = opened.get_tensor(name)
                if name.endswith(MATRIX):
                    tensors[name], tensors[f"{name}_scale"] = in_steps(tensors[name])
                    num_matrices += 1
    if not num_matrices:
        raise ValueError(f"{source}: no tensor of *.safetensors has a name that ends in {MATRIX!r}")
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISATION}, indent=2))
    return num_matrices


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.quantise", description=__doc__)
    parser.add_argument("--model", type=Path, help="directory of the checkpoint (default: the default model)")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not be there")
    given = parser.parse_args(argv)
    try:
        num_matrices = quantise(given.model or model_store.prepare(print), given.out)
    except (OSError, ValueError, ConfigError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{num_matrices} matrices in 8 bits: {given.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
