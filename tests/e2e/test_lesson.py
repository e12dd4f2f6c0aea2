"""The five pictures from the real engine."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.running_lab import RunningLab, tandem

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
LIMIT_S = 400


def test_the_lesson_draws_all_five(lab: RunningLab, tmp_path: Path) -> None:
    path = tmp_path / "lesson.html"
    began_s = time.monotonic()
    done = tandem("lesson", "--out", str(path), environment=lab.environment, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(path)
    assert time.monotonic() - began_s < LIMIT_S
    page = path.read_text()
    found = re.search(r"^const figures = (\{.*\});$", page, re.MULTILINE)
    assert found
    figures = json.loads(found[1])
    assert list(figures) == ["parallel", "wall", "waits", "drafts", "envelope"]
    kinds = {row["kind"] for row in figures["drafts"]["data"]["values"]}
    assert {"accepted draft", "model's token"} <= kinds
    assert {"roof", "decode step", "prompt step"} <= {
        row["kind"] for row in figures["wall"]["data"]["values"]
    }
    # In float32 both ways round alike, and the lanes say the same.
    assert "Both texts are the same." in page
    apart = re.search(r"differ by (\S+) in the median and (\S+) at most", page)
    assert apart
    assert float(apart[2]) < 0.01
