"""The real lab: vLLM on CPU, SmolLM2, three lanes. In float32, where equal arithmetic gives equal answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from serving import model_store
from tests.running_lab import RunningLab, running_lab

DEFAULT_CONFIG = Path(__file__).parents[2] / "deploy" / "lab.yaml"


@pytest.fixture(scope="package")
def lab() -> Iterator[RunningLab]:
    model_store.prepare(print)
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    del config["gateway"]["port"]
    config["model"]["dtype"] = "float32"
    with running_lab(config) as started:
        yield started
