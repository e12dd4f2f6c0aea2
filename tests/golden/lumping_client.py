"""A client that is wrong on purpose: it reads blocks of 1,024 bytes, as line readers of HTTP libraries do."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from loadtest.client.record import RequestLabel, RequestRecord
from loadtest.client.sse_client import ClientSettings
from serving.core.request import Outcome
from serving.core.sse import EventSplitter, parse_event

BLOCK_BYTES = 1024


class LumpingClient:
    """The interface of `StreamingClient`, for whole and successful streams only."""

    def __init__(self, settings: ClientSettings, clock: Callable[[], float]) -> None:
        parts = urlsplit(settings.base_url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        self._clock = clock

    def send(self, label: RequestLabel, body: dict[str, Any], scheduled_at_s: float) -> RequestRecord:
        headers = {"content-type": "application/json", "x-request-id": label.request_id}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
        response = self._connection.getresponse()
        splitter = EventSplitter()
        chunk_at_s, so_far, finished_at_s = [], [0], scheduled_at_s
        prompt_tokens = None
        while data := response.read(BLOCK_BYTES):  # blocks until the block is full
            now_s = self._clock()
            for event in map(parse_event, splitter.feed(data)):
                if event.has_text and event.output_tokens is not None:
                    chunk_at_s.append(now_s)
                    so_far.append(event.output_tokens)
                    prompt_tokens = event.prompt_tokens
                if event.is_done:
                    finished_at_s = now_s
        return RequestRecord(
            label=label,
            outcome=Outcome.COMPLETED,
            scheduled_at_s=scheduled_at_s,
            finished_at_s=finished_at_s,
            chunk_at_s=tuple(chunk_at_s),
            chunk_tokens=tuple(b - a for a, b in pairwise(so_far)),
            prompt_tokens=prompt_tokens,
            output_tokens=so_far[-1],
        )

    def close(self) -> None:
        self._connection.close()
