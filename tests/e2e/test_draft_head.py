"""A learned draft (an EAGLE-3 head): vLLM computes with an exported one what the training computed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving import model_store

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("layers", [1, 2])
def test_vllm_drafts_with_an_exported_eagle_head_what_the_training_code_drafts(
    tmp_path: Path, layers: int
) -> None:
    model = model_store.prepare(print)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.e2e.draft_head_in_vllm",
            str(model),
            str(tmp_path / "head"),
            str(layers),
        ],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3
    for each in found:
        assert each["states_differ"] < 1e-3
        assert each["ours"] == each["vllm"]
