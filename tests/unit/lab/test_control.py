"""The life of a lab with a stand-in for Ray, in real processes: no process and no state is ever left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from serving.core.errors import AlreadyRunningError, StartFailedError, TandemError
from serving.core.run_mark import RUN_ID_VARIABLE
from serving.environment import temp_dirs
from serving.lab import cleanup, control
from serving.lab import state as lab_state
from serving.lab.cleanup import SweepError, clean_up, clear_stale, processes_of, sweep
from serving.lab.shared_memory import SHM_DIR, recorded
from serving.lab.state import LabPhase, LabState

CHECKOUT = Path(__file__).parents[3]
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "state"
    monkeypatch.setenv("TANDEM_STATE", str(directory))
    monkeypatch.chdir(CHECKOUT)  # the stand-in is a module of the tests
    return directory


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
        return free


@pytest.fixture
def run_id() -> Iterator[str]:
    """A run of which nothing outlives the test, whatever the test finds."""
    value = uuid.uuid4().hex
    yield value
    sweep(value, grace_s=0.1)


def command(mode: str, run_id: str, port: int, timeout_s: float = 60, *address: str) -> list[str]:
    stand_in = [sys.executable, "-m", "tests.unit.lab.stand_in_lab"]
    return [*stand_in, mode, run_id, str(port), str(timeout_s), *address]


class Supervisor:
    """A stand-in lab in the foreground, followed by the lines it prints."""

    def __init__(self, mode: str, run_id: str, port: int, timeout_s: float = 60, *address: str) -> None:
        env = os.environ | {RUN_ID_VARIABLE: run_id}
        self.process = subprocess.Popen(
            command(mode, run_id, port, timeout_s, *address), stdout=subprocess.PIPE, text=True, env=env
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return
        raise AssertionError(f"{text!r} never came; it said {self.lines}")

    def end(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.stdout.close()
        return self.process.wait(timeout=30)


def start_marked(command: list[str], run_id: str | None) -> subprocess.Popen[str]:
    env = {**os.environ, RUN_ID_VARIABLE: run_id} if run_id else None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.stdout.close()
    return process


def ignore(text: str) -> None:
    """Takes progress that the test does not look at."""


def assert_nothing_left(run_id: str, state_dir: Path) -> None:
    assert processes_of(run_id) == []
    assert [path.name for path in state_dir.iterdir() if path.suffix == ".json"] == []


def test_detached_start_then_down(run_id: str, port: int, state_dir: Path) -> None:
    state = control.detach(
        command("ready", run_id, port),
        run_id=run_id,
        log_path=lab_state.log_path(state_dir),
        timeout_s=60,
        say=ignore,
    )
    assert (state.phase, state.url, state.run_id) == (LabPhase.READY, f"http://127.0.0.1:{port}", run_id)
    assert state.is_alive
    assert os.getsid(state.pid) == state.pid
    assert state.temp_dirs == tuple(map(str, temp_dirs()))
    assert len(processes_of(run_id)) == 2  # the supervisor and the process that its lab started
    said: list[str] = []
    stopped = control.stop_running(timeout_s=30, say=said.append)
    assert stopped == state
    assert_nothing_left(run_id, state_dir)
    assert said[-1] == "stopping: waiting for the ports to be free"


@pytest.mark.parametrize("address", ["127.0.0.1:6379", None])
def test_what_a_dead_supervisor_left_on_a_cluster_is_taken_down(
    address: str | None, run_id: str, port: int, state_dir: Path
) -> None:
    dead = LabState(
        os.getpid(), 0, run_id, "c", "u", "127.0.0.1", (port,), None, LabPhase.READY, "", 0.0, address
    )
    state_dir.mkdir(exist_ok=True)
    lab_state.write(state_dir, dead)
    taken_down: list[tuple[str, str]] = []

    def take_down(address: str, run_id: str) -> None:
        taken_down.append((address, run_id))

    assert control.stop_running(timeout_s=1, say=ignore, take_down=take_down) == dead
    assert taken_down == ([(address, run_id)] if address else [])
    assert_nothing_left(run_id, state_dir)


@pytest.mark.parametrize("is_port_taken", [True, False])
def test_a_start_does_not_forget_what_may_run_on_a_cluster_whoever_has_its_port(
    is_port_taken: bool, port: int, state_dir: Path
) -> None:
    state_dir.mkdir(exist_ok=True)
    dead = LabState(
        os.getpid(), 0, "before", "c", "u", "127.0.0.1", (port,), None, LabPhase.READY, "", 0.0, "auto"
    )
    lab_state.write(state_dir, dead)
    with socket.socket() as anybody:
        if is_port_taken:
            anybody.bind(("127.0.0.1", port))
            anybody.listen()
        with pytest.raises(
            SweepError, match="may still run on the Ray cluster at auto; `tandem down` looks there"
        ):
            clear_stale(state_dir, ignore)
    assert lab_state.read(state_dir) == dead


def test_down_removes_the_sockets_of_a_supervisor_that_was_killed(
    run_id: str, port: int, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pytest's path is too long for a socket
    left = Path(f"ray/session_2026_{os.getpid()}/sockets/plasma_store")
    left.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(left))
    state_dir.mkdir(exist_ok=True)
    dead = LabState(
        os.getpid(), 0, run_id, "c", "u", "127.0.0.1", (port,), None, LabPhase.READY, "", 0.0, None, (".",)
    )
    lab_state.write(state_dir, dead)
    assert control.stop_running(timeout_s=1, say=ignore) == dead
    assert not left.exists()


def test_down_without_a_lab_finds_nothing() -> None:
    assert control.stop_running(timeout_s=1, say=ignore) is None


def test_a_failed_start_tells_why_and_leaves_nothing(run_id: str, port: int, state_dir: Path) -> None:
    with pytest.raises(StartFailedError, match=r"exit code 1.*\n(.*\n)*.*lane batched: no such model"):
        control.detach(
            command("fails", run_id, port),
            run_id=run_id,
            log_path=lab_state.log_path(state_dir),
            timeout_s=60,
            say=ignore,
        )
    assert_nothing_left(run_id, state_dir)


@pytest.mark.parametrize("address", [None, "127.0.0.1:6379"])
def test_a_port_that_stays_taken_is_a_fault_where_the_lab_had_the_machine_to_itself(
    run_id: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    monkeypatch.setattr(cleanup, "PORT_LIMIT_S", 0)
    state = LabState(
        1, 2, run_id, "c", "u", "127.0.0.1", (port,), None, LabPhase.STOPPING, "", 0.0, address=address
    )
    said: list[str] = []
    with socket.create_server(("127.0.0.1", port)):
        if address is None:
            with pytest.raises(SweepError, match=f"port {port} is in use"):
                clean_up(tmp_path, state, said.append)
        else:
            clean_up(tmp_path, state, said.append)
            assert f"port {port} is in use still: Ray Serve on the cluster at {address}" in said[-1]


def test_ctrl_c_while_detaching_stops_the_half_started_lab(run_id: str, port: int, state_dir: Path) -> None:
    def interrupt(text: str) -> None:
        if text == "hanging":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        control.detach(
            command("hangs", run_id, port),
            run_id=run_id,
            log_path=lab_state.log_path(state_dir),
            timeout_s=60,
            say=interrupt,
        )
    assert_nothing_left(run_id, state_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_mid_start_stops_it(
    number: signal.Signals, run_id: str, port: int, state_dir: Path
) -> None:
    # Under `nohup` hang-ups are ignored, and a child would be born so.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        supervisor = Supervisor("hangs", run_id, port)
    finally:
        signal.signal(signal.SIGHUP, before)
    supervisor.wait_for("hanging")
    supervisor.process.send_signal(number)
    assert supervisor.end() == 130
    assert_nothing_left(run_id, state_dir)


@pytest.mark.parametrize(
    ("mode", "cue"), [("loses_a_signal", "losing a signal"), ("replaces_handler", "handler replaced")]
)
def test_a_signal_that_ray_takes_still_stops_it(
    mode: str, cue: str, run_id: str, port: int, state_dir: Path
) -> None:
    supervisor = Supervisor(mode, run_id, port)
    supervisor.wait_for(cue)
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.end() == 130
    assert_nothing_left(run_id, state_dir)


def test_ctrl_c_when_ready_is_a_clean_end(run_id: str, port: int, state_dir: Path) -> None:
    supervisor = Supervisor("ready", run_id, port)
    supervisor.wait_for("`tandem down` stops it")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.end() == 0
    assert supervisor.lines[-1] == "stopped"
    assert_nothing_left(run_id, state_dir)


def segment_of(supervisor: Supervisor) -> Path:
    (line,) = [line for line in supervisor.lines if line.startswith("segment ")]
    segment = SHM_DIR / line.removeprefix("segment ")
    assert segment.exists()
    return segment


def kill_all_of(run_id: str) -> None:
    for process in processes_of(run_id):
        with suppress(psutil.NoSuchProcess):  # some end when another does
            process.kill()
            process.wait()


def test_shared_memory_is_gone_after_a_clean_stop(run_id: str, port: int, state_dir: Path) -> None:
    supervisor = Supervisor("leaves_memory", run_id, port)
    supervisor.wait_for("`tandem down` stops it")
    segment = segment_of(supervisor)
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.end() == 0
    assert not segment.exists()
    assert_nothing_left(run_id, state_dir)


@pytest.mark.parametrize("supervisor_dies", [False, True])
def test_shared_memory_of_processes_that_died_before_the_stop_is_removed(
    supervisor_dies: bool, run_id: str, port: int, state_dir: Path
) -> None:
    supervisor = Supervisor("leaves_memory", run_id, port)
    supervisor.wait_for("`tandem down` stops it")
    segment = segment_of(supervisor)
    give_up_at_s = time.monotonic() + 60
    while segment.name not in {one.name for one in recorded(state_dir, run_id)}:
        assert time.monotonic() < give_up_at_s, "it was never recorded"
    if supervisor_dies:
        supervisor.process.kill()
        supervisor.end()
        kill_all_of(run_id)
    else:
        for child in psutil.Process(supervisor.process.pid).children():
            child.kill()
    assert segment.exists()
    assert control.stop_running(timeout_s=30, say=ignore) is not None
    assert not segment.exists()
    if not supervisor_dies:
        assert supervisor.end() == 0
    assert_nothing_left(run_id, state_dir)


def test_a_second_ctrl_c_hurries_a_stop_that_hangs(run_id: str, port: int, state_dir: Path) -> None:
    supervisor = Supervisor("stuck_in_stop", run_id, port)
    supervisor.wait_for("`tandem down` stops it")
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.wait_for("stuck")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.end() == 0
    assert "stopping: hurried, ending the processes" in supervisor.lines
    assert_nothing_left(run_id, state_dir)


def test_a_hurried_stop_does_not_forget_what_may_run_on_a_cluster(
    run_id: str, port: int, state_dir: Path
) -> None:
    supervisor = Supervisor("stuck_in_stop", run_id, port, 60, "10.0.0.1:6379")
    supervisor.wait_for("`tandem down` stops it")
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.wait_for("stuck")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.end() == 0
    assert "the lab may still run on the Ray cluster at 10.0.0.1:6379: `tandem down`" in supervisor.lines[-1]
    assert processes_of(run_id) == []
    taken_down: list[str] = []

    def take_down(address: str, run_id: str) -> None:
        taken_down.append(run_id)

    assert control.stop_running(timeout_s=30, say=ignore, take_down=take_down) is not None
    assert taken_down == [run_id]
    assert_nothing_left(run_id, state_dir)


def test_a_start_over_its_limit_fails_with_the_setting(run_id: str, port: int, state_dir: Path) -> None:
    supervisor = Supervisor("hangs", run_id, port, timeout_s=1)
    assert supervisor.end() == 1
    assert "error: not ready within 1 s (--timeout-s); last progress: hanging" in supervisor.lines
    assert_nothing_left(run_id, state_dir)


def test_a_second_lab_is_refused_and_the_first_lives(run_id: str, port: int, state_dir: Path) -> None:
    first = Supervisor("ready", run_id, port)
    first.wait_for("`tandem down` stops it")
    second = Supervisor("ready", run_id, port)
    assert second.end() == 4
    assert second.lines == [
        f"error: a lab is ready already (pid {first.process.pid}, http://127.0.0.1:{port}, "
        f"{CHECKOUT / 'lab.yaml'}); `tandem down` stops it"
    ]
    assert first.process.poll() is None
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0


def test_a_killed_supervisor_is_seen_and_down_sweeps(run_id: str, port: int, state_dir: Path) -> None:
    supervisor = Supervisor("ready", run_id, port)
    supervisor.wait_for("`tandem down` stops it")
    supervisor.process.kill()
    supervisor.end()
    assert control.look()["state"] == "died"
    assert len(processes_of(run_id)) == 1
    said: list[str] = []
    assert control.stop_running(timeout_s=30, say=said.append) is not None
    assert said[0] == f"the supervisor (pid {supervisor.process.pid}) died; sweeping up what it left"
    assert_nothing_left(run_id, state_dir)


def test_the_next_start_cleans_up_after_a_killed_supervisor(run_id: str, port: int, state_dir: Path) -> None:
    dead = Supervisor("ready", run_id, port)
    dead.wait_for("`tandem down` stops it")
    dead.process.kill()
    dead.end()
    next_id = uuid.uuid4().hex
    alive = Supervisor("ready", next_id, port)
    alive.wait_for("`tandem down` stops it")
    assert alive.lines[0] == f"cleaning up after a lab whose supervisor (pid {dead.process.pid}) died"
    assert processes_of(run_id) == []
    alive.process.send_signal(signal.SIGTERM)
    assert alive.end() == 0
    assert_nothing_left(next_id, state_dir)


def test_a_port_in_use_is_refused_by_setting_and_address(run_id: str, state_dir: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        supervisor = Supervisor("ready", run_id, port)
        assert supervisor.end() == 1
    assert (
        f"error: gateway.port = {port}: cannot listen on 127.0.0.1: Address already in use"
        in (supervisor.lines[0])
    )
    assert_nothing_left(run_id, state_dir)


def test_a_lab_that_should_answer_and_does_not_is_unreachable(run_id: str, port: int) -> None:
    supervisor = Supervisor("ready", run_id, port)
    supervisor.wait_for("`tandem down` stops it")
    found = control.look()
    supervisor.process.send_signal(signal.SIGTERM)
    supervisor.end()
    assert found["state"] == "unreachable"
    assert f"http://127.0.0.1:{port} does not answer" in found["progress"]


def test_the_sweep_ends_its_own_run_and_nothing_else(run_id: str) -> None:
    ours, stubborn = start_marked(SLEEPER, run_id), start_marked(STUBBORN, run_id)
    others = [start_marked(SLEEPER, run_id + "0"), start_marked(SLEEPER, None)]
    try:
        ended = sweep(run_id, grace_s=0.2)
        assert sorted(int(name.split("(")[1].rstrip(")")) for name in ended) == sorted(
            [ours.pid, stubborn.pid]
        )
        assert processes_of(run_id) == []
        assert [other.poll() for other in others] == [None, None]
    finally:
        for process in (ours, stubborn, *others):
            process.kill()
            process.wait()


def test_the_sweep_of_an_unknown_run_ends_nothing() -> None:
    assert sweep(uuid.uuid4().hex) == []


def test_a_process_is_known_by_pid_and_start(state_dir: Path) -> None:
    ticks = lab_state.process_start_ticks(os.getpid())
    assert ticks is not None
    state = LabState(os.getpid(), ticks, "r", "c", "u", "h", (1,), None, LabPhase.READY, "", 0.0)
    assert state.is_alive
    impostor = LabState(os.getpid(), ticks - 1, "r", "c", "u", "h", (1,), None, LabPhase.READY, "", 0.0)
    assert not impostor.is_alive


def test_start_ticks_of_a_command_with_brackets_and_of_the_dead(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 ("
    shutil.copy(shutil.which("sleep") or "sleep", odd)
    process = subprocess.Popen([odd, "600"])
    clock_ticks_per_s = os.sysconf("SC_CLK_TCK")
    try:
        ticks = lab_state.process_start_ticks(process.pid)
        assert ticks is not None
        expected_s = psutil.Process(process.pid).create_time() - psutil.boot_time()
        assert ticks / clock_ticks_per_s == pytest.approx(expected_s, abs=1.5)
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert lab_state.process_start_ticks(process.pid) is None  # a zombie still
    process.wait()
    assert lab_state.process_start_ticks(process.pid) is None


def test_state_survives_the_file(state_dir: Path) -> None:
    state_dir.mkdir()
    state = LabState(1, 2, "r", "/lab.yaml", "http://h:1", "h", (1, 2), None, LabPhase.STOPPING, "text", 3.5)
    lab_state.write(state_dir, state)
    assert lab_state.read(state_dir) == state
    assert [path.name for path in state_dir.iterdir()] == ["lab.json"]


@pytest.mark.parametrize("text", ["{", "{}", '{"phase": "x"}', "[]"])
def test_a_damaged_state_file_is_named(text: str, state_dir: Path) -> None:
    state_dir.mkdir()
    (state_dir / "lab.json").write_text(text)
    with pytest.raises(TandemError, match=r"lab\.json: damaged state file"):
        lab_state.read(state_dir)


def test_the_lock_is_free_after_its_holder(state_dir: Path) -> None:
    with (
        lab_state.locked(state_dir),
        pytest.raises(AlreadyRunningError, match="being started"),
        lab_state.locked(state_dir),
    ):
        pass
    with lab_state.locked(state_dir):
        pass


def test_where_the_state_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_STATE", "/a")
    monkeypatch.setenv("XDG_STATE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert lab_state.state_dir() == Path("/a")
    monkeypatch.delenv("TANDEM_STATE")
    assert lab_state.state_dir() == Path("/b/tandem")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert lab_state.state_dir() == Path("/c/.local/state/tandem")
