"""For Prometheus: requests by outcome, tokens by model, TTFT and TPOT, drift of entropies, prefix stores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deployments.cache_metrics import CacheCollector
from turnout.calls import PoolStats, Usage

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The metrics of one ingress process, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._caches = CacheCollector()
        self._registry.register(self._caches)
        self._requests = Counter(
            "turnout_requests", "Finished requests.", ("model", "outcome"), registry=self._registry
        )
        self._tokens = Counter(
            "turnout_generated_tokens",
            "Tokens written, by the model that wrote them.",
            ("model",),
            registry=self._registry,
        )
        self._ttft = Histogram(
            "turnout_ttft_seconds", "Time to first token.", ("model",), buckets=TTFT_BUCKETS_S, registry=self._registry
        )
        self._tpot = Histogram(
            "turnout_tpot_seconds",
            "Time per output token.",
            ("model",),
            buckets=TPOT_BUCKETS_S,
            registry=self._registry,
        )

        labels = ("method", "tenant")
        self._drafted = Counter("turnout_draft_tokens", "Tokens proposed by drafters.", labels, registry=self._registry)
        self._accepted = Counter(
            "turnout_accepted_draft_tokens", "Proposed tokens that were accepted.", labels, registry=self._registry
        )
        self._rounds = Counter("turnout_draft_rounds", "Verifications of drafts.", labels, registry=self._registry)
        self._draft_s = Counter("turnout_draft_seconds", "Time spent drafting.", labels, registry=self._registry)

        labels = ("model", "calibration")
        self._drift = Gauge(
            "turnout_entropy_drift",
            "Population stability index of the last answers' entropies against those calibrated on.",
            labels,
            registry=self._registry,
        )
        self._drift_limit = Gauge(
            "turnout_entropy_drift_limit", "Index beyond which to calibrate again.", labels, registry=self._registry
        )

    def finished(self, model: str, outcome: str) -> None:
        """Count a request; `model` must be a known name, so that clients cannot make up time series."""
        self._requests.labels(model, outcome).inc()

    def used(self, model: str, tenant: str, usage: Usage) -> None:
        """Count the tokens and the times of an answer; `tenant` must be a known one."""
        for name, meter in usage.models.items():
            self._tokens.labels(name).inc(meter.generated_tokens)
        self._ttft.labels(model).observe(usage.ttft_s)
        if usage.completion_tokens > 1:
            self._tpot.labels(model).observe((usage.wall_s - usage.ttft_s) / (usage.completion_tokens - 1))

        drafts = usage.speculation
        if drafts.rounds:
            self._drafted.labels(usage.method, tenant).inc(drafts.draft_tokens)
            self._accepted.labels(usage.method, tenant).inc(drafts.accepted_tokens)
            self._rounds.labels(usage.method, tenant).inc(drafts.rounds)
            self._draft_s.labels(usage.method, tenant).inc(drafts.draft_s)

        # Only calibrations that exist have a reading, so clients cannot make up series here either.
        if usage.drift is not None:
            self._drift.labels(model, usage.drift.calibration).set(usage.drift.index)
            self._drift_limit.labels(model, usage.drift.calibration).set(usage.drift.limit)

    def stores(self, pools: Mapping[str, Iterable[PoolStats]]) -> None:
        """Take over what the replicas of each pool say of their prefix stores."""
        self._caches.update(pools)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
