"""`tandem up --attach`: a lab without a config, in front of servers that run already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import config
from serving.cli.attach import model_name
from serving.core.exit_codes import ExitCode
from serving.lab import supervisor
from tests.stand_in_server import StandInServer, serving_in_thread
from tests.unit.cli.verb_runs import run


@pytest.fixture
def server() -> Iterator[StandInServer]:
    with serving_in_thread(StandInServer()) as started:
        yield started


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("/models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4-1.gguf"),
        ("/models/", "models"),
        ("ein Modell: groß", "ein-modell-gro"),
        ("///", "attached"),
    ],
)
def test_a_lab_s_model_is_named_after_the_server_s(served: str, expected: str) -> None:
    assert model_name(served) == expected
    assert config.from_data({"model": {"name": expected}, "lanes": [LANE]}, "test").model.name == expected


LANE: dict[str, Any] = {"name": "a", "strategy": "batched", "engine": "openai", "urls": ["http://a"]}


def test_a_lab_is_made_of_what_the_server_says_of_itself(
    server: StandInServer, checkout: Path, starts: list[str]
) -> None:
    assert run("up", "--attach", f"{server.url}/v1").exit_code == 0
    assert starts == ["supervise"], "no model is made here"
    lab = config.load(checkout / "state" / "attached.yaml")
    assert (lab.model.name, lab.model.max_model_len) == ("model-1", 512)
    assert [(lane.name, lane.urls) for lane in lab.lanes] == [("attached", (server.url,))]


def test_its_config_lies_where_the_user_alone_can_look_or_the_place_is_named(
    server: StandInServer, checkout: Path, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = checkout / "state"
    assert run("up", "--attach", server.url).exit_code == 0
    assert state.stat().st_mode & 0o777 == 0o700
    (state / "attached.yaml").unlink()
    (state / "attached.yaml").mkdir()
    result = run("up", "--attach", server.url)
    assert result.exit_code == ExitCode.USAGE
    assert f"{state / 'attached.yaml'}: cannot be written: Is a directory" in result.stderr
    monkeypatch.setenv("TANDEM_STATE", "/proc/absent")
    result = run("up", "--attach", server.url)
    assert result.exit_code == ExitCode.USAGE
    assert "the lab's state cannot be kept there" in result.stderr
    assert starts == ["supervise"]


def test_the_port_is_the_gateway_s_for_vllm_s_own_is_8000_too(
    server: StandInServer, starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labs: list[config.LabConfig] = []
    monkeypatch.setattr(supervisor, "supervise", lambda lab, **_: labs.append(lab))
    for options in ((), ("--port", "8301")):
        assert run("up", "--attach", server.url, *options).exit_code == 0
    assert [lab.gateway.port for lab in labs] == [8000, 8301]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--attach", "http://a", "--config", "deploy/lab.yaml"), "--attach makes a config of its own"),
        (("--api-key-env", "THEIR_KEY"), "--api-key-env goes with --attach"),
        (("--attach", "ftp://a"), "must begin with http:// or https://"),
        (("--attach", "http://user:word@a"), "must hold no user and password"),
        (("--attach", "http://a..b"), "a host whose parts between dots have 1 to 63 characters"),
        (("--port", "0"), "--port"),
    ],
)
def test_what_does_not_go_together_starts_nothing(
    options: tuple[str, ...], said: str, starts: list[str]
) -> None:
    result = run("up", *options)
    assert (result.exit_code, starts) == (ExitCode.USAGE, [])
    assert said in result.stderr
