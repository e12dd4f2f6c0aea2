"""A hub's model becomes a lab: fetched at the first start, over a connection that breaks; known by its commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from serving import model_store
from tests.e2e.conftest import DEFAULT_CONFIG
from tests.running_lab import running_lab, tandem
from tests.stand_in_hub import Repository, stand_in_hub

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NAME = "someone/a-small-model"
TOKEN = "hf_not-to-be-seen-0123456789"
WEIGHTS = "model.safetensors"


def test_the_default_models_files_on_a_hub_become_a_lab_that_answers(tmp_path: Path) -> None:
    directory = model_store.prepare(print)
    config = yaml.safe_load(DEFAULT_CONFIG.read_text())
    del config["gateway"]["port"]
    config["model"] |= {"name": "small", "path": f"{NAME}@main"}
    config["lanes"] = [{"name": "batched", "strategy": "batched", "max_num_seqs": 4}]
    repository = Repository(directory, breaks={WEIGHTS: 1}, token=TOKEN)
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)}
    variables = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"} | cache
    with stand_in_hub({NAME: repository}) as hub:
        environment = variables | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        with running_lab(config, environment=environment) as lab:
            num_asked = len(hub.asked)
            body = {
                "model": "small:batched",
                "prompt": "Once upon a time",
                "max_tokens": 8,
                "ignore_eos": True,
            }
            answer = lab.post("/v1/completions", body)
            assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
            described = lab.get("/lab")
            assert described["config"]["model"]["path"] == f"{NAME}@{repository.commit}"
            (replica,) = described["replicas"]
            assert str(tmp_path / "hub") in " ".join(replica["arguments"])
            log = (Path(lab.environment["TANDEM_STATE"]) / "lab.log").read_text()
            assert TOKEN not in log
            assert TOKEN not in str(described)
            assert len(hub.asked) == num_asked, "engines ask no hub"
        first, again = hub.fetched(WEIGHTS)
        assert first is None
        assert again is not None, "the rest of the file alone is asked for"
    # Without a hub the copy will do.
    done = tandem("prepare", "--config", str(_written(config, tmp_path)), environment=environment)
    assert done.returncode == 0, done.stderr
    assert (
        f"does not answer: [Errno 111] Connection refused; the copy of {NAME}@{repository.commit} stays"
        in done.stderr
    )


def _written(config: object, folder: Path) -> Path:
    path = folder / "lab.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
