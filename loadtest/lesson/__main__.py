"""Measures a running lab and draws what it shows: `python -m loadtest.lesson`.

Exit codes: 0 the page is written, 1 the lab failed a request, 2 wrong usage, 3 it cannot be reached, 130 stopped.
"""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from loadtest.client.lab import LabError
from loadtest.client.traced_lab import TracedLabError, find_lab
from loadtest.lesson.page import render
from loadtest.lesson.teach import teach
from serving.core.addresses import GATEWAY_URL
from serving.core.exit_codes import ExitCode
from serving.progress import progress
from serving.run_directory import RUNS_DIR, create_run_dir


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure the running lab and draw five pictures of serial decoding in one page: docs/lesson.md. "
    "Takes a few minutes; nothing else should use the lab meanwhile.",
)
@click.option(
    "--base-url",
    default=GATEWAY_URL,
    help="Where the lab is.  [default: the one that runs here]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The page to write.  [default: runs/<time>-lesson/lesson.html]",
)
def main(base_url: str, out: Path | None) -> None:
    if out is not None and not os.access(out.parent, os.W_OK):
        raise click.BadParameter(f"{out.parent} is not a directory to write into", param_hint="--out")
    try:
        with progress() as say:
            lesson = teach(find_lab(base_url), say)
        if out is None:
            out = create_run_dir(RUNS_DIR, "lesson", datetime.now(UTC)) / "lesson.html"
        out.write_text(render(lesson), encoding="utf-8")
    except LabError as error:
        _fail(str(error), ExitCode.NOT_RUNNING)
    except TracedLabError as error:
        _fail(str(error), ExitCode.FAILED)
    except OSError as error:
        _fail(f"{out or RUNS_DIR}: cannot be written: {error.strerror}", ExitCode.FAILED)
    except KeyboardInterrupt:
        _fail("interrupted", ExitCode.INTERRUPTED)
    click.echo(out)


def _fail(text: str, code: ExitCode) -> None:
    click.echo(f"error: {text}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="tandem lesson")
