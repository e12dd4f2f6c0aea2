"""The process that owns a lab, from start to stop.

It holds the lock, writes the state file, starts the deployments and waits. On SIGINT, SIGTERM or SIGHUP, at
any moment, it stops what it started and sweeps up what is left. A second signal cuts the draining short.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from serving.config import LabConfig
from serving.core.addresses import LOOPBACK
from serving.core.errors import StartFailedError
from serving.core.run_mark import RUN_ID_VARIABLE
from serving.environment import temp_dirs
from serving.lab import state as lab_state
from serving.lab.cleanup import GRACE_S, clean_up, clear_stale, pids_of
from serving.lab.shared_memory import Watch
from serving.lab.state import LabPhase, LabState
from serving.machine import port_fault
from serving.progress import Say

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_MARGIN_S = 15.0  # Ray's own shutdown, on top of the drain limit; less than what `tandem down` waits
HURRIED_GRACE_S = 1.0


class StopRequested(KeyboardInterrupt):
    """A stop signal or the start-up limit, raised in the main thread whatever it is doing."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Lab(Protocol):
    """What the supervisor runs; `serving.deployments.RayLab` in production."""

    def start(self, config: LabConfig, *, on_progress: Say) -> None: ...

    def stop(self) -> None: ...


class _StopSignals:
    """Turns stop signals into `StopRequested` while armed, and notes them otherwise."""

    def __init__(self) -> None:
        self._armed = True
        self._before: dict[int, Any] = {}
        self._num_deferred = 0
        # The interpreter writes the number of every signal here, whoever's handler then runs.
        self._arrivals, self._wakeup = socket.socketpair()

    def __enter__(self) -> Self:
        self._arrivals.setblocking(False)
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._arrivals.close()
        self._wakeup.close()

    def install(self) -> None:
        """Set the handlers; again after anything that may have replaced them, as importing Ray does."""
        for number in (*STOP_SIGNALS, signal.SIGALRM):
            # `nohup` has hang-ups ignored: leave that so.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, self._handle)
                self._before.setdefault(number, before)

    def check(self) -> None:
        """Raise `StopRequested` for a stop signal whose exception was lost on its way.

        Python drops what a handler raises inside a finalizer or a C callback, and Ray has plenty of both.
        """
        try:
            arrived = self._arrivals.recv(4096)
        except BlockingIOError:
            return
        for number in arrived:
            if number in STOP_SIGNALS:
                raise StopRequested(number)

    def limit(self, seconds: float) -> None:
        """Raise `StopRequested` after so many seconds; 0 lifts the limit."""
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self) -> None:
        """From here on signals are only noted."""
        self._armed = False
        self.limit(0)

    @contextmanager
    def hurriable(self, limit_s: float) -> Iterator[None]:
        """Inside, one more signal, or the end of the limit, raises `StopRequested`."""
        if self._num_deferred:
            raise StopRequested(signal.SIGINT)
        self._armed = True
        self.limit(limit_s)
        try:
            yield
        finally:
            self.disarm()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            raise StopRequested(number)
        if number != signal.SIGALRM:
            self._num_deferred += 1


class _StateFile:
    """The supervisor's own state, written at each change."""

    def __init__(self, directory: Path, state: LabState) -> None:
        self._directory = directory
        self.state = state

    def update(self, phase: LabPhase, progress: str) -> None:
        if (phase, progress) != (self.state.phase, self.state.progress):
            self.state = replace(self.state, phase=phase, progress=progress)
            lab_state.write(self._directory, self.state)


