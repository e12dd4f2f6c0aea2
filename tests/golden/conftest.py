"""Simulated engines as processes, and what the client under test reports of them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from loadtest.client.record import RequestRecord, from_row
from serving.core.engine_paths import SENT_PATH
from serving.engines.base import SentStream

ROOT = Path(__file__).parents[2]
CLIENT_LIMIT_S = 60
# Nothing of the caller's environment may change what is measured; PATH and the like stay.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}


@dataclass(frozen=True)
class Profile:
    """How the server is to behave; see `SimulatedProfile`."""

    ttft_ms: float
    step_ms: float
    tokens_per_chunk: int = 1
    stall_after_tokens: int = 0
    stall_ms: float = 0

    def __str__(self) -> str:
        stall = f", stalled {self.stall_ms:g} ms" if self.stall_ms else ""
        return f"{self.ttft_ms:g}+{self.step_ms:g} ms, {self.tokens_per_chunk} a chunk{stall}"

    @property
    def arguments(self) -> list[str]:
        return [
            part
            for name in self.__dataclass_fields__
            for part in (f"--{name.replace('_', '-')}", str(getattr(self, name)))
        ]


FAST, SLOW = (50, 5), (300, 40)
PROFILES = [Profile(*times, tokens_per_chunk=tokens) for times in (FAST, SLOW) for tokens in (1, 4)]
STALLED = Profile(*FAST, stall_after_tokens=20, stall_ms=700)


@dataclass(frozen=True)
class Server:
    url: str

    def measure(
        self, *, streams: int, requests: int, tokens: int, choices: int = 1, reader: str = "ours"
    ) -> list[RequestRecord]:
        """What the client reports of `streams` at once, each of some requests one after another.

        Args:
            tokens: of each choice.
        """
        command = [sys.executable, "-m", "tests.golden.client_process", self.url]
        command += [str(streams), str(requests), str(tokens), str(choices), reader]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=ENVIRONMENT,
            text=True,
            timeout=CLIENT_LIMIT_S,
            check=True,
            stdout=subprocess.PIPE,
        )
        return [from_row(line) for line in done.stdout.splitlines()]

    def sent(self) -> dict[str, SentStream]:
        """The server's own stamps, by request id: the last stream of each."""
        with urllib.request.urlopen(self.url + SENT_PATH) as page:
            streams = msgspec.json.decode(page.read(), type=list[SentStream])
        return {stream.request_id: stream for stream in streams}


@pytest.fixture(scope="package")
def servers() -> Iterator[dict[Profile, Server]]:
    """A server for each profile. All start at once, for most of a start is imports."""
    command = [sys.executable, "-m", "serving.engines.simulated.server", "--max-num-seqs", "64"]
    processes = {
        profile: subprocess.Popen(
            command + profile.arguments, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )
        for profile in (*PROFILES, STALLED)
    }
    try:
        urls = {profile: process.stdout.readline().strip() for profile, process in processes.items()}  # type: ignore[union-attr]
        assert all(urls.values()), f"a server did not start: {urls}"
        yield {profile: Server(url) for profile, url in urls.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.communicate(timeout=10)
