"""Runs one tool on one case, against a simulated engine of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.crosscheck.cases import Case, Profile
from loadtest.crosscheck.engine import busy_processes, running_engine
from loadtest.crosscheck.figures import (
    Figures,
    arrivals_per_s,
    from_sent,
    lasted_s,
    most_at_once,
    resolution_ms,
)
from loadtest.crosscheck.tools import Report, Tool, ToolRun
from serving.core.engine_paths import SENT_PATH
from serving.core.http_get import GetError, get

TOOL_LIMIT_S = 90.0
KILL_LIMIT_S = 5.0
BUSY_MARGIN_S = 30.0  # beyond the tool's limit


@dataclass(frozen=True, slots=True)
class Measured:
    """A tool's report next to what the engine sent it.

    Attributes:
        arrivals_per_s: the rate at which its requests came in.
        most_at_once: streams open at one instant.
        resolution_ms: how well the truth is known.
        engine_share: processor time of the engine / time from the first request to the last answer's end.
        is_engine_first: the engine went before all others.
    """

    tool: str
    version: str
    report: Report
    sent: Figures
    arrivals_per_s: float
    most_at_once: int = 0
    resolution_ms: float = 0.0
    engine_share: float = 0.0
    is_engine_first: bool = True

    @property
    def reported(self) -> Figures:
        return self.report.figures


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A tool that gave no figures, and why."""

    tool: str
    reason: str


def measure(tool: Tool, case: Case, profile: Profile, seed: int, tokenizer: Path) -> Measured | NotMeasured:
    """Run the tool against a fresh engine. Whatever is wrong with the tool ends in the answer, not here."""
    if not tool.python.exists():
        return NotMeasured(tool.name, f"not installed: no {tool.python.name} of its own (make crosscheck)")
    with tempfile.TemporaryDirectory(prefix="tandem-crosscheck-") as name, running_engine(profile) as engine:
        scratch = Path(name)
        tool_run = ToolRun(
            url=engine.url,
            rate_per_s=case.rate_per_s,
            requests=case.requests,
            output_tokens=case.output_tokens,
            prompt_tokens=case.prompt_tokens,
            seed=seed,
            tokenizer=tokenizer,
            scratch=scratch,
        )
        engine_before_s = engine.processor_s()
        try:
            with busy_processes(case.busy_processes, TOOL_LIMIT_S + BUSY_MARGIN_S):
                run_bounded([str(tool.python), *tool.command(tool_run)], _environment(scratch), TOOL_LIMIT_S)
            engine_s = engine.processor_s() - engine_before_s
            report = tool.read(scratch)
            streams = json.loads(get(engine.url + SENT_PATH))
            sent = from_sent(streams)
        except subprocess.TimeoutExpired as error:
            return NotMeasured(tool.name, f"did not end within {error.timeout:g} s")
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout).strip().splitlines() or ["no output"]
            return NotMeasured(tool.name, f"exit code {error.returncode}: {lines[-1]}")
        except (GetError, OSError, ValueError, KeyError, TypeError) as error:
            return NotMeasured(tool.name, f"its results cannot be read: {error!r}")
    if not report.figures.requests == sent.requests == case.requests:
        reason = f"reported {report.figures.requests} requests, was sent {sent.requests}, of {case.requests}"
        return NotMeasured(tool.name, reason)
    return Measured(
        tool=tool.name,
        version=_version(tool),
        report=report,
        sent=sent,
        arrivals_per_s=arrivals_per_s(streams),
        most_at_once=most_at_once(streams),
        resolution_ms=resolution_ms(streams),
        engine_share=engine_s / lasted_s(streams),
        is_engine_first=engine.is_first,
    )


def run_bounded(command: list[str], environment: dict[str, str], limit_s: float) -> None:
    """Run a program in a session of its own, as from a terminal of its own, and end all that it started.

    Raises:
        subprocess.TimeoutExpired: it did not end in time.
        subprocess.CalledProcessError: it ended with another exit code than 0.
    """
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        finally:
            _kill_all(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stdout, stderr)


def _kill_all(process: subprocess.Popen[str]) -> None:
    """What is left of a program and of what it started: that would press the next measurement."""
    left = {each for each in psutil.process_iter() if _session_of(each.pid) == process.pid}
    if process.poll() is None:
        left.update(psutil.Process(process.pid).children(recursive=True))  # those with sessions of their own
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs([each for each in left if each.pid != process.pid], timeout=KILL_LIMIT_S)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return None


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


def _version(tool: Tool) -> str:
    code = f"import importlib.metadata as m; print(m.version({tool.package!r}))"
    return subprocess.run(
        [tool.python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
