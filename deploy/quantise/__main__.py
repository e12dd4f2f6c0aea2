"""``python -m deploy.quantise --out DIR [--model DIR]``: a checkpoint whose matrices are in 8 bits.

Each row of a matrix is rounded to 127 steps of its largest weight, without data and without training; activations
are rounded as they come. vLLM multiplies these in 8 bits on CPU and GPU. It is the simplest way there is, to have
something to measure against; what it costs in quality is not measured. For a model that matters take
`llm-compressor` of PyPI.

Format: int-quantized of compressed-tensors, https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from deploy.checkpoint import config_of, make, parser_of, tensors_of, write_like

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
    config = config_of(source)
    if "quantization_config" in config:
        raise ValueError(f"{source}: config.json has a quantization_config: it is quantised already")
    tensors: dict[str, torch.Tensor] = {}
    num_matrices = 0
    for name, tensor in tensors_of(source):
        tensors[name] = tensor
        if name.endswith(MATRIX):
            tensors[name], tensors[f"{name}_scale"] = in_steps(tensor)
            num_matrices += 1
    if not num_matrices:
        raise ValueError(f"{source}: no tensor of *.safetensors has a name that ends in {MATRIX!r}")
    write_like(source, target, tensors, config | {"quantization_config": QUANTISATION})
    return num_matrices


def main(argv: list[str] | None = None) -> int:
    return make(
        parser_of("deploy.quantise", __doc__),
        argv,
        lambda source, given: f"{quantise(source, given.out)} matrices in 8 bits",
    )


if __name__ == "__main__":
    sys.exit(main())