def gateway_url(config: LabConfig) -> str:
    """Base URL under which a client on this machine reaches the gateway."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(config.gateway.host, config.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def supervise(
    config: LabConfig,
    *,
    config_path: Path,
    run_id: str,
    load_lab: Callable[[], Lab],
    start_timeout_s: float,
    show: Callable[[], AbstractContextManager[Say]],
    announce: Say,
    log_path: Path | None = None,
    address: str | None = None,
) -> None:
    """Run the lab in this process until a stop signal; returns after a clean stop.

    Args:
        run_id: marks every process of the lab, in the environment variable TANDEM_RUN_ID.
        load_lab: gives the lab; called once the lock is held, since importing Ray takes seconds.
        start_timeout_s: the lab must be ready by then.
        show: progress of the start and of the stop.
        announce: receives the lines that stay.
        log_path: where this process's output goes when it is detached.
        address: the Ray cluster that the lab joins.

    Raises:
        AlreadyRunningError: another lab of this user is running.
        StartFailedError: not ready within `start_timeout_s`.
        TandemError: a lane failed, or something outlived the stop.
        KeyboardInterrupt: a stop signal came before the lab was ready; what was started is gone.
    """
    directory = lab_state.state_dir()
    with lab_state.locked(directory):
        clear_stale(directory, announce)
        _need_free_port(config)
        # Before Ray starts, for every process of the lab to inherit. SPT_NOENV keeps process titles from
        # overwriting the environment that the sweep reads.
        os.environ[RUN_ID_VARIABLE] = run_id
        os.environ["SPT_NOENV"] = "1"
        file = _StateFile(directory, _first_state(config, config_path, run_id, log_path, address))
        with Watch(directory, run_id, lambda: pids_of(run_id)) as watch, _StopSignals() as signals:
            lab: Lab | None = None
            try:
                with show() as say:
                    signals.limit(start_timeout_s)

                    def report(text: str) -> None:
                        # `ray.init` sets a SIGTERM handler of its own.
                        signals.install()
                        signals.check()
                        _update(file, say, LabPhase.STARTING, text)

                    report("loading Ray")
                    lab = load_lab()
                    report("loaded Ray")
                    lab.start(config, on_progress=report)
                    signals.install()
                    signals.check()
                    signals.limit(0)
                file.update(LabPhase.READY, "ready")
                announce(f"ready in {file.state.age_s:.0f} s: {file.state.url}")
                announce("Ctrl-C or `tandem down` stops it")
                while True:
                    signal.pause()
            except SystemExit:
                # Ray's SIGTERM handler, while it was in place.
                raise StopRequested(signal.SIGTERM) from None
            except StopRequested as request:
                signals.disarm()
                if request.number == signal.SIGALRM:
                    raise StartFailedError(
                        f"not ready within {start_timeout_s:g} s (--timeout-s); "
                        f"last progress: {file.state.progress}"
                    ) from None
                if file.state.phase is LabPhase.STARTING:
                    raise
            finally:
                signals.disarm()
                with show() as say:
                    limit_s = config.scheduler.drain_timeout_s + STOP_MARGIN_S
                    is_stopped = _stop(lab, file, watch, signals, say, limit_s)
                if is_stopped or address is None:
                    announce("stopped")
                else:
                    announce(
                        f"stopped on this machine; the lab may still run on the Ray cluster at {address}: "
                        "`tandem down` looks there and stops it"
                    )


def _update(file: _StateFile, say: Say, phase: LabPhase, text: str) -> None:
    file.update(phase, text)
    say(text)


def _first_state(
    config: LabConfig, config_path: Path, run_id: str, log_path: Path | None, address: str | None
) -> LabState:
    ticks = lab_state.process_start_ticks(os.getpid())
    assert ticks is not None
    return LabState(
        pid=os.getpid(),
        pid_start_ticks=ticks,
        run_id=run_id,
        config_path=str(config_path.resolve()),
        url=gateway_url(config),
        host=config.gateway.host,
        ports=(config.gateway.port,),
        log_path=str(log_path) if log_path else None,
        phase=LabPhase.STARTING,
        progress="",
        started_at_s=time.time(),
        address=address,
        temp_dirs=tuple(map(str, temp_dirs())) if address is None else (),
    )


def _stop(
    lab: Lab | None, file: _StateFile, watch: Watch, signals: _StopSignals, say: Say, limit_s: float
) -> bool:
    """False: the lab itself was not waited for, or could not be stopped."""
    _update(file, say, LabPhase.STOPPING, "stopping: draining and shutting down")
    grace_s, is_stopped = GRACE_S, False
    watch.look()
    try:
        if lab is not None:
            with signals.hurriable(limit_s):
                lab.stop()
        is_stopped = True
    except StopRequested as request:
        why = f"not done in {limit_s:g} s" if request.number == signal.SIGALRM else "hurried"
        say(f"stopping: {why}, ending the processes")
        grace_s = HURRIED_GRACE_S
    finally:
        watch.end()
        clean_up(lab_state.state_dir(), file.state, say, grace_s, is_stopped=is_stopped)
    return is_stopped


def _need_free_port(config: LabConfig) -> None:
    host, port = config.gateway.host, config.gateway.port
    if fault := port_fault(host, port):
        raise StartFailedError(
            f"gateway.port = {port}: cannot listen on {host}: {fault}; "
            "`ss -ltnp` shows who has a port; set another in the config"
        )
