"""Verbs of a lab's life: what they refuse before anything starts, and the order of their steps."""

from __future__ import annotations

import json
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from serving import doctor, hub, model_store
from serving.cli import clients, life
from serving.config import LabConfig
from serving.core.errors import AlreadyRunningError, ConfigError, NotRunningError, TandemError
from serving.core.exit_codes import ExitCode
from serving.core.speculation.step_time import LinearStepTime
from serving.doctor import Check, Status
from serving.engines import vllm_check
from serving.hub import HubName, HubUnreachableError
from serving.lab import control, supervisor
from serving.lab import state as lab_state
from tests.profiles import lane_profile, write_profile
from tests.unit.cli.verb_runs import LAB, Modules, run, write_state

OK = Check("cores", Status.OK, "2", "2 or more")
BAD = Check("memory", Status.FAIL, "1.0 GiB available", "6.0 GiB", "close other programs")


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


def test_down_without_a_lab_says_so_and_is_0() -> None:
    result = run("down")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no lab is running" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "is_forgotten"),
    [(NotRunningError("it is another's"), 0, True), (TandemError("Serve does not answer"), 1, False)],
)
def test_down_forgets_a_lab_on_a_cluster_when_it_is_not_there_but_not_when_it_could_not_be_stopped(
    error: TandemError, code: int, is_forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = replace(write_state(alive=False), address="auto")
    lab_state.write(lab_state.state_dir(), dead)
    asked: list[tuple[str | None, str]] = []

    class OnCluster:
        def __init__(self, address: str | None, run_id: str) -> None:
            asked.append((address, run_id))

        def take_down(self) -> None:
            raise error

    monkeypatch.setattr(life, "_ray_lab", OnCluster)
    result = run("down")
    assert asked == [("auto", dead.run_id)]
    assert (result.exit_code, str(error) in result.stderr) == (code, True)
    assert (lab_state.read(lab_state.state_dir()) is None) is is_forgotten


def test_down_claims_nothing_of_a_cluster_that_did_not_answer() -> None:
    lab_state.write(lab_state.state_dir(), replace(write_state(alive=False), address="127.0.0.1:1"))
    result = run("down")
    assert result.exit_code == 0
    assert "nothing was stopped there: no Ray cluster to join at 127.0.0.1:1" in result.stderr
    assert "`serve shutdown` ends it" in result.stderr
    assert result.stderr.rstrip().endswith("nothing of that run is left on this machine")
    assert lab_state.read(lab_state.state_dir()) is None


@pytest.mark.parametrize(("arguments", "start"), [((), "supervise"), (("--detach",), "detach")])
def test_up_makes_the_default_model_first_and_once(
    arguments: tuple[str, ...], start: str, starts: list[str]
) -> None:
    assert run("up", *arguments).exit_code == 0
    assert run("up", *arguments).exit_code == 0
    assert starts == ["prepare", start, start]


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach"), ("demo",)])
@pytest.mark.parametrize("name", ["VLLM_PORT", "PROMETHEUS_MULTIPROC_DIR", "RAY_NUM_REDIS_GET_RETRIES"])
def test_a_variable_that_a_library_cannot_read_is_named_before_anything_starts(
    arguments: tuple[str, ...], name: str, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    result = run(*arguments)
    assert (result.exit_code, starts) == (ExitCode.USAGE, [])
    assert result.stderr.startswith(f"error: environment: {name}='tcp://10.0.0.1:8000'")
    assert len(result.stderr.splitlines()) == 1


def give_engine_args(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane with an option that vLLM refuses."""
    (checkout / "deploy" / "lab.yaml").write_text(
        LAB.replace("strategy: batched", "strategy: batched, engine_args: {x: 1}")
    )
    monkeypatch.setattr(
        vllm_check, "faults", lambda lab, say: [f"lanes[{lab.lanes[0].name}].engine_args.x = 1: no"]
    )


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach")])
def test_an_option_that_vllm_refuses_starts_nothing(
    arguments: tuple[str, ...], checkout: Path, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_engine_args(checkout, monkeypatch)
    result = run(*arguments)
    assert (result.exit_code, starts) == (ExitCode.USAGE, ["prepare"])
    assert result.stderr == "error: deploy/lab.yaml: lanes[batched].engine_args.x = 1: no\n"


def test_the_doctor_asks_vllm_about_options(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "engine options" not in run("doctor").stdout
    give_engine_args(checkout, monkeypatch)
    result = run("doctor", "--json")
    (check,) = [one for one in json.loads(result.stdout)["checks"] if one["name"] == "engine options"]
    assert (result.exit_code, check["status"]) == (ExitCode.FAILED, "fail")
    assert check["found"] == "lanes[batched].engine_args.x = 1: no"


def profile_check(config: Path) -> dict[str, str]:
    checks = json.loads(run("doctor", "--config", str(config), "--json").stdout)["checks"]
    (check,) = [one for one in checks if one["name"] == "profiles"] or [{}]
    return check  # type: ignore[no-any-return]


def test_the_doctor_looks_at_the_profiles(checkout: Path) -> None:
    config = checkout / "deploy" / "mine.yaml"
    lanes = "lanes: [{name: batched, strategy: batched}, {name: other, strategy: batched}]\n"
    config.write_text(lanes)
    assert profile_check(config) == {}
    config.write_text(lanes + "scheduler: {placement: adaptive, profile: p.json}\n")
    missing = profile_check(config)
    assert missing["status"] == "fail"
    assert "p.json: cannot be read" in missing["found"]
    exported = run("export", "serve", "--config", str(config))
    assert exported.exit_code == ExitCode.USAGE
    assert "p.json: cannot be read" in exported.stderr
    good = [lane_profile(name, LinearStepTime(0.02, 0.002, 0)) for name in ("batched", "other")]
    write_profile(config.parent / "p.json", *good)
    assert profile_check(config)["status"] == "ok"
    assert run("export", "serve", "--config", str(config)).exit_code == 0
    bad = structs.replace(good[0], residuals=replace(good[0].residuals, median_share=0.7))
    write_profile(config.parent / "p.json", bad, good[1])
    doubtful = profile_check(config)
    assert doubtful["status"] == "warn"
    assert "batched 70% (above 30%)" in doubtful["found"]


@pytest.mark.parametrize("verb", ["up", "status", "down", "prepare", "doctor"])
def test_a_user_without_a_name_and_a_home_is_told_in_a_line(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "TANDEM_STATE", "TANDEM_CACHE", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    result = run(verb)
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith("error: HOME is not set, and user ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [("up",), ("up", "--detach"), ("demo",)])
@pytest.mark.parametrize("name", ["HOME", "TMPDIR"])
def test_a_directory_that_is_not_there_is_named_before_anything_starts(
    arguments: tuple[str, ...], name: str, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "/absent")
    result = run(*arguments)
    assert (result.exit_code, starts) == (ExitCode.USAGE, [])
    assert result.stderr.startswith(f"error: environment: {name}='/absent': ")
    assert len(result.stderr.splitlines()) == 1


def test_a_place_for_the_state_that_cannot_be_made_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "file").touch()
    monkeypatch.setenv("TANDEM_STATE", str(checkout / "file" / "state"))
    result = run("status")
    assert result.exit_code == ExitCode.USAGE
    assert "file/state/lab.json: cannot be read: Not a directory; set TANDEM_STATE" in result.stderr
    with pytest.raises(ConfigError, match="cannot be kept there: Not a directory"):
        lab_state.make(checkout / "file" / "state")


def test_vllm_s_variables_do_not_concern_simulated_lanes(
    checkout: Path, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = "lanes: [{name: a, strategy: batched, engine: simulated, simulated: {}}]\n"
    (checkout / "deploy" / "lab.yaml").write_text(simulated)
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    assert run("up").exit_code == 0
    assert starts == ["supervise"]


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
    assert result.exit_code == ExitCode.USAGE
    assert result.stderr.startswith(f"error: deploy/lab.yaml: {fault}")
    assert len(result.stderr.splitlines()) == 1
    assert starts == []


@pytest.mark.parametrize(("checks", "code"), [([OK], 0), ([OK, BAD], 1)])
def test_doctor(checks: list[Check], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: checks)
    result = run("doctor", "--json")
    assert result.exit_code == code
    assert [check["status"] for check in json.loads(result.stdout)["checks"]] == [c.status for c in checks]
    shown = run("doctor").stdout
    assert ("to do: close other programs" in shown) == (BAD in checks)


@pytest.mark.parametrize("address", ["", "6379", "local", "ray://127.0.0.1:10001/x", "127.0.0.1:", ":6379"])
def test_an_address_of_no_cluster_is_wrong_usage(address: str, starts: list[str]) -> None:
    result = run("up", "--address", address)
    assert result.exit_code == ExitCode.USAGE
    assert "must be auto or HOST:PORT" in result.stderr
    assert starts == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000", "nobody.invalid:6379"])
def test_a_cluster_that_does_not_answer_is_named_before_anything_starts(
    address: str, starts: list[str]
) -> None:
    result = run("up", "--detach", "--address", address)
    assert result.exit_code == ExitCode.FAILED
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
    assert result.exit_code == ExitCode.USAGE
    assert "error: deploy/lab.yaml: model.path = 'auto': the default model is not installed" in result.stderr


@pytest.mark.parametrize("verb", ["prepare", "up"])
def test_a_cache_that_cannot_be_written_is_named(
    verb: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "plain-file").touch()
    cache = checkout / "plain-file" / "cache"
    monkeypatch.setenv("TANDEM_CACHE", str(cache))
    monkeypatch.setattr(model_store, "gguf_file", lambda: checkout / "model.gguf")
    result = run(verb)
    assert result.exit_code == ExitCode.USAGE
    assert (
        f"error: deploy/lab.yaml: model.path = 'auto': the model cannot be written to {cache}/models: Not a "
        "directory; set TANDEM_CACHE" in result.stderr
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
        monkeypatch.setattr(life, "_up_detached", note("up"))
        monkeypatch.setattr(control, "stop_running", note("down"))
        monkeypatch.setattr(clients, "run_module", modules)
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

    monkeypatch.setattr(life, "_up_detached", refuse)
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


HUB_LAB = """\
gateway: {port: 18999}
model: {path: org/model@main}
lanes:
  - {name: batched, strategy: batched}
  - {name: learned, strategy: speculative, speculation: {method: eagle3, model: org/head@v1}}
  - {name: other, strategy: batched, model: {name: other, path: org/other@main}}
"""
COMMIT = "c" * 40


@pytest.fixture
def cached(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A hub of which all is fetched that is asked for; what is here, by its name."""
    (checkout / "deploy" / "lab.yaml").write_text(HUB_LAB)
    here: dict[str, Path] = {}

    def fetch(name: HubName, setting: str, say: object) -> HubName:
        here[str(name)] = checkout / name.repository
        return HubName(name.repository, COMMIT)

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(hub, "is_whole", lambda name: str(name) in here)
    monkeypatch.setattr(hub, "pinned", lambda name: HubName(name.repository, COMMIT))
    return here


def test_prepare_makes_ready_whatever_the_config_names(cached: dict[str, Path]) -> None:
    result = run("prepare")
    assert result.exit_code == 0
    assert set(cached) == {"org/model@main", "org/head@v1", "org/other@main"}
    assert result.stderr.count("model is ready in ") == 3


def test_prepare_says_when_nothing_needs_a_model(checkout: Path) -> None:
    lanes = "lanes: [{name: s, strategy: batched, engine: simulated, simulated: {}}]"
    (checkout / "deploy" / "lab.yaml").write_text(lanes)
    result = run("prepare")
    assert (result.exit_code, result.stderr) == (0, "deploy/lab.yaml: no lane computes with a model\n")


def test_up_fetches_what_is_not_here_and_starts_a_lab_that_is_pinned(
    cached: dict[str, Path], starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labs: list[LabConfig] = []
    monkeypatch.setattr(supervisor, "supervise", lambda lab, **_: labs.append(lab))
    cached["org/model@main"] = Path()
    assert run("up").exit_code == 0
    assert list(labs[0].checkpoints.values()) == [
        f"org/{name}@{COMMIT}" for name in ("model", "head", "other")
    ]
    assert set(cached) == {"org/model@main", "org/head@v1", "org/other@main"}


@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [("draft_model", "own", "lanes[a].speculation.model = auto"), ("eagle3", "auto", "model.path = auto")],
)
def test_up_makes_the_default_model_for_drafts_and_nothing_for_the_head_that_comes_with_tandem(
    method: str, path: str, asked: str, checkout: Path, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "own").mkdir()
    for name in ("config.json", "model.safetensors"):
        (checkout / "own" / name).touch()
    lane = f"{{name: a, strategy: speculative, speculation: {{method: {method}, model: auto}}}}"
    (checkout / "deploy" / "lab.yaml").write_text(f"model: {{path: {path}}}\nlanes: [{lane}]")
    made: list[str] = []
    monkeypatch.setattr(model_store, "obtain", lambda path, setting, _: made.append(f"{setting} = {path}"))
    assert run("up").exit_code == 0
    assert (made, starts) == ([asked], ["supervise"])


def test_a_hub_that_does_not_answer_ends_a_start_and_leaves_prepare_its_copy(
    cached: dict[str, Path], starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(name: HubName, setting: str, say: object) -> HubName:
        raise HubUnreachableError(f"{setting} = '{name}': the hub does not answer")

    monkeypatch.setattr(hub, "fetch", fetch)
    for verb in ("prepare", "up"):
        result = run(verb)
        assert result.exit_code == ExitCode.FAILED
        assert "error: model.path = 'org/model@main': the hub does not answer" in result.stderr
    assert starts == []
    cached |= dict.fromkeys(["org/model@main", "org/head@v1", "org/other@main"], Path())
    result = run("prepare")
    assert result.exit_code == 0
    assert f"the hub does not answer; the copy of org/model@{COMMIT} stays" in result.stderr
    assert run("up").exit_code == 0
    assert starts == ["supervise"]


def test_on_a_cluster_a_hubs_name_has_its_commit(
    cached: dict[str, Path], starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_need_cluster", lambda _: None)
    result = run("up", "--address", "auto")
    assert result.exit_code == ExitCode.USAGE
    assert (
        "deploy/lab.yaml: model.path = 'org/model@main': on a cluster each node has its own copy"
        in result.stderr
    )
    assert starts == []


def test_doctor_says_which_models_are_to_be_fetched(
    cached: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached["org/head@v1"] = Path()
    monkeypatch.setattr(vllm_check, "faults", lambda *_: [])
    checks = {one["name"]: one for one in json.loads(run("doctor", "--json").stdout)["checks"]}
    assert {name: one["status"] for name, one in checks.items() if "model" in name} == {
        "model": "warn",
        "lanes[learned].speculation.model": "ok",
        "lanes[other].model.path": "warn",
    }
    assert "`tandem prepare` with this config fetches it" in checks["model"]["remedy"]
