"""Progress of long steps, on stderr: what is waited for, and for how long.

On a terminal one line that updates itself; elsewhere a line at each change, and at least every five seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Say = Callable[[str], None]

MAX_SILENCE_S = 5.0


class PlainProgress:
    """Decides when a plain line is due; `write` gets it. Times are seconds on any monotonic clock."""

    def __init__(self, write: Say, started_at_s: float) -> None:
        self._write = write
        self._started_at_s = started_at_s
        self._text = ""
        self._written_at_s = started_at_s

    def change(self, text: str, now_s: float) -> None:
        """Note what is waited for now; a text that differs from the last is written at once."""
        if text != self._text:
            self._text = text
            self._line(now_s)

    def tick(self, now_s: float) -> None:
        """Repeat the current text with the new elapsed time if nothing was written for MAX_SILENCE_S."""
        if self._text and now_s - self._written_at_s >= MAX_SILENCE_S:
            self._line(now_s)

    def _line(self, now_s: float) -> None:
        self._written_at_s = now_s
        self._write(f"[{now_s - self._started_at_s:5.0f} s] {self._text}")


@contextmanager
def progress(console: Console | None = None) -> Iterator[Say]:
    """Show progress while the block runs; call the yielded function with what is waited for now."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        ) as bar:
            task = bar.add_task("")
            yield lambda text: bar.update(task, description=text)
        return
    with _plain() as say:
        yield say


@contextmanager
def _plain() -> Iterator[Say]:
    lines = PlainProgress(lambda line: click.echo(line, err=True), time.monotonic())
    lock = threading.Lock()
    done = threading.Event()

    def say(text: str) -> None:
        with lock:
            lines.change(text, time.monotonic())

    def keep_ticking() -> None:
        while not done.wait(0.5):
            with lock:
                lines.tick(time.monotonic())

    ticker = threading.Thread(target=keep_ticking, name="progress", daemon=True)
    ticker.start()
    try:
        yield say
    finally:
        done.set()
        ticker.join()
