"""What Ray is told by its environment; without Ray."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving.core.ray_application import SELDOM

# Where Ray 2.60 reads them, below its package.
READERS = (
    "_raylet.so",
    "serve/_private/constants.py",
    "dashboard/modules/event/event_consts.py",
    "dashboard/modules/reporter/reporter_consts.py",
)


# In a process of its own: what the module sets when it is imported would reach every process of later tests.
REST = """
import json, os
from serving import ray_environment
ray_environment.rest_when_idle()
print(json.dumps(dict(os.environ)))
"""


def test_a_ray_of_the_lab_s_own_rests_but_what_the_user_set_stays() -> None:
    kept, *others = SELDOM
    environment = {name: value for name, value in os.environ.items() if name not in others} | {kept: "7"}
    said = subprocess.run([sys.executable, "-c", REST], env=environment, capture_output=True, check=True)
    expected = {**SELDOM, kept: "7"}
    assert {name: json.loads(said.stdout)[name] for name in expected} == expected


@pytest.mark.parametrize("name", SELDOM)
def test_ray_knows_the_setting(name: str) -> None:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    assert any(_has(Path(spec.origin).parent / file, name.encode()) for file in READERS)


def _has(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
