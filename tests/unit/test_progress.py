"""When a plain progress line is due, on a manual clock."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from serving.progress import PlainProgress, progress


def test_a_change_is_written_at_once_and_a_repeat_is_not() -> None:
    lines: list[str] = []
    shown = PlainProgress(lines.append, started_at_s=100)
    shown.change("starting engine", 101)
    shown.change("starting engine", 102)
    shown.change("engine ready", 103)
    assert lines == ["[    1 s] starting engine", "[    3 s] engine ready"]


def test_silence_never_exceeds_five_seconds() -> None:
    lines: list[str] = []
    shown = PlainProgress(lines.append, started_at_s=0)
    shown.change("waiting", 0)
    for now_s in range(1, 13):
        shown.tick(now_s)
    assert lines == ["[    0 s] waiting", "[    5 s] waiting", "[   10 s] waiting"]


def test_nothing_is_said_before_there_is_something_to_say() -> None:
    lines: list[str] = []
    PlainProgress(lines.append, started_at_s=0).tick(60)
    assert lines == []


def test_a_terminal_gets_the_text_and_a_bracket_in_it_is_not_markup() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with progress(console) as say:
        say("waiting for [lane]")
    assert isinstance(console.file, io.StringIO)
    assert "waiting for [lane]" in console.file.getvalue()


def test_elsewhere_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(Console(file=io.StringIO())) as say:
        say("waiting for a lane")
    captured = capsys.readouterr()
    assert "waiting for a lane" in captured.err
    assert captured.out == ""
