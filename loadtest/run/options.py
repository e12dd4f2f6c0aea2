"""Options that several verbs declare alike."""

from __future__ import annotations

from pathlib import Path

import click

from serving.run_directory import RUNS_DIR

runs_dir_option = click.option(
    "--runs-dir", type=click.Path(path_type=Path), default=RUNS_DIR, show_default=True
)
