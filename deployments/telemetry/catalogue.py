"""Every metric by name, with its unit and labels: what is counted, and what the documentation says of it.

Labels have few values: models, pools, methods, codes and fields that exist, depths up to a bound, tenants of
the tenants file; of drafts, a limited number of tenants. No caller can make up a time series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deployments.cache_metrics import KINDS, TOTALS

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric, equal to itself only. A counter's name is exposed with `_total` behind it.

    Attributes:
        name: with its unit at the end.
        kind: counter, gauge or histogram.
        meaning: one sentence.
        labels: their names, in order.
        buckets: of a histogram, their upper ends.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name as Prometheus shows it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"turnout_{name}", "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"turnout_{name}", "gauge", meaning, labels)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"turnout_{name}", "histogram", meaning, labels, buckets)


# Counted by the ingress, as requests end. `model` is what the request asked for, unless it says otherwise.
REQUESTS = _counter(
    "requests",
    "Finished generations, scores and embeddings, refused ones too. CALLER_DEADLINE: past a deadline that the caller"
    " set.",
    "model",
    "outcome",
)
REFUSALS = _counter(
    "refusals", "Requests refused, by code and by the field at fault; other: none of ours, or none.", "code", "field"
)
REQUEST_S = _histogram("request_seconds", "Time of a whole answer, from its arrival.", REQUEST_BUCKETS_S, "model")
QUEUE_S = _histogram("queue_seconds", "Time a request waited for a place in its pool.", QUEUE_BUCKETS_S, "model")
TTFT_S = _histogram("ttft_seconds", "Time to first token, from the request's arrival.", TTFT_BUCKETS_S, "model")
TPOT_S = _histogram("tpot_seconds", "Time per output token after the first.", TPOT_BUCKETS_S, "model")
GOOD = _counter("good_requests", "Answers within all of `telemetry.slo`; their rate is the goodput.", "model")
MISSED = _counter("slo_missed", "Answers that missed a goal, by which: ttft, tpot.", "model", "slo")
GENERATED = _counter("generated_tokens", "Tokens written, by the model that wrote them.", "model")
WORK = _counter(
    "model_tokens",
    "Tokens by what a model did with them: prompt, cached, catchup, decode, draft, generated, discarded.",
    "model", "method", "kind",
)  # fmt: skip
FORWARDS = _counter("forwards", "Forward passes that a request took part in, by the model that ran.", "model", "method")
PROMPT = _counter("prompt_tokens", "Tokens of prompts.", "model")
CACHED = _counter("cached_tokens", "Tokens of prompts found in a cache.", "model")
COMPLETION = _counter(
    "completion_tokens",
    "Tokens of answers; of those that were cut short what was sent, with no method, where `access` is configured.",
    "model",
    "method",
)
LARGE = _counter("large_tokens", "Tokens that the pool's large model wrote, dropped ones included.", "model", "method")
SWITCHES = _counter("switches", "Changes from one model to another within an answer.", "model", "method")
DRAFTS = ("method", "drafter", "tenant")
DRAFTED = _counter(
    "draft_tokens",
    "Tokens proposed; drafter: a part's name, several, or own where the method has its own.",
    *DRAFTS,
)
ACCEPTED = _counter("accepted_draft_tokens", "Proposed tokens that were accepted.", *DRAFTS)
EMITTED = _counter("draft_round_tokens", "Tokens that verifications gave, their own included.", *DRAFTS)
ROUNDS = _counter("draft_rounds", "Verifications of drafts.", *DRAFTS)
DRAFT_S = _counter("draft_seconds", "Time spent drafting.", *DRAFTS)
VERIFY_S = _counter("verify_seconds", "Time spent verifying.", *DRAFTS)
REACHED = _counter("draft_depth_rounds", "Verifications of drafts that reached so deep.", *DRAFTS, "depth")
KEPT = _counter("accepted_depth_rounds", "Verifications that accepted so deep.", *DRAFTS, "depth")
PAPER = _counter(
    "cost_paper_tokens",
    "The paper's cost: tokens written, kept or not, as tokens of the large model; way: spent, large_only.",
    "model", "way",
)  # fmt: skip
FLOPS = _counter("cost_flops", "2 x parameters x tokens processed; way: spent, large_only.", "model", "way")
USD = _counter(
    "cost_usd", "Tokens by the configured prices of their models, US dollars; way: spent, large_only.", "model", "way"
)
MODEL_USD = _counter("model_usd", "The same of one model's tokens, by the model that read and wrote them.", "model")
WALL_S = _counter("cost_wall_seconds", "Time of answering; way: spent, large_only (an estimate).", "model", "way")
DRIFT = _gauge(
    "drift",
    "Population stability index of what the thresholds of a calibration or a router were compared with of late.",
    "model", "artifact",
)  # fmt: skip
DRIFT_LIMIT = _gauge("drift_limit", "Index beyond which to calibrate, or train the router, again.", "model", "artifact")
TENANT_REQUESTS = _counter(
    "tenant_requests", "Finished requests of a tenant of the tenants file; all others: other.", "tenant", "outcome"
)
TENANT_TOKENS = _counter("tenant_tokens", "Its tokens; kind: prompt, cached, completion.", "tenant", "kind")
BATCH_LINES = _gauge(
    "batch_lines", "Lines of the batches that are worked on; state: waiting, running, done, failed.", "state"
)
INGRESS = _gauge(
    "ingress_requests",
    "What the ingress holds: bodies it reads, requests that run, refusals it answers late, records it has to write; "
    "state: reading, running, refused, recording. Without limits and records none are counted.",
    "state",
)
INGRESS_TASKS = _gauge("ingress_tasks", "Tasks of the ingress' event loop; few while there are no requests.")
ACCESS_FAULTS = _gauge(
    "access_faults",
    "Files of tenants and of keys, tenants in them, and addresses of keys, that are not used as they are now.",
)

COUNTED = (
    REQUESTS, REFUSALS, REQUEST_S, QUEUE_S, TTFT_S, TPOT_S, GOOD, MISSED, GENERATED, WORK, FORWARDS, PROMPT, CACHED,
    COMPLETION, LARGE, SWITCHES, DRAFTED, ACCEPTED, EMITTED, ROUNDS, DRAFT_S, VERIFY_S, REACHED, KEPT, PAPER, FLOPS,
    USD, MODEL_USD, WALL_S, DRIFT, DRIFT_LIMIT, TENANT_REQUESTS, TENANT_TOKENS, BATCH_LINES, INGRESS, INGRESS_TASKS,
    ACCESS_FAULTS,
)  # fmt: skip

# Read from the replicas of each pool at each scrape.
POOL_UP = _gauge("pool_up", "1 where the pool answered when it was last asked.", "pool")
REPLICAS = _gauge("pool_replicas", "Replicas that answered.", "pool")
LEAST_REPLICAS = _gauge("pool_min_replicas", "Fewest replicas there are to be.", "pool")
MOST_REPLICAS = _gauge("pool_max_replicas", "Most replicas there may be.", "pool")
REPLICA_STARTS = _counter("replica_starts", "Replica processes that have come since the ingress began.", "pool")
RUNNING = _gauge("pool_requests", "Requests in progress, waiting ones included.", "pool")
BATCH_RUNNING = _gauge("pool_batch_requests", "Requests of batch priority in progress.", "pool")
WAITING = _gauge("pool_waiting_operations", "Operations that wait for a forward pass.", "pool")
WAITING_S = _gauge("pool_waiting_seconds", "Time these will take the models, by forecast.", "pool")
TOKEN_RATE = _gauge("pool_tokens_per_second", "Tokens written in the last full window of 5 s.", "pool")
KV_BLOCKS = _gauge("kv_blocks", "Blocks of a model's cache; state: used, cached, free.", "pool", "model", "state")
SEQUENCES = _gauge("model_sequences", "Sequences that hold cache.", "pool", "model")
WAITING_TOKENS = _gauge("model_waiting_tokens", "Tokens that waiting operations still have to feed.", "pool", "model")
STEP_S = _gauge("model_step_seconds", "Recent time of one decode step, of the slowest replica.", "pool", "model")
RESTARTS = _counter("model_restarts", "Restarts of the model's actor.", "pool", "model")
SHADOWS = _gauge("shadows", "Shadows of routing that wait or run.", "pool")
SHADOWS_DROPPED = _counter("shadows_dropped", "Shadows that were not finished.", "pool")
LOG_DROPPED = _counter("route_log_dropped", "Entries that the route log lost: too many at once, or no disk.", "pool")
ENDPOINT_REQUESTS = _counter(
    "endpoint_requests",
    "Requests to an endpoint that have ended; outcome: ok, refused (4xx), limited (429), failed, cancelled.",
    "pool", "model", "outcome",
)  # fmt: skip
ENDPOINT_RETRIES = _counter("endpoint_retries", "Those of them that were made again.", "pool", "model")
ENDPOINT_S = _counter("endpoint_seconds", "Time of all of them.", "pool", "model")
ENDPOINT_FIRST_S = _counter(
    "endpoint_first_event_seconds", "Time of those that answered to the first event.", "pool", "model"
)
ENDPOINT_OPENED = _counter("endpoint_breaker_opened", "Times that an endpoint was left alone.", "pool", "model")
ENDPOINT_BREAKER = _gauge(
    "endpoint_breaker", "Replicas whose breaker of an endpoint is closed, half_open or open.", "pool", "model", "state"
)
ENDPOINT_RUNNING = _gauge("endpoint_running", "Requests that are at an endpoint.", "pool", "model")
ENDPOINT_WAITING = _gauge("endpoint_waiting", "Requests that wait until others have ended there.", "pool", "model")
AUDITS = _counter("audits", "Audited answers; result: equal, tie, mismatch, dropped, failed.", "pool", "result")
AUDIT_TOKENS = _counter("audit_tokens", "Tokens that audits looked at.", "pool")

READ = (
    POOL_UP, REPLICAS, LEAST_REPLICAS, MOST_REPLICAS, REPLICA_STARTS, RUNNING, BATCH_RUNNING, WAITING, WAITING_S,
    TOKEN_RATE, KV_BLOCKS, SEQUENCES, WAITING_TOKENS, STEP_S, RESTARTS, SHADOWS, SHADOWS_DROPPED, LOG_DROPPED, AUDITS,
    AUDIT_TOKENS, ENDPOINT_REQUESTS, ENDPOINT_RETRIES, ENDPOINT_S, ENDPOINT_FIRST_S, ENDPOINT_OPENED, ENDPOINT_BREAKER,
    ENDPOINT_RUNNING, ENDPOINT_WAITING,
)  # fmt: skip

# Of pools with a prefix store.
STORES = (
    *(_counter(f"cache_{name}", text, "pool") for name, text, _ in TOTALS),
    *(_counter(f"cache_{name}", text, "pool", label) for name, text, label, _ in KINDS),
    _gauge("cache_memory_bytes", "Held in the replicas' memory.", "pool"),
    _gauge("cache_degraded", "Replicas that cannot reach all of Redis.", "pool"),
)

ALL: tuple[Metric, ...] = (*COUNTED, *READ, *STORES)

# By OpenTelemetry's conventions for generative AI, as its exporter names them for Prometheus.
GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
GEN_AI_REQUEST_S = Metric(
    "gen_ai_server_request_duration_seconds", "histogram", "Time of a request, from its arrival to its end.",
    (*GEN_AI_LABELS, "error_type"),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)  # fmt: skip
GEN_AI_TTFT_S = Metric(
    "gen_ai_server_time_to_first_token_seconds", "histogram", "Time to first token of an answer.", GEN_AI_LABELS,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)  # fmt: skip
GEN_AI_TPOT_S = Metric(
    "gen_ai_server_time_per_output_token_seconds", "histogram", "Time per output token after the first.", GEN_AI_LABELS,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)  # fmt: skip
GEN_AI_TOKENS = Metric(
    "gen_ai_client_token_usage", "histogram", "Tokens of a request; type: input, output.",
    (*GEN_AI_LABELS, "gen_ai_token_type"), tuple(float(4**power) for power in range(14)),
)  # fmt: skip
GEN_AI = (GEN_AI_REQUEST_S, GEN_AI_TTFT_S, GEN_AI_TPOT_S, GEN_AI_TOKENS)

# Read by the endpoint picker of the Gateway API's inference extension; the label `model_name` is a pool.
QUEUED = Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for a place in the pool.", ("model_name",))
SERVING = Metric("vllm:num_requests_running", "gauge", "Requests that are answered.", ("model_name",))
KV_USAGE = Metric(
    "vllm:kv_cache_usage_perc",
    "gauge",
    "Share of the KV blocks in use, 0 to 1, of the model that has the least room.",
    ("model_name",),
)
CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    "gauge",
    "1; tokens of a KV block, and KV blocks of the model that has fewest.",
    ("model_name", "block_size", "num_gpu_blocks"),
)
GATEWAY = (QUEUED, SERVING, KV_USAGE, CACHE_CONFIG)
CONVENTIONS: tuple[Metric, ...] = (*GEN_AI, *GATEWAY)


def table(metrics: tuple[Metric, ...]) -> str:
    """Return metrics as a table for docs/observability.md."""
    lines = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exposed}` | {metric.kind} | {labels} | {metric.meaning} |")
    return "\n".join(lines) + "\n"
