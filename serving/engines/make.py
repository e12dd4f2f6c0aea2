"""The engine of a lane, made by its name: the one place that knows them all."""

from __future__ import annotations

from typing import assert_never

from serving import model_store
from serving.config import LaneConfig, ModelConfig
from serving.core.errors import ConfigError
from serving.engines.base import Engine
from serving.engines.simulated.engine import SimulatedEngine
from serving.engines.simulated.prepared import PreparedEngine
from serving.engines.vllm import VllmEngine


def make_engine(lane: LaneConfig, model: ModelConfig, served_names: list[str]) -> Engine:
    """An engine of this lane, not started yet.

    Args:
        served_names: the model names it answers to; the first is the one it gives itself.

    Raises:
        ConfigError: the model, or the lane's draft model, is not on this node.
    """
    match lane.engine:
        case "vllm":
            return VllmEngine(lane, model, model_store.resolve(model.path, lane.model_setting), served_names)
        case "simulated" if lane.simulated is not None and lane.simulated.prepared:
            return PreparedEngine(lane, served_names)
        case "simulated":
            return SimulatedEngine(lane, served_names, model.max_model_len)
        case "openai":
            raise ConfigError(f"lanes[{lane.name}].engine = 'openai' names servers that run: none is made")
        case _:
            assert_never(lane.engine)
