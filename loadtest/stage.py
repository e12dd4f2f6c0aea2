"""One stage while it runs: hands out its prompts, sends them, collects what came of them."""

from __future__ import annotations

from collections.abc import Callable

from gevent.event import Event

from loadtest.load import ClosedLoop
from loadtest.plan import Plan, StagePlan
from loadtest.record import ClientReason, RequestLabel, RequestRecord
from loadtest.sse_client import ClientSettings, StreamingClient
from loadtest.workload import load_workload

Clock = Callable[[], float]


class Stage:
    """A stage and its users.

    Attributes:
        done: set when every user has left.
        num_finished: requests that have a record.
        stop_reason: why it ends early, if it does.
    """

    def __init__(
        self,
        plan: Plan,
        stage: StagePlan,
        run_id: str,
        clock: Clock,
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self.plan = stage
        self.done = Event()
        self.num_finished = 0
        self.stop_reason: ClientReason | None = None
        self._run = plan
        self._run_id = run_id
        self._settings = ClientSettings(plan.base_url, plan.connect_timeout_s, plan.idle_timeout_s)
        self._clock = clock
        self._on_record = on_record
        assert isinstance(stage.load, ClosedLoop)
        self._users = stage.load.users
        self._clients: list[StreamingClient] = []
        self._num_left = 0

    def run_user(self) -> None:
        """Send one user's share: every `users`-th request, one after another."""
        client = StreamingClient(self._settings, self._clock)
        first = len(self._clients)
        self._clients.append(client)
        try:
            for offset in range(first, self.plan.requests, self._users):
                if self.stop_reason is not None:
                    break
                self._on_record(self._send(client, self.plan.first_prompt + offset))
                self.num_finished += 1
        finally:
            client.close()
            self._num_left += 1
            if self._num_left == self._users:
                self.done.set()

    def warm_up(self) -> None:
        """Send one request that no figure counts, so that the first stage does not pay for a cold engine."""
        client = StreamingClient(self._settings, self._clock)
        self._clients.append(client)
        try:
            # A prompt of its own: the stages must not find theirs in a cache.
            unused = max(stage.first_prompt + stage.requests for stage in self._run.stages)
            self._on_record(self._send(client, unused, is_warmup=True))
        finally:
            client.close()
            self._clients.remove(client)

    def stop(self, reason: ClientReason) -> None:
        """End the requests in flight and send no more."""
        self.stop_reason = reason
        for client in self._clients:
            client.cancel(reason)

    def _send(self, client: StreamingClient, number: int, is_warmup: bool = False) -> RequestRecord:
        stage = self.plan
        kind = "warmup" if is_warmup else f"{stage.workload}-{stage.load.label}-{number}".replace(" ", "-")
        label = RequestLabel(
            request_id=f"{self._run_id}-{stage.lane}-{kind}",
            lane=stage.lane,
            workload=stage.workload,
            stage="warmup" if is_warmup else stage.key,
            number=number,
            is_warmup=is_warmup,
        )
        body = load_workload(stage.workload).body(
            model=f"{self._run.model}:{stage.lane}",
            seed=self._run.seed,
            number=number,
            output_tokens=self._run.output_tokens,
        )
        return client.send(label, body, scheduled_at_s=self._clock())
