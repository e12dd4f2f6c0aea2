"""What the simulated engine exports under vLLM's names, for dashboards, rules and tests that read those.

It follows the simulated steps. Preemptions and estimated work stay 0: nothing is preempted, nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.metrics import names

HELP = "Simulated."
STEP_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class SimulatedMetrics:
    """Counters of one engine.

    Args:
        kv_capacity_tokens: tokens that the imaginary KV cache holds.
        num_speculative_tokens: drafts of a step, 0 for an engine that does not speculate.
    """

    def __init__(self, kv_capacity_tokens: int, num_speculative_tokens: int) -> None:
        self.registry = CollectorRegistry()
        self._kv_capacity_tokens = kv_capacity_tokens
        self._num_drafts = num_speculative_tokens
        self._running = self._gauge(names.VLLM_RUNNING)
        self._waiting = self._gauge(names.VLLM_WAITING)
        self._kv_usage = self._gauge(names.VLLM_KV_USAGE)
        self._generated = self._counter(names.VLLM_GENERATED_TOKENS)
        self._prefix_queries = self._counter(names.VLLM_PREFIX_QUERIES)
        for name in (
            names.VLLM_PREFIX_HITS,
            names.VLLM_PREEMPTIONS,
            names.VLLM_FLOPS,
            names.VLLM_READ_BYTES,
            names.VLLM_WRITE_BYTES,
        ):
            self._counter(name)
        self._step_tokens = Histogram(
            names.VLLM_STEP_TOKENS, HELP, buckets=STEP_TOKENS_BUCKETS, registry=self.registry
        )
        self._drafts, self._draft_tokens, self._accepted = (
            self._counter(name)
            for name in (names.VLLM_NUM_DRAFTS, names.VLLM_DRAFT_TOKENS, names.VLLM_ACCEPTED_TOKENS)
        )
        by_position = self._counter(names.VLLM_ACCEPTED_BY_POSITION, ["position"])
        self._accepted_at = [by_position.labels(position=str(k)) for k in range(num_speculative_tokens)]

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, HELP, registry=self.registry)

    def _counter(self, name: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name.removesuffix("_total"), HELP, labels, registry=self.registry)

    def load(self, running: int, waiting: int, held_tokens: int) -> None:
        """Requests in the batch and outside it, and the tokens that the running ones hold."""
        self._running.set(running)
        self._waiting.set(waiting)
        self._kv_usage.set(held_tokens / self._kv_capacity_tokens)

    def started(self, prompt_tokens: int) -> None:
        """A request joined the batch; its prompt was looked up in a cache that holds nothing."""
        self._prefix_queries.inc(prompt_tokens)

    def stepped(self, batch: int, tokens: int) -> None:
        """A step over `batch` requests emitted `tokens`; what it computed includes rejected drafts."""
        self._generated.inc(tokens)
        self._step_tokens.observe(batch * (1 + self._num_drafts))

    def verified(self, accepted: int) -> None:
        """A step verified one request's drafts and kept the first `accepted`."""
        self._drafts.inc()
        self._draft_tokens.inc(self._num_drafts)
        self._accepted.inc(accepted)
        for counter in self._accepted_at[:accepted]:
            counter.inc()
