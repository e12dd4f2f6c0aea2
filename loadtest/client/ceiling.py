"""The most this client can do, against a server that does nothing but send."""

from __future__ import annotations

import time
from collections.abc import Sequence

import gevent
from gevent import monkey

from loadtest.client import noop_server
from loadtest.client.health import ClientCeiling
from loadtest.client.record import ClientReason, RequestLabel, RequestRecord
from loadtest.client.sse_client import ClientSettings, StreamingClient

# With fewer streams the no-op server could not send fast enough without putting tokens together.
MIN_STREAMS = 50
# Well within what a process can read, so that each token is read by itself.
EASY_TOKENS_PER_S = 8_000.0
ENDLESS_TOKENS = 1_000_000_000
SETTLE_S = 0.3

_LABEL = RequestLabel("ceiling", "noop", "ceiling", "ceiling", 0)


def measure_ceiling(streams: int, duration_s: float = 1.5) -> ClientCeiling:
    """What this process reads and requests at most, in about `duration_s` + 1 s.

    What it reads at most is reckoned from the processor time of a token at an easy rate. A flood would measure
    something else: tokens that pile up are read many at a time, which costs a fraction of one by one.

    Raises:
        RuntimeError: the sockets are not gevent's, or the no-op server could not be used.
    """
    if not monkey.is_module_patched("socket"):
        raise RuntimeError("measure_ceiling needs gevent's sockets: import locust first")
    streams = max(streams, MIN_STREAMS)
    server, url = noop_server.start(EASY_TOKENS_PER_S / streams)
    try:
        clients = [StreamingClient(ClientSettings(url)) for _ in range(streams)]
        tokens_per_s = _read_rate(clients, duration_s * 2 / 3)
        clients = [StreamingClient(ClientSettings(url)) for _ in range(streams)]
        requests_per_s = _request_rate(clients, duration_s / 3)
    finally:
        noop_server.stop(server)
    return ClientCeiling(streams=streams, tokens_per_s=tokens_per_s, requests_per_s=requests_per_s)


def _read_rate(clients: Sequence[StreamingClient], duration_s: float) -> float:
    """Tokens read by themselves, of endless streams / processor time that took."""
    streams = [gevent.spawn(ask_noop, client, ENDLESS_TOKENS) for client in clients]
    gevent.sleep(SETTLE_S)
    from_s, from_cpu_s = time.perf_counter(), time.process_time()
    gevent.sleep(duration_s)
    until_s, until_cpu_s = time.perf_counter(), time.process_time()
    records = _cancel(clients, streams)
    receives = sum(
        len({at_s for at_s in record.chunk_at_s if from_s <= at_s < until_s}) for record in records
    )
    if receives == 0:
        raise RuntimeError(f"the client's ceiling cannot be measured: no token came within {duration_s:g} s")
    return receives / (until_cpu_s - from_cpu_s)


def _request_rate(clients: Sequence[StreamingClient], duration_s: float) -> float:
    """Answers of one token per second."""
    from_s = time.perf_counter()
    until_s = from_s + duration_s

    def ask_on(client: StreamingClient) -> RequestRecord:
        num_done[client] = 0
        while (record := ask_noop(client, 1)).is_completed and record.finished_at_s < until_s:
            num_done[client] += 1
        return record

    num_done: dict[StreamingClient, int] = {}
    streams = [gevent.spawn(ask_on, client) for client in clients]
    gevent.sleep(duration_s)
    _cancel(clients, streams)
    return sum(num_done.values()) / duration_s


def ask_noop(client: StreamingClient, output_tokens: int, due_at_s: float | None = None) -> RequestRecord:
    """One answer of this length, with the options that a load run uses."""
    body = {
        "model": "noop",
        "messages": [{"role": "user", "content": "Go."}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": output_tokens,
    }
    return client.send(_LABEL, body, time.perf_counter() if due_at_s is None else due_at_s)


def _cancel(
    clients: Sequence[StreamingClient], streams: Sequence[gevent.Greenlet[[], RequestRecord]]
) -> list[RequestRecord]:
    """End all streams; what they gave.

    Raises:
        RuntimeError: one of them had ended by a fault.
    """
    for client in clients:
        client.cancel(ClientReason.INTERRUPTED)
    records = [stream.get() for stream in streams]
    for client in clients:
        client.close()
    for record in records:
        if not record.is_completed and record.reason != ClientReason.INTERRUPTED:
            raise RuntimeError(f"the client's ceiling cannot be measured: {record.reason}: {record.error}")
    return records
