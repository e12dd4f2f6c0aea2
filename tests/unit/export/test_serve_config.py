"""The file for `serve deploy`: Ray Serve accepts it, and what it says is the config again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from serving import config
from serving.cli.verbs import tandem
from serving.export import serve_config

CHECKOUT = Path(__file__).parents[3]
NEED_A_PROFILE = ("adaptive", "study-adaptive")  # that `tandem calibrate` writes first
CONFIGS = sorted(path for path in (CHECKOUT / "deploy").glob("*.yaml") if path.stem not in NEED_A_PROFILE)

# In a process of its own: Ray warns when it is imported, and warnings are errors here.
ASK_RAY = """\
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from serving import deployments
for path in sys.argv[1:]:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(open(path)))
    (application,) = schema.applications
    module, name = application.import_path.split(":")
    assert (module, getattr(deployments, name).__name__) == (deployments.__name__, "build")
    assert application.name == deployments.APP_NAME
    assert application.route_prefix is None
    assert schema.proxy_location == "Disabled"
"""


def exported(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(tandem, ["export", "serve", "--config", str(path)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_arguments_are_the_config_again(path: Path) -> None:
    (application,) = exported(path)["applications"]
    assert config.from_data(application["args"], "args") == config.load(path)


def test_ray_serve_accepts_what_is_exported(tmp_path: Path) -> None:
    files = []
    for path in CONFIGS:
        files.append(tmp_path / path.name)
        result = CliRunner().invoke(
            tandem, ["export", "serve", "--config", str(path), "--out", str(files[-1])]
        )
        assert (result.exit_code, result.stdout) == (0, f"{files[-1]}\n")
    ended = subprocess.run(
        [sys.executable, "-c", ASK_RAY, *map(str, files)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_the_comment_says_what_the_nodes_must_offer() -> None:
    lab = config.load(CHECKOUT / "deploy" / "scale.yaml")
    header = [line for line in serve_config.serve_yaml(lab, "x.yaml").splitlines() if line.startswith("#")]
    assert "from x.yaml" in header[0]
    assert "must offer 3 tandem_engine" in header[1]
    assert """--resources='{"tandem_engine": N}'""" in header[2]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "serve.yaml"
    result = CliRunner().invoke(tandem, ["export", "serve", "--config", str(CONFIGS[0]), "--out", str(out)])
    assert result.exit_code == 1
    assert f"{out}: cannot be written" in result.stderr


@pytest.mark.parametrize("name", ["y", "N", "1e3", "-1.5E-2", "0o17", "on", "null", "0x1f", "2026-01-01"])
def test_a_name_that_is_a_truth_or_a_number_elsewhere_is_quoted(name: str) -> None:
    assert serve_config.to_yaml({"name": name}) == f"name: '{name}'\n"


@pytest.mark.parametrize("name", ["yes-man", "e3", "1e", "tandem:1e3", "0o9"])
def test_other_names_are_not(name: str) -> None:
    assert serve_config.to_yaml({"name": name}) == f"name: {name}\n"


def test_a_line_of_the_comment_stays_one() -> None:
    assert yaml.safe_load(serve_config.to_yaml({"a": 1}, header=("made from x\nb: 2",))) == {"a": 1}
