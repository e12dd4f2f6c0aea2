"""What a step must take at least, by the model's size and the machine's measured ceilings. Estimates."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Roofline:
    """A step reads all weights once, and computes 2 operations with each of them for every position.

    The KV cache and what attention computes are left out: both are small for short texts.

    Attributes:
        flops_per_s, copy_bytes_per_s: as in `serving.ceilings.Ceilings`.
    """

    parameters: int
    dtype: str
    flops_per_s: float
    copy_bytes_per_s: float

    @property
    def weights_bytes(self) -> int:
        return self.parameters * BYTES_BY_DTYPE[self.dtype]

    @property
    def read_s(self) -> float:
        """To read the weights once, however many positions use them."""
        return self.weights_bytes / self.copy_bytes_per_s

    def compute_s(self, tokens: float) -> float:
        """For the arithmetic of that many positions."""
        return 2 * self.parameters * tokens / self.flops_per_s

    def step_s(self, tokens: float) -> float:
        """The longer of both, as if the other hid behind it."""
        return max(self.read_s, self.compute_s(tokens))

    @property
    def knee_tokens(self) -> float:
        """Positions of a step at which both take equally long."""
        return self.read_s / self.compute_s(1)


def count_parameters(directory: Path) -> int:
    """The parameters of a checkpoint, by the headers of its safetensors files; tied weights are stored once.

    Raises:
        ValueError: there is no such file, or a header cannot be read.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no *.safetensors in {directory}")
    return sum(map(_count, files))


def _count(file: Path) -> int:
    # A file begins with the length of its header, little-endian; the header is JSON, each tensor with its shape.
    with file.open("rb") as opened:
        length = opened.read(LENGTH_BYTES)
        size = struct.unpack("<Q", length)[0] if len(length) == LENGTH_BYTES else 0
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        try:
            header = json.loads(opened.read(size))
        except ValueError as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from None
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
