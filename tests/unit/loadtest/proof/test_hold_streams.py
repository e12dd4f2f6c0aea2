from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_many_streams_are_held_by_two_processes() -> None:
    command = [sys.executable, "-m", "loadtest.proof.hold_streams", "--streams", "20", "--duration-s", "2"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "of 400/s over 2 s" in text
    assert "failures           0" in text
    assert text.count("client process") == 2
