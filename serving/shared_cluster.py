"""One run's part in a Ray cluster that others use too: whose lab runs there, and whose turn it is to change that.

Serve has one application of a name on a cluster, puts a second in its place, and asks nobody whose it is.
Two things in the cluster's head do:

turn    an actor with a name, of which Ray makes one only. Held while a lab is looked for and deployed, and while
        one is stopped. It ends with the process that made it, however that ends.
record  which run deployed, in the head's key-value store. It outlives the supervisor, so that `tandem down` can
        compare; a lab that is gone may leave it behind, and the next run, in its turn, writes its own over it.

Private names of Ray 2.60: the key-value store's and the controller's. tests/cluster notices a Ray without them.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from serving import ray_environment  # noqa: F401  # isort: skip - must come before Ray

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.exceptions import RayServeException

from serving.core.cluster_record import Record, claimed
from serving.core.errors import TandemError
from serving.core.ray_application import APP_NAME, HEAD_RESOURCE
from serving.progress import Say

RECORD_KEY = b"lab"
TURN_NAME = "turn"
TURN_LIMIT_S = 60.0  # a start has its turn for some seconds, a stop as long as it drains
POLL_S = 0.2


class ClusterError(TandemError):
    """No cluster to join, or one that is another's."""


class SharedCluster:
    """What one run does on the cluster."""

    def __init__(self, address: str, run_id: str) -> None:
        """
        Args:
            address: `auto` or host:port.
            run_id: its mark.
        """
        self._address = address
        self._run_id = run_id
        self._turn: Any = None

    def join(self) -> None:
        """Raises: ClusterError: no cluster there."""
        try:
            ray.init(
                address=self._address, namespace=APP_NAME, logging_level=logging.WARNING, log_to_driver=False
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(f"no Ray cluster to join at {self._address} (--address): {error}") from error

    def claim(self, say: Say) -> None:
        """Before Serve is started: see that no lab is there, and write that the next is this run's.

        The turn lasts until `end_turn`; after a start that failed, until the process has left the cluster.

        Raises:
            ClusterError: another run has its turn, or a lab runs there; Serve would put this one in its place,
                and its clients would lose their answers.
        """
        if not self._take_turn():
            raise ClusterError(
                f"another lab is being started or stopped on the Ray cluster at {self._address} (--address); "
                "try again when that is done"
            )
        if APP_NAME in serve.status().applications:
            raise ClusterError(
                f"a lab runs on the Ray cluster at {self._address} already: `tandem down` stops it where it was "
                "started, `serve shutdown` from anywhere"
            )
        before, serve_now = _read(), _serve_now()
        if before is not None:
            say(f"taking over the Ray cluster at {self._address} from run {before.run_id}, whose lab is gone")
        _write(claimed(self._run_id, before, serve_now))

    def note_serve(self) -> None:
        """After Serve was started, and before the lab is in it: this is the Serve."""
        record = _read()
        assert record is not None
        _write(replace(record, serve=_serve_now()))

    def end_turn(self) -> None:
        """The lab is Serve's: from here on everybody sees it there."""
        ray.kill(self._turn)
        self._turn = None

    def claim_stop(self) -> bool:
        """Take the turn to stop this run's lab; False if it has none, and whatever runs is another's.

        Raises:
            ClusterError: another run has its turn for TURN_LIMIT_S.
        """
        give_up_at_s = time.monotonic() + TURN_LIMIT_S
        while self._record() is not None:
            if self._take_turn():
                record = self._record()
                return record is not None and record.has_lab(_serve_now())
            if time.monotonic() > give_up_at_s:
                raise ClusterError(
                    f"another lab has been starting or stopping on the Ray cluster at {self._address} (--address) "
                    f"for {TURN_LIMIT_S:g} s: nothing was stopped there"
                )
            time.sleep(POLL_S)
        return False

    def take_down(self) -> None:
        """After `claim_stop` said yes: take this run's application out of Serve.

        Raises:
            ClusterError: Serve has not done it after its 60 s.
        """
        try:
            serve.delete(APP_NAME)
        except (RayServeException, ray.exceptions.RayActorError):
            pass  # somebody's `serve shutdown` was faster
        except TimeoutError as error:
            raise ClusterError(f"the lab on the Ray cluster at {self._address}: {error}") from error

    def leave(self) -> None:
        """At last: leave nothing of this run, and touch nothing of another.

        Serve is shut down if labs alone started it and nobody else uses it. Any other Serve stays, however empty:
        it cannot be told to shut down only if it is.
        """
        if (record := self._record()) is not None and self._take_turn():
            if record.owns_serve(_serve_now()) and not serve.status().applications:
                serve.shutdown()
            _internal_kv_del(RECORD_KEY, namespace=APP_NAME)
        ray.shutdown()

    def _record(self) -> Record | None:
        """This run's own."""
        record = _read()
        return record if record is not None and record.run_id == self._run_id else None

    def _take_turn(self) -> bool:
        if self._turn is None:
            options = {"name": TURN_NAME, "num_cpus": 0, "resources": {HEAD_RESOURCE: 0.001}}
            try:
                # The name is taken when this returns; nobody waits for the process.
                self._turn = ray.remote(_Turn).options(**options).remote()
            except ray.exceptions.ActorAlreadyExistsError:
                return False
        return True


class _Turn:
    """Does nothing: what counts is that there is one of its name."""


def _read() -> Record | None:
    text = _internal_kv_get(RECORD_KEY, namespace=APP_NAME)
    return None if text is None else Record.from_json(text)


def _write(record: Record) -> None:
    _internal_kv_put(RECORD_KEY, record.to_json(), namespace=APP_NAME)


def _serve_now() -> str | None:
    """The Serve that runs on the cluster, as its controller's id; None without one."""
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return None
    return str(controller._actor_id.hex())  # noqa: SLF001 - its repr has it too, among other text
