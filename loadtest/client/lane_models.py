"""Which model each lane of a lab serves, and which lanes count the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.offer.prompt_tokens import TokenCounter, token_counter, tokenizer_of


@dataclass(frozen=True, slots=True)
class LaneModel:
    """What a lane serves.

    Attributes:
        name: as clients ask for it.
        path: as the config names its checkpoint; lanes of one path have one model.
        tokenizer: equal where tokenizers are; "" where the engines do not tell, and no other of the path does.
    """

    name: str
    path: str
    tokenizer: str = ""

    def counts_like(self, other: LaneModel) -> bool:
        """Whether a token of one is a token of the other; where it is not told, only of the same model."""
        if self.tokenizer and other.tokenizer:
            return self.tokenizer == other.tokenizer
        return self.path == other.path


def lane_models(config: Mapping[str, Any], replicas: Sequence[Mapping[str, Any]]) -> dict[str, LaneModel]:
    """By lane, from what `/lab` says; the lab's own where the lane names none."""
    own = config.get("model", {})
    found = {}
    for lane in config.get("lanes", []):
        model = own | {key: value for key, value in (lane.get("model") or {}).items() if value is not None}
        found[lane["name"]] = LaneModel(str(model.get("name", "")), str(model.get("path", "")))
    # Engines of before this key tell none.
    told = {
        found[replica["lane"]].path: str(replica["tokenizer"])
        for replica in replicas
        if replica.get("tokenizer") and replica.get("lane") in found
    }
    return {lane: LaneModel(one.name, one.path, told.get(one.path, "")) for lane, one in found.items()}


def other_names(config: Mapping[str, Any]) -> dict[str, str]:
    """By lane, the name of its model where that is not the lab's."""
    own = str(config.get("model", {}).get("name", ""))
    return {lane: model.name for lane, model in lane_models(config, ()).items() if model.name != own}


def lanes_of_own_model(config: Mapping[str, Any]) -> list[str]:
    """Lanes that serve the lab's model."""
    own = str(config.get("model", {}).get("path", ""))
    return [lane for lane, model in lane_models(config, ()).items() if model.path == own]


def counters_of_lanes(config: Mapping[str, Any]) -> dict[str, TokenCounter]:
    """By lane, what counts the tokens of its prompts, where it has another model than the lab's; the byte estimate
    where its tokenizer is not on this machine."""
    own = str(config.get("model", {}).get("path", ""))
    models = lane_models(config, ())
    return {lane: token_counter(tokenizer_of(one.path)) for lane, one in models.items() if one.path != own}


def alike(models: Mapping[str, LaneModel]) -> tuple[tuple[str, ...], ...]:
    """Lanes in groups that count the same tokens, in their order."""
    groups: list[list[str]] = []
    for lane, model in models.items():
        for group in groups:
            if models[group[0]].counts_like(model):
                group.append(lane)
                break
        else:
            groups.append([lane])
    return tuple(map(tuple, groups))
