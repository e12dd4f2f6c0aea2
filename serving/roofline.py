"""What a step must take at least, by the model's size and the machine's measured ceilings. Estimates."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from serving import ceilings, model_store
from serving.ceilings import Ceilings
from serving.core.lane import has_model
from serving.core.speculation.step_time import RooflineStepTime

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
    def step_time(self) -> RooflineStepTime:
        """The same in seconds."""
        return RooflineStepTime.of_hardware(
            parameters=self.parameters,
            weights_bytes=self.weights_bytes,
            flops_per_s=self.flops_per_s,
            bytes_per_s=self.copy_bytes_per_s,
        )

    @property
    def read_s(self) -> float:
        """To read the weights once, however many positions use them."""
        return self.step_time.read_s

    def compute_s(self, tokens: float) -> float:
        """For the arithmetic of that many positions."""
        return self.step_time.token_s * tokens

    def step_s(self, tokens: float) -> float:
        """The longer of both, as if the other hid behind it."""
        return self.step_time.step_s(tokens, kv_tokens=0)

    @property
    def knee_tokens(self) -> float:
        """Positions of a step at which both take equally long."""
        return self.step_time.knee_tokens


def roofline_of(
    replica: Mapping[str, Any], model_path: str, known: Callable[[str], Ceilings | None]
) -> Roofline:
    """What a step of this replica must take at least.

    Args:
        replica: as it describes itself.
        model_path: as the config names the model.
        known: this machine's ceilings, for matrices of a dtype; None where they are not known.

    Raises:
        ValueError: there is no roof to draw; the text is a whole sentence.
    """
    if not has_model(replica):
        raise ValueError("A simulated engine reads no weights, so there is no roof to draw.")
    if replica["device"] != "cpu":
        raise ValueError(
            f"No roof is drawn: the engine computes on {replica['device']}, and only a processor's ceilings are "
            "measured."
        )
    dtype = replica["dtype"]
    if dtype not in BYTES_BY_DTYPE:
        raise ValueError(f"No roof is drawn: the size of a {dtype} weight is not known.")
    try:
        parameters = count_parameters(model_store.directory_of(model_path))
    except (OSError, ValueError) as error:
        raise ValueError(f"No roof is drawn, for the model's size is unknown: {error}.") from None
    dtype_ceilings = known(dtype)
    if dtype_ceilings is None:
        raise ValueError(
            f"No roof is drawn: what this machine can do in {dtype} was not known. `tandem lesson` measures it and "
            "keeps it."
        )
    return Roofline(parameters, dtype, dtype_ceilings.flops_per_s, dtype_ceilings.copy_bytes_per_s)


def kept_ceilings(dtype: str) -> Ceilings | None:
    """Those that the last lesson on this machine measured.

    Raises:
        ConfigError: their file is damaged.
    """
    kept = ceilings.kept()
    return kept if kept is not None and kept.dtype == dtype else None


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
