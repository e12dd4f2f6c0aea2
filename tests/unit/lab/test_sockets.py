"""Sockets that a lab leaves: gone after it, and nobody else's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from serving.core.run_mark import socket_folder_prefix
from serving.lab import sockets

RUN_ID = "0123456789abcdef"
PID = 4711


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pytest's own is too long for a socket's path."""
    monkeypatch.chdir(tmp_path)
    return Path()


def bound(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def test_sockets_that_nobody_answers_at_are_removed(temp_dir: Path) -> None:
    session = temp_dir / f"ray/session_2026_{PID}/sockets"
    engine = temp_dir / f"{socket_folder_prefix(RUN_ID)}x"
    for path in (session / "plasma_store", session / "raylet", engine / "ipc"):
        bound(path).close()
    log = session.parent / "logs/raylet.out"
    log.parent.mkdir()
    log.touch()
    sockets.remove_left([str(temp_dir)], PID, RUN_ID)
    assert list(session.iterdir()) == []
    assert not engine.exists()
    assert log.exists()


def test_sockets_of_others_and_those_in_use_stay(temp_dir: Path) -> None:
    others = temp_dir / "ray/session_2026_14711/sockets/plasma_store"
    other_engine = temp_dir / f"{socket_folder_prefix('f' * 16)}x/ipc"
    in_use = temp_dir / f"ray/session_2026_{PID}/sockets/plasma_store"
    for path in (others, other_engine):
        bound(path).close()
    no_socket = in_use.parent / "file"
    with bound(in_use) as held:
        held.listen()
        no_socket.touch()
        sockets.remove_left([str(temp_dir)], PID, RUN_ID)
        assert all(path.exists() for path in (others, other_engine, in_use, no_socket))
