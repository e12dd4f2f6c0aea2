"""Each engine that a config can name is made, and is what the config takes it for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.config import ENGINES, LaneConfig, ModelConfig
from serving.core.errors import ConfigError
from serving.engines.make import make_engine

# Of the engines that have settings of their own.
SETTINGS: dict[str, dict[str, Any]] = {"simulated": {"simulated": {}}}


def lane(engine: str) -> LaneConfig:
    settings = {"name": "a", "strategy": "batched", "engine": engine} | SETTINGS.get(engine, {})
    return LaneConfig.model_validate(settings)


def model(path: Path) -> ModelConfig:
    for name in ("config.json", "model.safetensors"):
        (path / name).touch()
    return ModelConfig(device="cpu", path=str(path))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ENGINES)
async def test_an_engine_is_the_one_that_its_lane_names(name: str, tmp_path: Path) -> None:
    engine = make_engine(lane(name), model(tmp_path), ["m"])
    assert (engine.facts.name, engine.facts.has_model) == (name, lane(name).has_model)
    engine.close()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ENGINES)
async def test_only_an_engine_with_a_model_needs_one_on_its_node(name: str, tmp_path: Path) -> None:
    if lane(name).has_model:
        with pytest.raises(ConfigError, match="no checkpoint in"):
            make_engine(lane(name), ModelConfig(path=str(tmp_path)), ["m"])
    else:
        make_engine(lane(name), ModelConfig(path=str(tmp_path)), ["m"]).close()
