"""Runs one tool against a simulated engine of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest.crosscheck.figures import Figures, arrivals_per_s, from_sent
from loadtest.crosscheck.tools import Named, Tool, ToolRun
from serving.core.engine_paths import SENT_PATH
from serving.core.http_get import GetError, get

TOOL_LIMIT_S = 120
STOP_LIMIT_S = 10


@dataclass(frozen=True, slots=True)
class Profile:
    """What the engine does; 64 tokens then take 2.8 s at one token a chunk, 0.9 s at four."""

    tokens_per_chunk: int
    ttft_ms: float = 300
    step_ms: float = 40

    @property
    def title(self) -> str:
        unit = "token" if self.tokens_per_chunk == 1 else "tokens"
        return f"TTFT {self.ttft_ms:g} ms, {self.tokens_per_chunk} {unit} each {self.step_ms:g} ms"


@dataclass(frozen=True, slots=True)
class OfferedStreams:
    """Poisson arrivals; each tool draws its own from the seed."""

    rate_per_s: float
    requests: int
    output_tokens: int
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A tool's report next to what the engine sent it, and the rate at which its requests came in."""

    tool: str
    version: str
    reported: Figures
    sent: Figures
    arrivals_per_s: float
    named: Named


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A tool that gave no figures, and why."""

    tool: str
    reason: str


def measure(tool: Tool, profile: Profile, offered: OfferedStreams, tokenizer: Path) -> Measured | NotMeasured:
    """Run the tool against a fresh engine. Whatever is wrong with the tool ends in the answer, not here."""
    if not tool.python.exists():
        return NotMeasured(tool.name, f"not installed: no {tool.python.name} of its own (make crosscheck)")
    with tempfile.TemporaryDirectory(prefix="tandem-crosscheck-") as name, _engine(profile) as url:
        scratch = Path(name)
        tool_run = ToolRun(
            url=url,
            rate_per_s=offered.rate_per_s,
            requests=offered.requests,
            output_tokens=offered.output_tokens,
            prompt_tokens=offered.prompt_tokens,
            seed=offered.seed,
            tokenizer=tokenizer,
            scratch=scratch,
        )
        try:
            done = subprocess.run(
                [tool.python, *tool.command(tool_run)],
                env=_environment(scratch),
                capture_output=True,
                text=True,
                timeout=TOOL_LIMIT_S,
                check=True,
            )
            reported, named = tool.read(scratch, done.stdout)
            streams = json.loads(get(url + SENT_PATH))
            sent = from_sent(streams)
        except subprocess.TimeoutExpired:
            return NotMeasured(tool.name, f"did not end within {TOOL_LIMIT_S} s")
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout).strip().splitlines() or ["no output"]
            return NotMeasured(tool.name, f"exit code {error.returncode}: {lines[-1]}")
        except (GetError, OSError, ValueError, KeyError, TypeError) as error:
            return NotMeasured(tool.name, f"its results cannot be read: {error!r}")
    if reported.requests != offered.requests or sent.requests != offered.requests:
        reason = f"reported {reported.requests} requests, was sent {sent.requests}, of {offered.requests}"
        return NotMeasured(tool.name, reason)
    return Measured(tool.name, _version(tool), reported, sent, arrivals_per_s(streams), named)


def _environment(scratch: Path) -> dict[str, str]:
    """Nothing is fetched, and nothing goes through a proxy: the engine is on this machine."""
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(scratch),
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    }


@contextlib.contextmanager
def _engine(profile: Profile) -> Iterator[str]:
    """A simulated engine in a process of its own; its URL."""
    command = [sys.executable, "-m", "serving.engines.simulated.server"]
    command += ["--ttft-ms", str(profile.ttft_ms), "--step-ms", str(profile.step_ms)]
    command += ["--tokens-per-chunk", str(profile.tokens_per_chunk)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError("the simulated engine did not start; its error is above")
            yield url
        finally:
            process.terminate()
            process.wait(STOP_LIMIT_S)


def _version(tool: Tool) -> str:
    code = f"import importlib.metadata as m; print(m.version({tool.package!r}))"
    return subprocess.run(
        [tool.python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
