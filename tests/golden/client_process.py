"""The client under test in a process of its own, since gevent patches the interpreter it runs in.

`python -m tests.golden.client_process URL STREAMS REQUESTS TOKENS CHOICES READER` prints a record per request, as
JSON; TOKENS are of each choice.
Instants are on CLOCK_MONOTONIC, as the server's stamps are.
"""

# ruff: noqa: E402  (gevent patches what the modules below import)
from gevent import monkey

monkey.patch_all()

import sys
import time
from typing import Any

import gevent

from loadtest.client.record import RequestLabel, RequestRecord, to_row
from loadtest.client.sse_client import ClientSettings, StreamingClient
from tests.golden.lumping_client import LumpingClient

READERS = {"ours": StreamingClient, "lumping": LumpingClient}


def body(tokens: int, choices: int) -> dict[str, Any]:
    return {
        "model": "simulated",
        "messages": [{"role": "user", "content": "one two three"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": tokens,
        "n": choices,
    }


def run_stream(
    url: str, stream: int, requests: int, tokens: int, choices: int, reader: str
) -> list[RequestRecord]:
    """Requests one after another on one connection."""
    client = READERS[reader](ClientSettings(url), time.monotonic)
    records = []
    for number in range(requests):
        label = RequestLabel(f"{reader}-{stream}-{number}", "simulated", "golden", "golden", number)
        records.append(client.send(label, body(tokens, choices), time.monotonic()))
    client.close()
    return records


def main(url: str, streams: str, requests: str, tokens: str, choices: str, reader: str) -> None:
    running = [
        gevent.spawn(run_stream, url, stream, int(requests), int(tokens), int(choices), reader)
        for stream in range(int(streams))
    ]
    gevent.joinall(running, raise_error=True)
    for one in running:
        for record in one.value:
            sys.stdout.write(to_row(record) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
