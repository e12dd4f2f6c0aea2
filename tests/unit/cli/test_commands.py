"""Verbs, exit codes, and JSON that is alone on stdout."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from loadtest.report.build import EXIT_INVALID
from serving import doctor, model_store
from serving.cli import commands as cli
from serving.core.errors import ConfigError, TandemError
from serving.doctor import Check, Status
from serving.lab import control, supervisor
from serving.lab import state as lab_state
from serving.lab.state import AlreadyRunningError, LabState, NotRunningError, Phase, StartFailedError
from serving.tracing import recording

CHECKOUT = Path(__file__).parents[3]
LAB = """\
gateway: {port: 18999}
lanes:
  - {name: batched, strategy: batched}
"""
OK = Check("cores", Status.OK, "2", "2 or more")
BAD = Check("memory", Status.FAIL, "1.0 GiB available", "6.0 GiB", "close other programs")


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config of its own and no lab."""
    monkeypatch.setenv("TANDEM_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "lab.yaml").write_text(LAB)
    return tmp_path


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which steps a start took, in order; none does anything but the model, which appears."""
    steps: list[str] = []

    def prepare(say: Callable[[str], None]) -> Path:
        steps.append("prepare")
        directory = model_store.default_model_path()
        directory.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (directory / name).touch()
        return directory

    monkeypatch.setattr(model_store, "prepare", prepare)
    monkeypatch.setattr(supervisor, "supervise", lambda *args, **kwargs: steps.append("supervise"))
    monkeypatch.setattr(cli, "_up_detached", lambda *args: steps.append("detach"))
    return steps


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.tandem, arguments)


def write_state(phase: Phase = Phase.READY, *, alive: bool = True) -> LabState:
    ticks = lab_state.process_start_ticks(os.getpid())
    assert ticks is not None
    state = LabState(
        pid=os.getpid(),
        pid_start_ticks=ticks if alive else ticks - 1,
        run_id="0123",
        config_path="/lab.yaml",
        url="http://127.0.0.1:18999",
        host="127.0.0.1",
        ports=(18999,),
        log_path=None,
        phase=phase,
        progress="batched: starting engine",
        started_at_s=0.0,
    )
    lab_state.state_dir().mkdir(exist_ok=True)
    lab_state.write(lab_state.state_dir(), state)
    return state


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("lab.yaml: port"), 2),
        (NotRunningError("none"), 3),
        (AlreadyRunningError("one"), 4),
        (StartFailedError("lane"), 1),
        (TandemError("other"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes_of_errors(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(control, "stop_running", fail)
    result = run("down")
    assert result.exit_code == code
    assert result.stdout == ""
    assert str(error) in result.stderr


@pytest.mark.parametrize("code", [code.value for code in cli.ExitCode])
def test_help_promises_every_exit_code(code: int) -> None:
    assert f"\n    {code:<3}  " in run("--help").stdout


def test_an_invalid_run_has_one_exit_code() -> None:
    assert EXIT_INVALID == cli.ExitCode.INVALID


@pytest.mark.parametrize("verb", ["up", "down", "status", "bench", "report", "prepare", "doctor", "demo"])
def test_help_lists_every_verb(verb: str) -> None:
    assert f"\n  {verb} " in run("--help").stdout


@pytest.mark.parametrize(
    "arguments", [["fly"], ["up", "--fast"], ["up", "--timeout-s", "0"], ["down", "now"]]
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_up_with_a_faulty_config_names_the_fault(checkout: Path) -> None:
    (checkout / "deploy" / "lab.yaml").write_text(LAB.replace("18999", "70000"))
    result = run("up", "--detach")
    assert result.exit_code == 2
    assert "deploy/lab.yaml: gateway.port = 70000" in result.stderr


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach"), ("demo",)])
def test_a_start_while_a_lab_runs_is_4_and_names_it(arguments: tuple[str, ...], starts: list[str]) -> None:
    state = write_state()
    result = run(*arguments)
    assert (result.exit_code, starts) == (4, [])
    assert f"pid {state.pid}, {state.url}, {state.config_path}" in result.stderr


def test_the_config_is_the_given_one_then_the_local_one_then_the_packaged_one(checkout: Path) -> None:
    given = checkout / "mine.yaml"
    assert cli.find_config(given) == given
    assert cli.find_config(None) == Path("deploy/lab.yaml")
    (checkout / "deploy" / "lab.yaml").unlink()
    assert cli.find_config(None) in (
        CHECKOUT / "deploy" / "lab.yaml",
        CHECKOUT / "serving" / "defaults" / "lab.yaml",
    )


def test_down_without_a_lab_says_so_and_is_0() -> None:
    result = run("down")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no lab is running" in result.stderr


def test_status_without_a_lab_is_3() -> None:
    result = run("status", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout) == {"state": "not_running", "scheduler": None}
    assert "no lab is running" in run("status").stdout


def test_status_of_a_dead_supervisor_is_3_and_says_what_to_do() -> None:
    write_state(alive=False)
    result = run("status")
    assert result.exit_code == 3
    assert "`tandem down` cleans up" in result.stdout


def test_status_while_starting_is_1_with_the_progress() -> None:
    write_state(Phase.STARTING)
    result = run("status", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["state"], found["progress"]) == ("starting", "batched: starting engine")


def group(band: str, tenant: str, requests: int, tokens: int) -> dict[str, Any]:
    return {"band": band, "tenant": tenant, "requests": requests, "tokens": tokens}


def replicas(*breakers: str) -> list[dict[str, Any]]:
    return [
        {
            "replica": f"a-{number}",
            "ready": True,
            "breaker": breaker,
            "running": 3,
            "max_running": 16,
            "outstanding_tokens": 99,
        }
        for number, breaker in enumerate(breakers, start=1)
    ]


SCHEDULER: dict[str, Any] = {
    "lanes": [
        {
            "lane": "a",
            "strategy": "batched",
            "waiting": [group("normal", "acme", 7, 900)],
            "replicas": replicas("closed", "open"),
        }
    ],
    "order": "priority",
    "placement": "least_outstanding",
    "gateways": ["g1", "g2"],
    "leases": 3,
    "waiting": 9,
    "waiting_any": [group("high", "zoo", 2, 64)],
    "draining": False,
    "waiting_by_band": {"high": 2, "normal": 7},
    "waiting_by_tenant": {"acme": 7, "zoo": 2},
    "refusals": {"queue_full": 2},
    "leaving_replicas": ["a-0"],
    "last_refusals": [{"seconds_ago": 4.2, "reason": "queue_full", "tenant": "acme", "lane": None}],
}


def answer(monkeypatch: pytest.MonkeyPatch, scheduler: dict[str, Any]) -> None:
    """The gateway is well and says this of the scheduler."""
    answers = {"/health": b"", "/scheduler": json.dumps(scheduler).encode()}
    monkeypatch.setattr(control, "reader", lambda base_url: lambda url: answers[url.removeprefix(base_url)])


def test_status_when_ready_is_0_and_shows_lanes_replicas_and_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_state()
    answer(monkeypatch, SCHEDULER)
    result = run("status")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["a", "batched", "7", "a-1", "yes", "3", "of", "16", "99"] in rows
    assert ["a", "batched", "7", "a-2", "breaker", "open", "3", "of", "16", "99"] in rows
    waiting = rows.index(["waiting", "for", "band", "tenant", "requests", "tokens"])
    assert rows[waiting + 1 : waiting + 3] == [
        ["a", "normal", "acme", "7", "900"],
        ["any", "lane", "high", "zoo", "2", "64"],
    ]
    for line in (
        "order priority, placement least_outstanding, 2 gateway(s), 3 running, 9 waiting",
        "waiting by band: high 2, normal 7",
        "refused so far: queue_full 2",
        "leaving: a-0 until its streams end",
        "4 s ago: queue_full, tenant acme, any lane",
    ):
        assert line in result.stdout
    assert json.loads(run("status", "--json").stdout)["scheduler"] == SCHEDULER


def test_who_waits_is_cut_to_what_a_glance_takes_in() -> None:
    groups = [group("normal", f"t{number}", number, 1) for number in range(1, 21)]
    console = Console(file=io.StringIO(), width=80)
    console.print(cli.waiting_table({"lanes": [], "waiting_any": groups}))
    assert isinstance(console.file, io.StringIO)
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert rows[1] == ["any", "lane", "normal", "t20", "20", "1"]
    assert rows[-1] == ["8", "more", str(sum(range(1, 9)))]


@pytest.mark.parametrize(
    ("breakers", "fault"),
    [
        ((), "lane a: no ready replica"),
        (("open",), "lane a: the breakers of all 1 replica(s) are open"),
        (("open", "open"), "lane a: the breakers of all 2 replica(s) are open"),
        (("open", "closed"), None),
        (("open", "half_open"), None),
    ],
)
def test_a_lane_that_serves_nothing_now_is_degraded_and_1(
    breakers: tuple[str, ...], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state()
    lane = {"lane": "a", "strategy": "batched", "waiting": [], "replicas": replicas(*breakers)}
    answer(monkeypatch, {**SCHEDULER, "lanes": [lane]})
    result = run("status", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == (cli.ExitCode.FAILED if fault else cli.ExitCode.OK)
    assert found["state"] == ("degraded" if fault else "ready")
    shown = run("status").stdout.splitlines()
    assert shown[0].startswith(found["state"])
    assert (shown[1] == fault) == bool(fault)
    rows = [line.split() for line in shown]
    first_row = (
        ["a", "batched", "0", "a-1", "breaker", "open"] if breakers else ["a", "batched", "0", "-", "no"]
    )
    assert first_row in [row[: len(first_row)] for row in rows]


def test_the_lane_table_fits_a_terminal_of_80_columns() -> None:
    replica = {
        "replica": "speculative-0a1b2c3d",
        "ready": True,
        "breaker": "closed",
        "running": 16,
        "max_running": 16,
        "outstanding_tokens": 123456,
    }
    lane = {"lane": "speculative", "strategy": "speculative", "waiting": [], "replicas": [replica]}
    console = Console(file=io.StringIO(), width=80)
    console.print(cli.lane_table({"lanes": [lane]}))
    assert isinstance(console.file, io.StringIO)
    assert "speculative-0a1b2c3d  yes" in console.file.getvalue()


@pytest.mark.parametrize(("checks", "code"), [([OK], 0), ([OK, BAD], 1)])
def test_doctor(checks: list[Check], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: checks)
    result = run("doctor", "--json")
    assert result.exit_code == code
    assert [check["status"] for check in json.loads(result.stdout)["checks"]] == [c.status for c in checks]
    shown = run("doctor").stdout
    assert ("to do: close other programs" in shown) == (BAD in checks)


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
    assert result.exit_code == cli.ExitCode.NOT_RUNNING, said
    assert said.endswith("it asks for an API key (TANDEM_API_KEY)")
    assert not (checkout / "runs").exists()


class Modules:
    """Stands for `run_module`: notes what was run, prints, returns or raises."""

    def __init__(self, outcome: int | BaseException = 0, output: str = "") -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self._outcome = outcome
        self._output = output

    def __call__(self, module: str, arguments: Sequence[str], *, stdout: IO[str] | None = None) -> int:
        self.calls.append((module, tuple(arguments)))
        if stdout is not None:
            stdout.write(self._output)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome


def test_bench_measures_the_running_lab_and_passes_the_rest_through(monkeypatch: pytest.MonkeyPatch) -> None:
    write_state()
    modules = Modules(outcome=7)
    monkeypatch.setattr(cli, "run_module", modules)
    assert run("bench", "--lanes", "a,b", "--json").exit_code == 7
    assert run("bench", "--base-url=http://elsewhere", "--seed", "1").exit_code == 7
    assert run("report", "runs/x").exit_code == 7
    assert modules.calls == [
        ("loadtest.bench", ("--base-url", "http://127.0.0.1:18999", "--lanes", "a,b", "--json")),
        ("loadtest.bench", ("--base-url=http://elsewhere", "--seed", "1")),
        ("loadtest.report", ("runs/x",)),
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
from serving import cli
cli.run_module = lambda module, arguments: os.write(2, b"the child runs\\n") * 0
cli.main()
"""


def test_help_of_bench_needs_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = Modules()
    monkeypatch.setattr(cli, "run_module", modules)
    assert run("bench", "--help").exit_code == 0
    assert modules.calls == [("loadtest.bench", ("--help",))]


def test_run_module_passes_exit_code_and_output_through(checkout: Path) -> None:
    (checkout / "ends_with_seven.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    with (checkout / "out").open("w+") as out:
        assert cli.run_module("ends_with_seven", ["--a", "b"], stdout=out) == 7
        out.seek(0)
        assert out.read() == "['--a', 'b']\n"


@pytest.mark.parametrize(("arguments", "start"), [((), "supervise"), (("--detach",), "detach")])
def test_up_makes_the_default_model_first_and_once(
    arguments: tuple[str, ...], start: str, starts: list[str]
) -> None:
    assert run("up", *arguments).exit_code == 0
    assert run("up", *arguments).exit_code == 0
    assert starts == ["prepare", start, start]


def test_up_makes_no_model_for_simulated_lanes(checkout: Path, starts: list[str]) -> None:
    simulated = "lanes: [{name: a, strategy: batched, engine: simulated, simulated: {}}]\n"
    (checkout / "deploy" / "lab.yaml").write_text(simulated)
    assert run("up").exit_code == 0
    assert starts == ["supervise"]


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach"), ("demo",)])
@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ("model: {path: /no/model}\n", "model.path = '/no/model': no checkpoint in /no/model"),
        ("model: {path: ~nobody-here/m}\n", "model.path = '~nobody-here/m': no checkpoint in "),
        ("gateway: {host: not a host}\n", "gateway.host = 'not a host': "),
        ("gateway: {host: 192.0.2.1}\n", "gateway.host = '192.0.2.1': Cannot assign requested address"),
        (f"gateway: {{host: {'x' * 70}}}\n", f"gateway.host = '{'x' * 70}': "),
        ("gateway: {api_keys_file: /no/keys}\n", "gateway.api_keys_file = /no/keys: cannot be read"),
    ],
)
def test_what_this_machine_does_not_have_is_a_config_fault_before_anything_starts(
    arguments: tuple[str, ...], lines: str, fault: str, checkout: Path, starts: list[str]
) -> None:
    (checkout / "deploy" / "lab.yaml").write_text(LAB.partition("\n")[2] + lines)
    result = run(*arguments)
    assert result.exit_code == cli.ExitCode.USAGE
    assert result.stderr.startswith(f"error: deploy/lab.yaml: {fault}")
    assert len(result.stderr.splitlines()) == 1
    assert starts == []


