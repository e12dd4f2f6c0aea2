"""What programs share that make a checkpoint out of another."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from serving import model_store
from serving.core.errors import ConfigError


def config_of(directory: Path) -> dict[str, Any]:
    """Its `config.json`."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def tensors_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of its `*.safetensors`, with its name."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_tensor(name)


def write_like(source: Path, target: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Write the checkpoint `target`: these tensors and this config, and what else `source` has.

    Raises:
        FileExistsError: `target` is there.
    """
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2))


def parser_of(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Of `python -m module`, with the options that name both checkpoints."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=doc)
    parser.add_argument("--model", type=Path, help="directory of the checkpoint (default: the default model)")
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not be there")
    return parser


def make(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    write: Callable[[Path, argparse.Namespace], str],
) -> int:
    """Have `write` make `--out` of the checkpoint, and print what it says of it; the exit code."""
    given = parser.parse_args(argv)
    try:
        said = write(given.model or model_store.prepare(print), given)
    except (OSError, ValueError, ConfigError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{said}: {given.out}\n")
    return 0
