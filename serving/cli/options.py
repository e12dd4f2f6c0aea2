"""Options that several verbs take, and what stands for them where they are not given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import serving
from serving import config
from serving.config import LabConfig
from serving.core.errors import ConfigError, NotRunningError
from serving.lab import state as lab_state
from serving.proposers.from_profile import with_profiles

DEFAULT_CONFIG = Path("deploy/lab.yaml")


class Number(click.FloatRange):
    """A number within bounds; `nan`, which compares with none, is outside of all."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Config file.  [default: deploy/lab.yaml here, else the one that comes with tandem]",
)
base_url_option = click.option("--base-url", help="Where the lab is.  [default: the one that runs here]")


def find_config(given: Path | None) -> Path:
    """The config file to use: the given one, `deploy/lab.yaml` in the current directory, or the packaged one.

    Raises:
        ConfigError: there is none.
    """
    if given is not None:
        return given
    return find_shipped(DEFAULT_CONFIG, "config file: --config is not given")


def find_shipped(path: Path, what: str) -> Path:
    """A file that comes with tandem: that of the current directory, or the packaged one.

    Args:
        path: in a checkout; it begins with `deploy`.
        what: is missing, for the error.

    Raises:
        ConfigError: there is none.
    """
    package = Path(serving.__file__).parent
    # An editable installation has no packaged copy; the checkout's own file stands beside the package.
    candidates = (path, package / "defaults" / path.relative_to("deploy"), package.parent / path)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    looked_for = ", ".join(map(str, candidates))
    raise ConfigError(f"no {what}, and there is none of {looked_for}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors about a setting name the config file, too."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def load_lab(path: Path) -> LabConfig:
    """Read a config, and the profiles that it names.

    Raises:
        ConfigError: one of them is not as it should be.
    """
    lab = config.load(path)
    with naming(path):
        return with_profiles(lab, path.parent)


def running_url() -> str:
    """Where the lab is that runs here.

    Raises:
        NotRunningError: none does.
    """
    state = lab_state.read(lab_state.state_dir())
    if state is None or not state.is_alive:
        raise NotRunningError("no lab is running; `tandem up --detach` starts one, --base-url names another")
    return state.url
