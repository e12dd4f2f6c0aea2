"""What a gateway remembers of its requests: those that run, and the last ones that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.tracing.events import RequestSpan

KEEP_SPANS = 16_384  # about 10 MB


class SpanLog:
    """Bounded: when it is full the oldest ended request is forgotten.

    Args:
        gateway_id: what spans name as their gateway.
    """

    def __init__(self, gateway_id: str = "", capacity: int = KEEP_SPANS) -> None:
        self.gateway_id = gateway_id
        self._ended: deque[RequestSpan] = deque(maxlen=capacity)
        self._running: dict[int, Callable[[], RequestSpan]] = {}
        self._forgotten_until_ns = 0

    @contextmanager
    def running(self, span: Callable[[], RequestSpan]) -> Iterator[None]:
        """A request runs during the block; `span` says how it stands, and at the end of the block how it ended."""
        self._running[id(span)] = span
        try:
            yield
        finally:
            del self._running[id(span)]
            self._end(span())

    def _end(self, span: RequestSpan) -> None:
        if len(self._ended) == self._ended.maxlen:
            self._forgotten_until_ns = self._ended[0].ended_ns or 0
        self._ended.append(span)

    def since(self, instant_ns: int) -> tuple[list[RequestSpan], bool]:
        """Requests that ran at some time since then, by arrival; False when some of them are forgotten."""
        spans = [span for span in self._ended if (span.ended_ns or 0) >= instant_ns]
        spans += [span() for span in self._running.values()]
        return sorted(spans, key=lambda span: span.arrived_ns), self._forgotten_until_ns < instant_ns
