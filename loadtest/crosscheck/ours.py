"""Our client on a Poisson schedule, in a process of its own.

`python -m loadtest.crosscheck.ours URL RATE REQUESTS TOKENS SEED` prints a record per request, as JSON.
"""

# ruff: noqa: E402  (gevent patches what the modules below import)
from gevent import monkey

monkey.patch_all()

import random
import sys
import time

import gevent

from loadtest.client.record import RequestLabel, RequestRecord, to_row
from loadtest.client.sse_client import ClientSettings, StreamingClient

PROMPT = "Tell a story of a lighthouse keeper, in plain words. " * 6
LEAD_S = 0.5  # so that the first request is not late because of this process's own start


def send(url: str, idle: list[StreamingClient], number: int, due_at_s: float, tokens: int) -> RequestRecord:
    """One request when it is due, on an idle connection if there is one."""
    gevent.sleep(max(0.0, due_at_s - time.monotonic()))
    body = {
        "model": "simulated",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    label = RequestLabel(f"crosscheck-{number}", "simulated", "crosscheck", "crosscheck", number)
    client = idle.pop() if idle else StreamingClient(ClientSettings(url), time.monotonic)
    record = client.send(label, body, due_at_s)
    idle.append(client)
    return record


def main(url: str, rate_per_s: float, requests: int, tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    due_at_s = time.monotonic() + LEAD_S
    sent, idle = [], list[StreamingClient]()
    for number in range(requests):
        sent.append(gevent.spawn(send, url, idle, number, due_at_s, tokens))
        due_at_s += rng.expovariate(rate_per_s)
    gevent.joinall(sent, raise_error=True)
    sys.stdout.writelines(to_row(sending.value) + "\n" for sending in sent)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
