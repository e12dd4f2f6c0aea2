"""Every metric Tandem exports: name, kind, unit, labels, buckets, help. The only list.

Metrics are registered from it (`serving.metrics.registry`), and docs/metrics.md is checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# 1 ms to 5 h, near-even on a log scale; usual SLO edges (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10 s) are edges.
# A quantile ends at the last edge, so that is the longest that a config lets a first token take.
LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1_200.0, 3_600.0, 7_200.0, 18_000.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric. `exporter` is the kind of process it comes from."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # `s`, `bytes`, a range, or what is counted
    exporter: Literal["gateway", "scheduler", "replica", "load"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


REQUESTS = Metric(
    "tandem_requests_total", "counter", "requests", "gateway", ("lane", "outcome", "reason"),
    "Requests ended, by lane (empty when none was chosen), outcome and reason (empty when completed).",
)  # fmt: skip
TTFT = Metric(
    "tandem_ttft_seconds", "histogram", "s", "gateway", ("lane",),
    "Arrival at the gateway to the first chunk with text, streams only.", LATENCY_BUCKETS_S,
)  # fmt: skip
TPOT = Metric(
    "tandem_tpot_seconds", "histogram", "s", "gateway", ("lane",),
    "(E2E - TTFT) / (output tokens - 1), by choice; completed streams of two tokens or more.", LATENCY_BUCKETS_S,
)  # fmt: skip
INTER_CHUNK = Metric(
    "tandem_inter_chunk_seconds", "histogram", "s", "gateway", ("lane",),
    "Gap between two consecutive chunks with text of one choice of a stream.", LATENCY_BUCKETS_S,
)  # fmt: skip
E2E = Metric(
    "tandem_e2e_latency_seconds", "histogram", "s", "gateway", ("lane",),
    "Arrival at the gateway to the last byte, completed requests.", LATENCY_BUCKETS_S,
)  # fmt: skip
SLO_REQUESTS = Metric(
    "tandem_slo_requests_total", "counter", "requests", "gateway", ("lane", "result"),
    "Streams judged by the config's `slo`, by lane (else the pinned one, else `any`), as met or missed.",
)  # fmt: skip
SLO_LIMIT = Metric(
    "tandem_slo_limit_seconds", "gauge", "s", "gateway", ("figure",),
    "The config's limits, `slo.ttft_s` and `slo.tpot_s`.",
)  # fmt: skip
SLO_OBJECTIVE = Metric(
    "tandem_slo_objective_ratio", "gauge", "0 to 1", "gateway", (),
    "The config's `slo.objective`: the share of judged streams that should meet the limits.",
)  # fmt: skip
TENANT_REQUESTS = Metric(
    "tandem_tenant_requests_total", "counter", "requests", "gateway", ("tenant", "outcome"),
    "Requests ended, by tenant and outcome.",
)  # fmt: skip
TENANT_OUTPUT_TOKENS = Metric(
    "tandem_tenant_output_tokens_total", "counter", "tokens", "gateway", ("tenant",),
    "Output tokens of completed requests, by tenant.",
)  # fmt: skip
QUEUE_WAIT = Metric(
    "tandem_queue_wait_seconds", "histogram", "s", "scheduler", ("lane", "band"),
    "Arrival at the scheduler to the grant of a lease.", LATENCY_BUCKETS_S,
)  # fmt: skip
PROMPT_TOKENS = Metric(
    "tandem_prompt_tokens_total", "counter", "tokens", "gateway", ("lane",),
    "Prompt tokens of completed requests, as the engine's usage counts them.",
)  # fmt: skip
OUTPUT_TOKENS = Metric(
    "tandem_output_tokens_total", "counter", "tokens", "gateway", ("lane",),
    "Output tokens of completed requests, as the engine's usage counts them.",
)  # fmt: skip
TENANT_QUEUE_WAIT = Metric(
    "tandem_tenant_queue_wait_seconds", "histogram", "s", "scheduler", ("tenant",),
    "Arrival at the scheduler to the grant of a lease, by tenant.", LATENCY_BUCKETS_S,
)  # fmt: skip
REFUSALS = Metric(
    "tandem_refusals_total", "counter", "requests", "scheduler", ("lane", "reason"),
    "Requests refused by the scheduler, by lane (`any` when none was pinned) and reason.",
)  # fmt: skip
LEASE_ERRORS = Metric(
    "tandem_lease_errors_total", "counter", "errors", "scheduler", (),
    "Releases of leases that were not held; anything but 0 is a fault.",
)  # fmt: skip
WAITING = Metric(
    "tandem_waiting_requests", "gauge", "requests", "scheduler", ("lane",),
    "Requests waiting in the scheduler; lane `any` waits for the scheduler's choice.",
)  # fmt: skip
WAITING_BY_BAND = Metric(
    "tandem_waiting_by_band_requests", "gauge", "requests", "scheduler", ("band",),
    "Requests waiting in the scheduler, by priority band.",
)  # fmt: skip
WAITING_BY_TENANT = Metric(
    "tandem_waiting_by_tenant_requests", "gauge", "requests", "scheduler", ("tenant",),
    "Requests waiting in the scheduler, by tenant; a tenant that has waited once stays, at 0.",
)  # fmt: skip
WAITING_LIMIT = Metric(
    "tandem_waiting_limit_requests", "gauge", "requests", "scheduler", (),
    "The config's `scheduler.max_waiting_requests`.",
)  # fmt: skip
BREAKER = Metric(
    "tandem_breaker_state", "gauge", "0, 1 or 2", "scheduler", ("lane", "replica"),
    "A replica's breaker: 0 closed, 1 half open (one probe), 2 open (no requests).",
)  # fmt: skip
REROUTES = Metric(
    "tandem_reroutes_total", "counter", "requests", "gateway", ("lane", "outcome"),
    "Requests sent to a second replica because the first broke before its first byte, by how that ended.",
)  # fmt: skip
RUNNING = Metric(
    "tandem_running_requests", "gauge", "requests", "scheduler", ("lane", "replica"),
    "Live leases on a replica.",
)  # fmt: skip
RUNNING_LIMIT = Metric(
    "tandem_running_limit_requests", "gauge", "requests", "scheduler", ("lane", "replica"),
    "Leases that the replica may have at once: `max_num_seqs` + `dispatch_margin`.",
)  # fmt: skip
OUTSTANDING_TOKENS = Metric(
    "tandem_outstanding_tokens", "gauge", "tokens", "scheduler", ("lane", "replica"),
    "Tokens reserved by the live leases on a replica: prompt estimate + maximum output.",
)  # fmt: skip
REPLICA_READY = Metric(
    "tandem_replica_ready", "gauge", "0 or 1", "scheduler", ("lane", "replica"),
    "1 while the scheduler may place requests on the replica.",
)  # fmt: skip
WANTED_REPLICAS = Metric(
    "tandem_wanted_replicas", "gauge", "replicas", "scheduler", ("lane",),
    "Replicas that the config asks for; under autoscaling the fewest.",
)  # fmt: skip
PLACEMENT_CHOICES = Metric(
    "tandem_placement_choices_total", "counter", "requests", "scheduler", ("lane", "kind", "why"),
    "Requests placed by `adaptive`, by lane, kind of text and why: `score`, `kept` (hysteresis) or `only_choice`.",
)  # fmt: skip
PLACEMENT_CORRECTION = Metric(
    "tandem_placement_correction", "gauge", "ratio", "scheduler", ("lane", "batch"),
    "What a lane gives over what its profile says, as `adaptive` reckons it with about `batch` sequences.",
)  # fmt: skip
PREDICTED_ACCEPTED_TOKENS = Metric(
    "tandem_predicted_accepted_tokens_total", "counter", "tokens", "scheduler", ("lane", "kind"),
    "Draft tokens that finished streams were expected to have accepted, as expected when they were placed.",
)  # fmt: skip
OBSERVED_ACCEPTED_TOKENS = Metric(
    "tandem_observed_accepted_tokens_total", "counter", "tokens", "scheduler", ("lane", "kind"),
    "Draft tokens that the same streams had accepted, by their chunks and output tokens.",
)  # fmt: skip
RELIABILITY_REQUESTS = Metric(
    "tandem_reliability_requests_total", "counter", "requests", "scheduler", ("lane", "bin"),
    "Finished streams, by lane and the tenth that their predicted acceptance was in: `bin` is its lower edge.",
)  # fmt: skip
RELIABILITY_DRAFT_TOKENS = Metric(
    "tandem_reliability_draft_tokens_total", "counter", "tokens", "scheduler", ("lane", "bin"),
    "Draft positions of those streams: k for each step after the first.",
)  # fmt: skip
RELIABILITY_ACCEPTED_TOKENS = Metric(
    "tandem_reliability_accepted_tokens_total", "counter", "tokens", "scheduler", ("lane", "bin"),
    "Accepted draft tokens of those streams; over their draft positions it is the observed acceptance.",
)  # fmt: skip
MACHINE_FLOPS = Metric(
    "tandem_machine_flops_per_second", "gauge", "FLOP/s", "scheduler", (),
    "The machine's matrix rate, in FLOP/s, once measured by `python -m serving.ceilings`; absent before.",
)  # fmt: skip
MACHINE_COPY = Metric(
    "tandem_machine_copy_bytes_per_second", "gauge", "bytes/s", "scheduler", (),
    "The machine's copy bandwidth, reads and writes counted, once measured; absent before.",
)  # fmt: skip
ENGINE_RUNNING = Metric(
    "tandem_engine_running_requests", "gauge", "requests", "replica", ("lane", "replica"),
    "Requests the engine is computing now, by the engine's own count.",
)  # fmt: skip
ENGINE_WAITING = Metric(
    "tandem_engine_waiting_requests", "gauge", "requests", "replica", ("lane", "replica"),
    "Requests waiting inside the engine, by the engine's own count.",
)  # fmt: skip
ENGINE_STEPS = Metric(
    "tandem_engine_steps_total", "counter", "steps", "replica", ("lane", "replica"),
    "Engine steps that followed another without a pause.",
)  # fmt: skip
ENGINE_BUSY = Metric(
    "tandem_engine_busy_seconds_total", "counter", "s", "replica", ("lane", "replica"),
    "Time taken by those steps, each from the end of the one before.",
)  # fmt: skip
REPLICA_MEMORY = Metric(
    "tandem_replica_memory_bytes", "gauge", "bytes", "replica", ("lane", "replica"),
    "Proportional set size of the replica's processes, engine included, in host memory.",
)  # fmt: skip

LOAD_RUN_ACTIVE = Metric(
    "tandem_load_run_active", "gauge", "0 or 1", "load", (),
    "1 from the start of a load run to its end.",
)  # fmt: skip
LOAD_USERS = Metric(
    "tandem_load_users", "gauge", "users", "load", ("lane", "workload"),
    "Users of a closed loop, or requests in flight of an open one.",
)  # fmt: skip
LOAD_DUE = Metric(
    "tandem_load_due_requests_total", "counter", "requests", "load", ("lane", "workload"),
    "Requests that were due, whether or not they could be sent.",
)  # fmt: skip
LOAD_SENT = Metric(
    "tandem_load_sent_requests_total", "counter", "requests", "load", ("lane", "workload"),
    "Requests that the load tool began to send.",
)  # fmt: skip
LOAD_REQUESTS = Metric(
    "tandem_load_requests_total", "counter", "requests", "load", ("lane", "workload", "outcome"),
    "Requests ended, as the client saw them.",
)  # fmt: skip
LOAD_TTFT = Metric(
    "tandem_load_ttft_seconds", "histogram", "s", "load", ("lane", "workload"),
    "Scheduled instant to the first chunk with text, at the client.", LATENCY_BUCKETS_S,
)  # fmt: skip
LOAD_TPOT = Metric(
    "tandem_load_tpot_seconds", "histogram", "s", "load", ("lane", "workload"),
    "(E2E - TTFT) / (output tokens - 1), by choice, at the client.", LATENCY_BUCKETS_S,
)  # fmt: skip
LOAD_E2E = Metric(
    "tandem_load_e2e_latency_seconds", "histogram", "s", "load", ("lane", "workload"),
    "Scheduled instant to the last byte, at the client.", LATENCY_BUCKETS_S,
)  # fmt: skip
LOAD_OUTPUT_TOKENS = Metric(
    "tandem_load_output_tokens_total", "counter", "tokens", "load", ("lane", "workload"),
    "Output tokens of completed requests, as the client was told.",
)  # fmt: skip

METRICS: tuple[Metric, ...] = tuple(each for each in list(globals().values()) if isinstance(each, Metric))

# Counters of vLLM that Tandem reads; checked against the running engine by the end-to-end tests.
VLLM_NUM_DRAFTS = "vllm:spec_decode_num_drafts_total"
VLLM_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
VLLM_ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
VLLM_PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
VLLM_PREFIX_HITS = "vllm:prefix_cache_hits_total"
VLLM_RUNNING = "vllm:num_requests_running"
VLLM_WAITING = "vllm:num_requests_waiting"
VLLM_ACCEPTED_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
VLLM_GENERATED_TOKENS = "vllm:generation_tokens_total"
VLLM_KV_USAGE = "vllm:kv_cache_usage_perc"  # 0 to 1, whatever its name says
VLLM_PREEMPTIONS = "vllm:num_preemptions_total"
VLLM_STEP_TOKENS = "vllm:iteration_tokens_total"  # a histogram, whatever its name says
VLLM_FLOPS = "vllm:estimated_flops_per_gpu_total"
VLLM_READ_BYTES = "vllm:estimated_read_bytes_per_gpu_total"
VLLM_WRITE_BYTES = "vllm:estimated_write_bytes_per_gpu_total"
