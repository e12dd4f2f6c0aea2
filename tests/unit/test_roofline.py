from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from serving.roofline import Roofline, count_parameters


def write(file: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 64)


def test_parameters_are_counted_over_all_files(tmp_path: Path) -> None:
    tensor = {"dtype": "BF16", "data_offsets": [0, 1]}
    write(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "w": tensor | {"shape": [30, 20]}})
    write(tmp_path / "b.safetensors", {"v": tensor | {"shape": [7]}, "s": tensor | {"shape": []}})
    assert count_parameters(tmp_path) == 608


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xff" * 16, struct.pack("<Q", 4) + b"{no}"])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"w\.safetensors is no safetensors file"):
        count_parameters(tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        count_parameters(tmp_path)


def test_the_roof_turns_where_reading_and_arithmetic_take_equally_long() -> None:
    # 4 GB at 20 GB/s; 2 GFLOP a position at 100 GFLOP/s.
    roof = Roofline(1_000_000_000, "float32", 100e9, 20e9)
    assert roof.step_s(1) == pytest.approx(0.2)
    assert roof.knee_tokens == pytest.approx(10)
    assert roof.step_s(9) == pytest.approx(0.2)
    assert roof.step_s(40) == pytest.approx(0.8)
    assert Roofline(1_000_000_000, "bfloat16", 100e9, 20e9).step_s(1) == pytest.approx(0.1)
