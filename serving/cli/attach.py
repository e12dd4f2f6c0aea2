"""`tandem up` and servers that already run: a lab of them without a config, and a look at them before it starts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from serving import config
from serving.cli.options import naming
from serving.config import LabConfig, LaneConfig
from serving.core.errors import ConfigError
from serving.lab import state as lab_state

if TYPE_CHECKING:
    from serving.engines.attached.server import Looked

FILE_NAME = "attached.yaml"
LANE = "attached"
HEADER = (
    "# Made by `tandem up --attach`, and made anew by the next; give a copy with --config to change it.\n"
)


def write_config(urls: Sequence[str], api_key_env: str | None) -> Path:
    """A config with one lane of these servers, in the lab's state directory.

    The model has the name that the first server gives it, as far as a name of ours can.

    Raises:
        ConfigError: a URL or the variable's name is not one, the variable is not set, no server can serve, or the
            file cannot be written.
    """
    lane: dict[str, Any] = {"name": LANE, "strategy": "batched", "engine": "openai", "urls": list(urls)}
    if api_key_env is not None:
        lane["api_key_env"] = api_key_env
    origin = "--attach"
    lab = config.from_data({"lanes": [lane]}, origin)
    with naming(Path(origin)):
        looked = _well(lab.lanes[0], _look(lab.lanes[0]))
    served = looked[0].served
    model: dict[str, Any] = {"name": model_name(served.model)}
    if served.max_model_len is not None:
        model["max_model_len"] = max(16, min(served.max_model_len, 1_048_576))
    directory = lab_state.state_dir()
    lab_state.make(directory)
    path = directory / FILE_NAME
    try:
        path.write_text(HEADER + yaml.safe_dump({"model": model, "lanes": [lane]}, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def model_name(served: str) -> str:
    """A name for a lab's model out of a server's: its last part, in the characters that such a name may have."""
    last = served.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9.\-]+", "-", last).strip("-.")[:63] or LANE


def refuse_deaf_servers(lab: LabConfig, path: Path, say: Callable[[str], None]) -> None:
    """Look once at each server that already runs. A lane starts with one that is well, and waits for the others.

    Raises:
        ConfigError: a lane has none, each with the reason; or its key's environment variable is not set.
    """
    with naming(path):
        for lane in lab.lanes:
            if lane.is_attached:
                found = _look(lane)
                _well(lane, found)
                for url, looked in found.items():
                    if isinstance(looked, str):
                        say(
                            f"lane {lane.name} starts without {url}, and takes it in when it is well: {looked}"
                        )


def _look(lane: LaneConfig) -> dict[str, Looked | str]:
    from serving.engines.attached.server import (
        look_at,
    )  # aiohttp takes its time, which other labs need not pay

    return asyncio.run(look_at(lane))


def _well(lane: LaneConfig, found: dict[str, Looked | str]) -> list[Looked]:
    well = [looked for looked in found.values() if not isinstance(looked, str)]
    if not well:
        faults = "; ".join(f"{url}: {why}" for url, why in found.items())
        raise ConfigError(f"lanes[{lane.name}].urls: no server can serve: {faults}")
    return well
