"""What this machine can do at most: measured once, kept beside the model, shown next to what engines do.

`python -m serving.ceilings` measures; nothing else should run meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from serving.core.errors import ConfigError
from serving.model_store import cache_dir

NUM_RUNS = 5
COPY_BYTES = 256 * 1024 * 1024  # far beyond any cache
MATRIX_ROWS = 2048


class Ceilings(msgspec.Struct, frozen=True):
    """The best of `NUM_RUNS`.

    Attributes:
        flops_per_s: a product of two square matrices of that type, 2 n^3 operations.
        copy_bytes_per_s: bytes read and bytes written, both counted, in a copy of `COPY_BYTES`.
        measured_at_s: seconds since the epoch.
    """

    flops_per_s: float
    copy_bytes_per_s: float
    dtype: str
    measured_at_s: float


def ceilings_path() -> Path:
    """Where they are kept: one file for each user and machine."""
    return cache_dir() / "ceilings.json"


def measure(dtype: str = "float32") -> Ceilings:
    """Measure with every core that this process may use; takes a few seconds.

    Args:
        dtype: of the matrices, as torch names it.
    """
    import torch  # seconds to import, which no reader of the file should pay

    left, right = (torch.ones(MATRIX_ROWS, MATRIX_ROWS, dtype=getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    matrix_s = _best_s(lambda: torch.matmul(left, right, out=product))
    copy_s = _best_s(lambda: target.copy_(source))
    return Ceilings(2 * MATRIX_ROWS**3 / matrix_s, 2 * COPY_BYTES / copy_s, dtype, time.time())


def _best_s(work: Callable[[], object]) -> float:
    work()  # the first touches the memory
    took_s = []
    for _ in range(NUM_RUNS):
        began_s = time.perf_counter()
        work()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def keep(ceilings: Ceilings) -> None:
    """Write them where `kept` finds them."""
    path = ceilings_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(ceilings))


def kept() -> Ceilings | None:
    """Those measured earlier on this machine; None when there are none.

    Raises:
        ConfigError: the file is not what `keep` writes.
    """
    path = ceilings_path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ceilings)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; remove it and measure again") from error


if __name__ == "__main__":
    measured = measure()
    keep(measured)
    print(  # noqa: T201 - the answer of this command
        f"{measured.flops_per_s / 1e9:.1f} GFLOP/s ({measured.dtype}), "
        f"{measured.copy_bytes_per_s / 1e9:.1f} GB/s; kept in {ceilings_path()}"
    )
