"""A directory to run verbs in, and a start that starts nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from serving import model_store
from serving.cli import life
from serving.lab import supervisor
from tests.unit.cli.verb_runs import LAB


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config of its own and no lab."""
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "lab.yaml").write_text(LAB)
    return tmp_path


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which steps a start took, in order; none does anything but the model, which appears."""
    steps: list[str] = []

    def prepare(say: Callable[[str], None]) -> Path:
        steps.append("prepare")
        directory = model_store.default_model_path()
        directory.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (directory / name).touch()
        return directory

    monkeypatch.setattr(model_store, "prepare", prepare)
    monkeypatch.setattr(supervisor, "supervise", lambda *args, **kwargs: steps.append("supervise"))
    monkeypatch.setattr(life, "_up_detached", lambda *args: steps.append("detach"))
    return steps