@pytest.mark.parametrize(
    "arguments", [("up", "--timeout-s", "nan"), ("down", "--timeout-s", "nan"), ("trace", "--seconds", "nan")]
)
def test_no_number_is_wrong_usage(arguments: tuple[str, ...], starts: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == cli.ExitCode.USAGE
    assert "'nan' is not a number" in result.stderr
    assert starts == []


def test_a_trace_that_finds_the_disk_full_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*args: object, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(trace=None)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_state()
    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr(cli, "write_trace", fail)
    path = tmp_path / "trace.json"
    result = run("trace", "--out", str(path))
    assert result.exit_code == cli.ExitCode.FAILED
    assert result.stderr.endswith(f"error: {path}: cannot be written: No space left on device\n")


def test_a_directory_is_no_trace_file(tmp_path: Path) -> None:
    write_state()
    result = run("trace", "--out", str(tmp_path))
    assert result.exit_code == cli.ExitCode.USAGE
    assert "is a directory" in result.stderr


@pytest.mark.parametrize("address", ["", "6379", "local", "ray://127.0.0.1:10001/x", "127.0.0.1:", ":6379"])
def test_an_address_of_no_cluster_is_wrong_usage(address: str, starts: list[str]) -> None:
    result = run("up", "--address", address)
    assert result.exit_code == cli.ExitCode.USAGE
    assert "must be auto or HOST:PORT" in result.stderr
    assert starts == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000", "nobody.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_named_before_anything_starts(
    address: str, starts: list[str]
) -> None:
    result = run("up", "--detach", "--address", address)
    assert result.exit_code == cli.ExitCode.FAILED
    assert result.stderr.startswith(f"error: no Ray cluster to join at {address} (--address): ")
    assert starts == []


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [("0.0.0.0", "", True), ("0.0.0.0", "key-0123456789abcdef", False), ("127.0.0.1", "", False)],
)
def test_a_gateway_that_is_open_to_others_without_keys_is_named(
    host: str, keys: str, warns: bool, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEYS", keys)
    result = run("up", "--host", host)
    assert result.exit_code == 0
    assert (f"the gateway at {host} asks for no API key" in result.stderr) is warns
    assert "key-0123456789abcdef" not in result.output
    assert starts[-1] == "supervise"


def test_up_without_the_model_s_package_names_file_key_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "PACKAGE", "no-such-package")
    result = run("up")
    assert result.exit_code == cli.ExitCode.USAGE
    assert "error: deploy/lab.yaml: model.path = 'auto': the default model is not installed" in result.stderr


