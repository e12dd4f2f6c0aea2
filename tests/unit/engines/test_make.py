"""Each engine that a config can name is made, is what the config takes it for, and keeps the `Engine` protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serving.config import ENGINES, ENGINES_WITHOUT_MODEL, LaneConfig, ModelConfig, SimulatedProfile
from serving.core.engine_paths import TALLY_PATH
from serving.core.errors import ConfigError
from serving.engines.make import make_engine
from serving.engines.replica import EngineReplica
from tests.unit.scheduler.control_plane import control_plane, until

pytestmark = pytest.mark.anyio


def lane(engine: str) -> LaneConfig:
    """With the settings that an engine needs, under its own name and at their defaults."""
    settings: dict[str, Any] = {"name": "batched", "strategy": "batched", "engine": engine, "max_num_seqs": 2}
    return LaneConfig.model_validate(settings | ({engine: {}} if engine in LaneConfig.model_fields else {}))


def model(path: Path) -> ModelConfig:
    for name in ("config.json", "model.safetensors"):
        (path / name).touch()
    return ModelConfig(device="cpu", path=str(path))


MADE = [name for name in ENGINES if name != "openai"]  # the others run already


@pytest.mark.parametrize("name", MADE)
async def test_an_engine_is_the_one_that_its_lane_names(name: str, tmp_path: Path) -> None:
    engine = make_engine(lane(name), model(tmp_path), ["m"])
    assert (engine.facts.name, engine.facts.has_model) == (name, lane(name).has_model)
    engine.close()


@pytest.mark.parametrize("name", MADE)
async def test_only_an_engine_with_a_model_needs_one_on_its_node(name: str, tmp_path: Path) -> None:
    if lane(name).has_model:
        with pytest.raises(ConfigError, match="no checkpoint in"):
            make_engine(lane(name), ModelConfig(path=str(tmp_path)), ["m"])
    else:
        make_engine(lane(name), ModelConfig(path=str(tmp_path)), ["m"]).close()


@pytest.mark.parametrize("name", sorted(ENGINES_WITHOUT_MODEL))
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_engine_serves_as_a_replica(name: str, stream: bool) -> None:
    """Those that need no model are started: announced, asked in both ways, recorded, counted."""
    async with control_plane(drain_timeout_s=0.01) as plane, aiohttp.ClientSession() as http:
        engine = make_engine(lane(name), ModelConfig(), ["m"])
        replica = EngineReplica(engine, lane(name), "b-1", "m", plane.address, drain_timeout_s=0)
        url = await replica.start("127.0.0.1")
        await until(lambda: plane.is_ready("b-1"))
        async with http.post(f"{url}/tandem/trace/start?seconds=60") as answer:
            assert answer.status == 200, await answer.text()
            recording = (await answer.json())["recording"]
        asked = {"model": "m", "max_tokens": 3, "stream": stream}
        headers = {"x-request-id": "asked-by-a-test"}
        for path, prompt in (
            ("chat/completions", {"messages": [{"role": "user", "content": "a b c"}]}),
            ("completions", {"prompt": "a b c"}),
        ):
            async with http.post(f"{url}/v1/{path}", json=asked | prompt, headers=headers) as answer:
                assert answer.status == 200
                assert (b"data: [DONE]" in await answer.read()) == stream
        async with http.post(f"{url}/tandem/trace/stop?recording={recording}") as answer:
            assert "asked-by-a-test" in await answer.text()
        async with http.get(f"{url}{TALLY_PATH}") as answer:
            tally = await answer.json()
            ids = [one["request_id"] for one in tally["finished"]]
            assert (tally["running"], sum("asked-by-a-test" in one for one in ids)) == (0, 2)
        async with http.get(f"{url}/metrics") as answer:
            assert 'tandem_engine_running_requests{lane="batched",replica="b-1"} 0.0' in await answer.text()
        replica.check()
        await replica.close()


def test_a_prepared_engine_has_no_setting_that_it_would_ignore() -> None:
    with pytest.raises(
        ValueError, match="prepared knows ttft_ms and step_ms only; stall_after_tokens is given"
    ):
        SimulatedProfile(prepared=True, ttft_ms=1, stall_after_tokens=5, stall_ms=5)
    prepared = lane("simulated").model_copy(update={"simulated": SimulatedProfile(prepared=True, ttft_ms=1)})
    engine = make_engine(prepared, ModelConfig(), ["m"])
    assert "prepared" in engine.facts.version
    engine.close()
