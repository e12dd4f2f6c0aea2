"""A lab's config as `serve deploy` wants it, and how exported files are written."""

from __future__ import annotations

import re
from typing import Any

import yaml

from serving.config import LabConfig
from serving.core.ray_application import APP_NAME, ENGINE_RESOURCE

IMPORT_PATH = "serving.deployments:build"


def serve_config(config: LabConfig) -> dict[str, Any]:
    """The application in Ray Serve's multi-application schema; its gateways listen where the args say."""
    return {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": None,
                "import_path": IMPORT_PATH,
                # Only what the file says: a default is the business of the version that reads it.
                "args": config.model_dump(mode="json", exclude_unset=True),
            }
        ],
    }


def serve_yaml(config: LabConfig, origin: str) -> str:
    """The file for `serve deploy`.

    Args:
        origin: the config's name, for the comment on top.
    """
    needed = config.num_engines
    header = (
        f"Made by `tandem export serve` from {origin}. To use it: serve deploy THIS_FILE",
        f"The nodes together must offer {needed} {ENGINE_RESOURCE}, one for each engine that its memory holds:",
        f"  ray start --address=HEAD:6379 --resources='{{\"{ENGINE_RESOURCE}\": N}}'",
        "and the head, where scheduler and gateways run, none: ray start --head --num-cpus=0",
        "Every node needs this version of tandem and the model at the same path.",
    )
    return to_yaml(serve_config(config), header=header)


# What others read as truth or a number and PyYAML does not, so that it would leave it without quotes:
# YAML 1.1 says yes with `y`, and YAML 1.2 takes 1e3 and 0o17 for numbers. `kubectl` reads both.
READ_OTHERWISE = re.compile(r"[yYnN]|[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+|[-+]?0o[0-7]+")


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, what others take for no text in quotes, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = "|" if "\n" in text else "'" if READ_OTHERWISE.fullmatch(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def to_yaml(*documents: dict[str, Any], header: tuple[str, ...] = ()) -> str:
    """YAML documents in one text, keys in the order given, below a comment."""
    comment = "".join(f"# {' '.join(line.splitlines())}\n" for line in header)
    body = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    return comment + body
