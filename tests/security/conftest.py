"""One lab of a simulated engine that wants keys: one from a file, one from the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.running_lab import RunningLab, running_lab

FILE_KEY = "file-6f1c0f6a2d9b4e7791d3"
ENVIRONMENT_KEY = "environment-0b7e4c52ad1f48"
UPLOAD_TIMEOUT_S = 1.0
HEADER_TIMEOUT_S = 1.0
ORIGIN = "https://chat.example.org"
CONFIG: dict[str, Any] = {
    "model": {"name": "sim", "max_model_len": 4096},
    "lanes": [
        {
            "name": "batched",
            "strategy": "batched",
            "engine": "simulated",
            "max_num_seqs": 4,
            "simulated": {"ttft_ms": 10, "step_ms": 5},
        }
    ],
}


@dataclass(frozen=True)
class LockedLab:
    """A lab that serves those who show a key; `key_file` is what it read."""

    running: RunningLab
    key_file: Path

    @property
    def url(self) -> str:
        return self.running.url

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def environment(self, key: str | None) -> dict[str, str]:
        """Of a process on this machine that has the key, or none."""
        kept = {name: value for name, value in self.running.environment.items() if name != "TANDEM_API_KEYS"}
        return kept | ({} if key is None else {"TANDEM_API_KEY": key})


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedLab]:
    key_file = tmp_path_factory.mktemp("keys") / "keys"
    key_file.write_text(f"# of the tests\n{FILE_KEY}\n")
    key_file.chmod(0o600)
    gateway = {
        "api_keys_file": str(key_file),
        "upload_timeout_s": UPLOAD_TIMEOUT_S,
        "header_timeout_s": HEADER_TIMEOUT_S,
        "cors_allowed_origins": [ORIGIN],
    }
    environment = {**os.environ, "TANDEM_API_KEYS": ENVIRONMENT_KEY, "TANDEM_LOAD_METRICS_PORT": "0"}
    with running_lab(CONFIG | {"gateway": gateway}, environment=environment) as started:
        yield LockedLab(started, key_file)
