"""Verbs that run a client: what they pass on, what they say first, how they end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.cli import clients
from serving.core.exit_codes import ExitCode
from serving.lab import state as lab_state
from serving.tracing import recording
from tests.unit.cli.verb_runs import CHECKOUT, Modules, run, write_state


def test_bench_without_a_lab_is_3() -> None:
    assert run("bench", "--lanes", "batched").exit_code == 3


@pytest.fixture
def locked_url() -> Iterator[str]:
    """A gateway that answers 401 to whoever shows no key, as all do here."""

    class Locked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "verb",
    [
        ("status",),
        ("watch", "--once"),
        ("trace", "--seconds", "1"),
        ("bench",),
        ("sweep", "--slo", "ttft_p95<2s"),
        ("lesson",),
    ],
    ids=lambda verb: verb[0],
)
def test_a_verb_that_has_no_key_says_so_and_is_3(
    verb: tuple[str, ...],
    locked_url: str,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    lab_state.write(lab_state.state_dir(), replace(write_state(), url=locked_url))
    result = run(*verb)
    said = " ".join((result.output + "".join(capfd.readouterr())).split())
    assert result.exit_code == ExitCode.NOT_RUNNING, said
    assert said.endswith("it asks for an API key (TANDEM_API_KEY)")
    assert not (checkout / "runs").exists()


def test_bench_measures_the_running_lab_and_passes_the_rest_through(monkeypatch: pytest.MonkeyPatch) -> None:
    write_state()
    modules = Modules(outcome=7)
    monkeypatch.setattr(clients, "run_module", modules)
    assert run("bench", "--lanes", "a,b", "--json").exit_code == 7
    assert run("bench", "--base-url=http://elsewhere", "--seed", "1").exit_code == 7
    assert run("report", "runs/x").exit_code == 7
    assert run("simulate", "--slo", "ttft<1s").exit_code == 7
    assert modules.calls == [
        ("loadtest.bench", ("--base-url", "http://127.0.0.1:18999", "--lanes", "a,b", "--json")),
        ("loadtest.bench", ("--base-url=http://elsewhere", "--seed", "1")),
        ("loadtest.report", ("runs/x",)),
        ("loadtest.simulate", ("--slo", "ttft<1s")),
    ]


@pytest.mark.parametrize("verb", ["bench", "sweep", "lesson"])
def test_a_client_is_announced_before_its_imports(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The child, which says nothing for seconds, finds the word already said."""
    done = subprocess.run(
        [sys.executable, "-c", ANNOUNCED, verb, "--base-url", "http://127.0.0.1:1"], check=False, cwd=CHECKOUT
    )
    assert done.returncode == 0
    assert capfd.readouterr().err == "starting the load client\nthe child runs\n"


# `tandem VERB` with a child that only says that it runs.
ANNOUNCED = """
import os, sys
from serving.cli import clients, main
clients.run_module = lambda module, arguments: os.write(2, b"the child runs\\n") * 0
main()
"""


def test_help_of_bench_needs_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Modules()
    monkeypatch.setattr(clients, "run_module", modules)
    assert run("bench", "--help").exit_code == 0
    assert modules.calls == [("loadtest.bench", ("--help",))]


def test_run_module_passes_exit_code_and_output_through(checkout: Path) -> None:
    (checkout / "ends_with_seven.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    with (checkout / "out").open("w+") as out:
        assert clients.run_module("ends_with_seven", ["--a", "b"], stdout=out) == 7
        out.seek(0)
        assert out.read() == "['--a', 'b']\n"


def test_a_trace_that_finds_the_disk_full_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*args: object, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(trace=None)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_state()
    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr(clients, "write_trace", fail)
    path = tmp_path / "trace.json"
    result = run("trace", "--out", str(path))
    assert result.exit_code == ExitCode.FAILED
    assert result.stderr.endswith(f"error: {path}: cannot be written: No space left on device\n")


def test_a_directory_is_no_trace_file(tmp_path: Path) -> None:
    write_state()
    result = run("trace", "--out", str(tmp_path))
    assert result.exit_code == ExitCode.USAGE
    assert "is a directory" in result.stderr