@pytest.mark.parametrize(("verb", "file"), [("prepare", ""), ("up", "deploy/lab.yaml: ")])
def test_a_cache_that_cannot_be_written_is_named(
    verb: str, file: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "plain-file").touch()
    cache = checkout / "plain-file" / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(cache))
    monkeypatch.setattr(model_store, "_gguf_file", lambda: checkout / "model.gguf")
    result = run(verb)
    assert result.exit_code == cli.ExitCode.USAGE
    assert (
        f"error: {file}model.path = 'auto': the model cannot be written to {cache}/models: Not a directory; "
        "set TANDEM_CACHE" in result.stderr
    )


def test_a_model_that_is_ready_is_one_line(starts: list[str]) -> None:
    result = run("prepare")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"model is ready in {model_store.default_model_path()}\n"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Callable[[Modules], list[str]]:
    """A demo in which everything but the order of its steps is replaced."""

    def prepare(modules: Modules) -> list[str]:
        steps: list[str] = []

        def note(step: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: steps.append(step)

        monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: [OK])
        monkeypatch.setattr(model_store, "prepare", note("prepare"))
        monkeypatch.setattr(cli, "_up_detached", note("up"))
        monkeypatch.setattr(control, "stop_running", note("down"))
        monkeypatch.setattr(cli, "run_module", modules)
        return steps

    return prepare


