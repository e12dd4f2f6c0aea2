"""The default model made from its package, in a fresh cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.running_lab import tandem

pytestmark = pytest.mark.model


def test_prepare_makes_the_model_and_prints_its_own_lines_only(tmp_path: Path) -> None:
    done = tandem("prepare", environment=os.environ | {"TANDEM_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    *steps, last = done.stderr.splitlines()
    assert last.startswith("model is ready in ")
    assert [line for line in steps if not line.startswith("[")] == []
    assert done.stdout == ""
    checkpoint = Path(last.removeprefix("model is ready in "))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in checkpoint.iterdir()
    }
