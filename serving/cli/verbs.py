"""The `tandem` command: its verbs, in the order of its help."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

import serving
from serving.cli import clients, export, life, show
from serving.cli.outcome import Verbs
from serving.core.exit_codes import ExitCode


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(serving.__version__, prog_name="tandem")
def tandem() -> None:
    """Serve one model in several decoding lanes on this machine, load it, and compare the lanes.

    \b
    A first run:
      tandem doctor            what this machine lacks, and what to do about it
      tandem prepare           the default model, once
      tandem up --detach       start the lab; returns when every lane is ready
      tandem status            lanes and replicas
      tandem bench             measure them; ends with a table and a report
      tandem sweep --slo ...   which lane serves most within an objective
      tandem down              stop it; no process and no port is left

    \b
    Exit codes:
      0    done; for `status`: ready
      1    failed; for `status`: starting, stopping or degraded;
           for `doctor`: something is missing
      2    wrong usage or wrong config
      3    no lab is running, it cannot be reached, or it refuses the API key (TANDEM_API_KEY)
      4    a lab is already running
      5    `bench`, `sweep`, `report`: all is written, but figures are INVALID: they may not be used
      130  interrupted before the work was done
    """


for _verb in (
    life.up,
    life.down,
    show.status,
    show.watch_verb,
    clients.bench,
    clients.sweep,
    clients.report,
    clients.calibrate,
    clients.simulate,
    clients.trace,
    clients.lesson,
    export.export,
    life.prepare,
    life.doctor_verb,
    life.demo,
):
    tandem.add_command(_verb)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the `tandem` command."""
    # Being told to end is the same as Ctrl-C, also where the shell has SIGINT ignored, as for a job in the
    # background. A hang-up that `nohup` ignores stays ignored.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        tandem()
    except SystemExit as end:
        if "ray" in sys.modules:
            # Everything is stopped by now; Ray's exit hooks would still wait for a cluster that is gone.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else ExitCode.FAILED)
        raise
