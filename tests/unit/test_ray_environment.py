"""What Ray is told by its environment; without Ray."""

from __future__ import annotations

import importlib.util
import mmap
import os
from pathlib import Path

import pytest

from serving import ray_environment

# Where Ray 2.60 reads them, below its package.
READERS = (
    "_raylet.so",
    "serve/_private/constants.py",
    "dashboard/modules/event/event_consts.py",
    "dashboard/modules/reporter/reporter_consts.py",
)


def test_a_ray_of_the_lab_s_own_rests_but_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, *others = ray_environment.SELDOM
    for name in others:
        monkeypatch.setenv(name, "")  # so that it is taken away again after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv(kept, "7")
    ray_environment.rest_when_idle()
    expected = {**ray_environment.SELDOM, kept: "7"}
    assert {name: os.environ[name] for name in expected} == expected


@pytest.mark.parametrize("name", ray_environment.SELDOM)
def test_ray_knows_the_setting(name: str) -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    assert any(_has(Path(spec.origin).parent / file, name.encode()) for file in READERS)


def _has(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
