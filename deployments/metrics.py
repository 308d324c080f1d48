"""The metrics of an ingress: what it counts itself, and what the pools' replicas say at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client import Metric as Family

from deployments.cache_metrics import CacheCollector
from deployments.extra_fields import UNSUPPORTED, ExtraFields
from deployments.request_fields import REQUEST_ID_HEADER
from deployments.telemetry import catalogue as of
from deployments.telemetry.catalogue import Metric
from deployments.telemetry.gen_ai import GenAiMetrics
from deployments.telemetry.pool_metrics import PoolCollector
from turnout.calls import GenerateCall, PoolStats, Usage
from turnout.config import PoolConfig
from turnout.cost import ModelMeter, SpeculationMeter
from turnout.errors import TurnoutError
from turnout.registry import names
from turnout.telemetry_config import SloConfig
from turnout.types import RouteLimits, SamplingParams

DEFAULT_SLO = SloConfig()
CALLER_DEADLINE = "CALLER_DEADLINE"  # an outcome that any caller can bring about: no fault of ours
OTHER = "other"
DEEPEST = 15  # depths of drafts that are counted apart
MOST_DRAFTING = 32  # tenants whose drafts are
MOST_DRAFTS = 128  # of their drafters in a method, all tenants together: each has some forty series, by depth
DRAFTERS = frozenset({*names("decoding.drafters"), "none"})
SEVERAL, OWN = "several", "own"
INGRESS_STATES = ("reading", "running", "refused", "recording")
BATCH_STATES = ("waiting", "running", "done", "failed")
KINDS = ("prompt", "cached", "catchup", "decode", "draft", "generated", "discarded")
# First parts of the names of fields that a refusal may blame; what a caller made up is none of them.
FIELDS = frozenset(
    {
        *SamplingParams.model_fields, *RouteLimits.model_fields, *GenerateCall.__dataclass_fields__,
        *ExtraFields.model_fields, *UNSUPPORTED, REQUEST_ID_HEADER, "x-turnout-priority",
        "access", "authorization", "body", "message", "completions", "decoding", "tenant",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """When parts of an answer reached the ingress, in seconds since the request's arrival.

    Attributes:
        first_token_s: the first token.
        whole_s: the last one.
        answers: how many were written side by side.
    """

    first_token_s: float
    whole_s: float
    answers: int = 1

    def token_s(self, usage: Usage) -> float | None:
        """Return the time per token after the first, in seconds; None: there was none."""
        tokens = usage.completion_tokens / self.answers
        return (usage.wall_s - usage.ttft_s) / (tokens - 1) if tokens > 1 else None


class Metrics:
    """The metrics of one ingress process, in a registry of their own.

    Args:
        slo: what a good request keeps.
        pools: as configured.

    Attributes:
        gen_ai: what OpenTelemetry's conventions ask for.
        known_tenant: whether a tenant has time series of its own; all others share one. Series of drafts are of the
            first tenants that drafted and of what they drafted with first, so that thousands of tenants, or a few who
            try everything, do not make as many thousands of them.
    """

    def __init__(self, slo: SloConfig = DEFAULT_SLO, pools: Mapping[str, PoolConfig] | None = None) -> None:
        self._registry, self._of_pools = CollectorRegistry(), CollectorRegistry()
        self._slo = slo
        self._caches, self._pools = CacheCollector(), PoolCollector(pools or {})
        for collector in (self._caches, self._pools):
            self._of_pools.register(collector)
        self.gen_ai = GenAiMetrics(self._registry)
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}
        self._histograms: dict[Metric, Histogram] = {}
        # Looking a series up by its labels takes the library longer than counting in it.
        self._counted: dict[tuple[Metric, tuple[str, ...]], Counter] = {}
        self._observed: dict[tuple[Metric, str], Histogram] = {}
        self._drafting: set[str] = set()  # tenants whose drafts are counted apart
        self._drafts: set[tuple[str, str, str]] = set()  # and by which methods and drafters
        for metric in of.COUNTED:
            self._make(metric)
        self.batch_lines(dict.fromkeys(BATCH_STATES, 0))
        self.ingress(dict.fromkeys(INGRESS_STATES, 0), 0)
        self.access_faults(0)
        self.known_tenant: Callable[[str], bool] = lambda name: name == "default"

    def _make(self, metric: Metric) -> None:
        described = (metric.name, metric.meaning, metric.labels)
        if metric.kind == "counter":
            self._counters[metric] = Counter(*described, registry=self._registry)
        elif metric.kind == "gauge":
            self._gauges[metric] = Gauge(*described, registry=self._registry)
        else:
            self._histograms[metric] = Histogram(*described, buckets=metric.buckets, registry=self._registry)

    def _add(self, metric: Metric, amount: float, *labels: str) -> None:
        if amount:
            self._counter(metric, *labels).inc(amount)

    def _counter(self, metric: Metric, *labels: str) -> Counter:
        found = self._counted.get((metric, labels))
        if found is None:
            found = self._counted[metric, labels] = self._counters[metric].labels(*labels)
        return found

    def _histogram(self, metric: Metric, model: str) -> Histogram:
        found = self._observed.get((metric, model))
        if found is None:
            found = self._observed[metric, model] = self._histograms[metric].labels(model)
        return found

    def finished(self, model: str, outcome: str, tenant: str = "default") -> None:
        """Count a request; `model` must be a known name, so that clients cannot make up time series."""
        self._add(of.REQUESTS, 1, model, outcome)
        self._add(of.TENANT_REQUESTS, 1, self._tenant(tenant), outcome)

    def refused(self, error: TurnoutError) -> None:
        """Count a refusal, by what was at fault."""
        field = (error.field or "").partition(".")[0]
        self._add(of.REFUSALS, 1, error.code.value, field if field in FIELDS else OTHER)

    def refused_early(self, error: TurnoutError, tenant: str = OTHER) -> None:
        """Count a request that was refused before anybody knew what it asks for, or even whose it is."""
        self.finished("", error.code.value, tenant)
        self.refused(error)

    def used(self, model: str, tenant: str, usage: Usage, times: Times | None = None, large: str = "") -> None:
        """Count the tokens, the times and the cost of an answer.

        Args:
            model: what the request asked for; a known name.
            tenant: whose it was.
            usage: what it took.
            times: as the ingress saw it; absent: as the pool did.
            large: the pool's large model.
        """
        tenant = self._tenant(tenant)
        times = times or Times(usage.queue_s + usage.ttft_s, usage.queue_s + usage.wall_s)
        self._observe(model, usage, times)
        for name, meter in usage.models.items():
            self._count_model(name, usage.method, meter)
        self._add(of.PROMPT, usage.prompt_tokens, model)
        self._add(of.CACHED, usage.cached_tokens, model)
        self._add(of.COMPLETION, usage.completion_tokens, model, usage.method)
        if large in usage.models:
            self._add(of.LARGE, usage.models[large].written_tokens, model, usage.method)
        self._add(of.SWITCHES, usage.switches, model, usage.method)
        for kind, tokens in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ):
            self._add(of.TENANT_TOKENS, tokens, tenant, kind)
        self._count_cost(model, usage)
        if usage.speculation.rounds:
            drafter = drafter_of(usage.params)
            tenant = self._drafting_as(usage.method, drafter, tenant)
            self._count_drafts((usage.method, drafter, tenant), usage.speculation)
        # Only artifacts that exist have a reading, so clients cannot make up series here either.
        for drift in (usage.drift, *usage.router_drift):
            if drift is not None:
                self._gauges[of.DRIFT].labels(model, drift.calibration).set(drift.index)
                self._gauges[of.DRIFT_LIMIT].labels(model, drift.calibration).set(drift.limit)

    def cut_short(self, model: str, tenant: str, read: int, written: Mapping[str, int], large: str = "") -> None:
        """Count the tokens of an answer that was cut off; its method and cost are unknown.

        Args:
            model: what the request asked for; a known name.
            tenant: whose it was.
            read: tokens of its prompt.
            written: tokens that were sent, by the model that wrote them.
            large: the pool's large model.
        """
        tenant, sent = self._tenant(tenant), sum(written.values())
        self._add(of.PROMPT, read, model)
        self._add(of.COMPLETION, sent, model, "")
        self._add(of.LARGE, written.get(large, 0), model, "")
        for name, tokens in written.items():
            self._add(of.GENERATED, tokens, name)
        for kind, tokens in (("prompt", read), ("completion", sent)):
            self._add(of.TENANT_TOKENS, tokens, tenant, kind)

    def _observe(self, model: str, usage: Usage, times: Times) -> None:
        """Times, and whether they keep the goals."""
        self._histogram(of.REQUEST_S, model).observe(times.whole_s)
        self._histogram(of.QUEUE_S, model).observe(usage.queue_s)
        self._histogram(of.TTFT_S, model).observe(times.first_token_s)
        tpot_s = times.token_s(usage)
        if tpot_s is not None:
            self._histogram(of.TPOT_S, model).observe(tpot_s)
        missed = {"ttft": times.first_token_s > self._slo.ttft_s, "tpot": (tpot_s or 0.0) > self._slo.tpot_s}
        for goal, miss in missed.items():
            self._counter(of.MISSED, model, goal).inc(miss)
        self._counter(of.GOOD, model).inc(not any(missed.values()))

    def _count_model(self, name: str, method: str, meter: ModelMeter) -> None:
        self._counter(of.GENERATED, name).inc(meter.generated_tokens)
        self._add(of.FORWARDS, meter.forwards, name, method)
        for kind in KINDS:
            self._add(of.WORK, getattr(meter, f"{kind}_tokens"), name, method, kind)

    def _count_cost(self, model: str, usage: Usage) -> None:
        for way, cost in (("spent", usage.cost.spent), ("large_only", usage.cost.large_only)):
            self._add(of.PAPER, cost.paper * usage.completion_tokens, model, way)
            self._add(of.FLOPS, cost.flops, model, way)
            self._add(of.WALL_S, cost.wall_s, model, way)
            self._add(of.USD, cost.usd, model, way)
        for name, meter in usage.models.items():
            self._add(of.MODEL_USD, meter.usd, name)

    def _count_drafts(self, whose: tuple[str, str, str], drafts: SpeculationMeter) -> None:
        """Under these labels: method, drafter, tenant."""
        # Also where nothing was: a share needs both of its parts.
        self._counter(of.DRAFTED, *whose).inc(drafts.draft_tokens)
        self._counter(of.ACCEPTED, *whose).inc(drafts.accepted_tokens)
        self._counter(of.ROUNDS, *whose).inc(drafts.rounds)
        self._counter(of.DRAFT_S, *whose).inc(drafts.draft_s)
        self._counter(of.EMITTED, *whose).inc(drafts.emitted_tokens)
        self._counter(of.VERIFY_S, *whose).inc(drafts.verify_s)
        for metric, counts in ((of.REACHED, drafts.drafted_at), (of.KEPT, drafts.accepted_at)):
            for depth, count in enumerate(counts[:DEEPEST]):
                self._add(metric, count, *whose, str(depth))
            self._add(metric, sum(counts[DEEPEST:]), *whose, f"{DEEPEST}+")

    def batch_lines(self, counts: Mapping[str, int]) -> None:
        """How many lines of batches there are, by state: one of BATCH_STATES."""
        for state, count in counts.items():
            self._gauges[of.BATCH_LINES].labels(state).set(count)

    def ingress(self, held: Mapping[str, int], tasks: int) -> None:
        """What the ingress holds of requests, by one of INGRESS_STATES, and how many tasks its event loop has."""
        for state, count in held.items():
            self._gauges[of.INGRESS].labels(state).set(count)
        self._gauges[of.INGRESS_TASKS].set(tasks)

    def access_faults(self, number: int) -> None:
        """How many files of `access`, or tenants in them, are not used as they are now."""
        self._gauges[of.ACCESS_FAULTS].set(number)

    def stores(self, pools: Mapping[str, Iterable[PoolStats]]) -> None:
        """Take over what the replicas of each pool that answered say of themselves and of their prefix stores."""
        pools = {name: list(stats) for name, stats in pools.items()}
        self._caches.update(pools)
        self._pools.update(pools)

    def counted(self) -> list[Family]:
        """What this process counts itself."""
        return list(self._registry.collect())

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry) + self.render_pools()

    def render_pools(self) -> bytes:
        """What the pools said of themselves, in the same format."""
        return generate_latest(self._of_pools)

    def _tenant(self, name: str) -> str:
        return name if self.known_tenant(name) else OTHER

    def _drafting_as(self, method: str, drafter: str, tenant: str) -> str:
        """Under whose name a tenant's drafts are counted."""
        if tenant == OTHER or (method, drafter, tenant) in self._drafts:
            return tenant
        known = tenant in self._drafting
        if len(self._drafts) == MOST_DRAFTS or (not known and len(self._drafting) == MOST_DRAFTING):
            return OTHER
        self._drafting.add(tenant)
        self._drafts.add((method, drafter, tenant))
        return tenant


def drafter_of(params: Mapping[str, Any]) -> str:
    """Who drafted for an answer: one of `DRAFTERS`, `SEVERAL`, `OWN` or `OTHER`, whatever the parameters say.

    Args:
        params: of its method, as `Usage` tells them.
    """
    # Methods that speculate within, and those around any other.
    for inside in ("speculate", "inner"):
        if isinstance(params.get(inside), Mapping):
            return drafter_of(params[inside])
    given = params.get("drafter")
    if isinstance(given, list | tuple):
        return SEVERAL
    name = given.get("name") if isinstance(given, Mapping) else given
    if name is None:
        return OWN
    return name if isinstance(name, str) and name in DRAFTERS else OTHER