@pytest.mark.parametrize(
    ("outcome", "code"), [(0, 0), (1, 1), (5, 0), (KeyboardInterrupt(), 130), (TandemError("x"), 1)]
)
def test_the_demo_always_ends_with_down(
    outcome: int | BaseException, code: int, demo: Callable[[Modules], list[str]]
) -> None:
    modules = Modules(outcome, output="the table\n")
    steps = demo(modules)
    result = run("demo")
    assert result.exit_code == code
    assert steps == ["prepare", "up", "down"]
    assert result.stdout == "the table\n"
    assert [module for module, _ in modules.calls] == ["loadtest.bench"]


def test_the_demo_fails_when_down_fails(
    demo: Callable[[Modules], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo(Modules(output="the table\n"))

    def fail(**kwargs: object) -> None:
        raise TandemError("port 8000 is still in use")

    monkeypatch.setattr(control, "stop_running", fail)
    result = run("demo")
    assert (result.exit_code, result.stdout) == (1, "the table\n")


def test_the_demo_does_not_stop_a_lab_that_it_did_not_start(
    demo: Callable[[Modules], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = demo(Modules())

    def refuse(*args: object) -> None:
        raise AlreadyRunningError("a lab is ready already")

    monkeypatch.setattr(cli, "_up_detached", refuse)
    assert run("demo").exit_code == 4
    assert steps == ["prepare"]


def test_the_demo_stops_at_what_the_machine_lacks(
    demo: Callable[[Modules], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = demo(Modules())
    monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: [OK, BAD])
    result = run("demo")
    assert result.exit_code == 1
    assert "close other programs" in result.stderr
    assert steps == []


def test_python_dash_m_serving_is_tandem(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "serving", "status"], check=False, cwd=CHECKOUT)
    assert done.returncode == 3
    assert "no lab is running" in capfd.readouterr().out
