"""What the pools' replicas hold and have done, for Prometheus: read from them at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from deployments.telemetry import catalogue as of
from deployments.telemetry.catalogue import Metric
from deployments.telemetry.monotonic_counters import Growing
from turnout.config import PoolConfig
from turnout.pool_stats import EndpointStats, MemberStats, PoolStats

Values = dict[tuple[str, ...], float]

POOL_GAUGES: tuple[tuple[Metric, Callable[[PoolStats], float]], ...] = (
    (of.RUNNING, lambda stats: stats.requests),
    (of.BATCH_RUNNING, lambda stats: stats.batch_requests),
    (of.WAITING, lambda stats: stats.waiting),
    (of.WAITING_S, lambda stats: stats.waiting_s),
    (of.TOKEN_RATE, lambda stats: stats.tokens_per_second),
    (of.SHADOWS, lambda stats: stats.shadows),
)
MODEL_GAUGES: tuple[tuple[Metric, Callable[[MemberStats], float]], ...] = (
    (of.SEQUENCES, lambda member: member.sequences),
    (of.WAITING_TOKENS, lambda member: member.waiting_tokens),
)
ENDPOINT_GAUGES: tuple[tuple[Metric, Callable[[EndpointStats], float]], ...] = (
    (of.ENDPOINT_RUNNING, lambda endpoint: endpoint.running),
    (of.ENDPOINT_WAITING, lambda endpoint: endpoint.waiting),
)
BREAKERS = ("closed", "half_open", "open")


class PoolCollector(Collector):
    """Holds the last numbers that the replicas gave, and the sums of what they counted.

    What replicas had counted before the ingress began, another one has reported: it is left out, so that a new ingress
    does not look as if all of it had happened just now.

    Args:
        pools: as configured.
    """

    def __init__(self, pools: Mapping[str, PoolConfig]) -> None:
        self._gauges: dict[str, dict[Metric, Values]] = {name: _configured(name, pool) for name, pool in pools.items()}
        self._grown = Growing()
        self._starts: Values = {}

    def update(self, pools: Mapping[str, Iterable[PoolStats]]) -> None:
        """What the replicas of the pools that answered hold; of the others, only that they did not."""
        for name, gauges in self._gauges.items():
            if name not in pools:
                gauges[of.POOL_UP] = {(name,): 0.0}
        for name, stats in pools.items():
            self._take(name, list(stats))

    def _take(self, name: str, stats: list[PoolStats]) -> None:
        gauges = self._gauges.setdefault(name, {})
        gauges[of.POOL_UP] = {(name,): 1.0}
        gauges[of.REPLICAS] = {(name,): float(len(stats))}
        for metric, value in POOL_GAUGES:
            gauges[metric] = {(name,): float(sum(map(value, stats)))}
        self._starts.setdefault((name,), 0.0)
        members = [(name, member) for each in stats for member in each.members]
        for metric, of_member in MODEL_GAUGES:
            gauges[metric] = _summed(((pool, each.model), of_member(each)) for pool, each in members)
        gauges[of.KV_BLOCKS] = _summed(
            ((pool, each.model, state), count) for pool, each in members for state, count in _blocks(each)
        )
        endpoints = [(name, endpoint) for each in stats for endpoint in each.endpoints]
        for metric, of_endpoint in ENDPOINT_GAUGES:
            gauges[metric] = _summed(((pool, each.model), of_endpoint(each)) for pool, each in endpoints)
        gauges[of.ENDPOINT_BREAKER] = _summed(
            ((pool, each.model, state), float(each.breaker == state)) for pool, each in endpoints for state in BREAKERS
        )
        slowest: Values = {}
        for pool, each in members:
            slowest[pool, each.model] = max(slowest.get((pool, each.model), 0.0), each.step_seconds)
        gauges[of.STEP_S] = slowest
        gauges |= _for_gateway(name, stats)
        age_s = self._grown.age_s
        for place, replica in enumerate(stats):
            old = replica.since_s(replica.began) > age_s
            counts = _counts(name, replica)
            before = _reported_before(counts, replica, age_s) if old else None
            new = self._grown.take((name, replica.place or str(place)), counts, before)
            self._starts[(name,)] += new and not old

    def collect(self) -> Iterator[Family]:
        """The metrics, summed over a pool's replicas."""
        totals = {of.REPLICA_STARTS: self._starts}
        for (name, *labels), value in self._grown.totals.items():
            totals.setdefault(BY_NAME[name], {})[tuple(labels)] = value
        for metric in (*of.READ, *of.GATEWAY):
            if metric.kind == "counter":
                yield _family(metric, totals.get(metric, {}))
            else:
                found: Values = {}
                for gauges in self._gauges.values():
                    found |= gauges.get(metric, {})
                yield _family(metric, found)


BY_NAME = {metric.name: metric for metric in of.READ}


def _configured(name: str, pool: PoolConfig) -> dict[Metric, Values]:
    scaling = pool.autoscaling
    least, most = (scaling.min_replicas, scaling.max_replicas) if scaling is not None else (pool.replicas,) * 2
    return {of.LEAST_REPLICAS: {(name,): float(least)}, of.MOST_REPLICAS: {(name,): float(most)}}


def _for_gateway(name: str, stats: Sequence[PoolStats]) -> dict[Metric, Values]:
    """What an endpoint picker looks at: one series for each pool, as it takes the first one it finds."""
    queued = sum(each.queued for each in stats)
    found: dict[Metric, Values] = {
        of.QUEUED: {(name,): float(queued)},
        of.SERVING: {(name,): float(sum(each.requests + each.batch_requests for each in stats) - queued)},
        of.KV_USAGE: {},
        of.CACHE_CONFIG: {},
    }
    used: Counter[str] = Counter()
    total: Counter[str] = Counter()
    sizes: dict[str, int] = {}
    for member in (member for each in stats for member in each.members if member.total_blocks):
        used[member.model] += member.used_blocks
        total[member.model] += member.total_blocks
        sizes[member.model] = member.block_size
    if total:
        found[of.KV_USAGE] = {(name,): max(used[model] / total[model] for model in total)}
        fewest = min(total, key=lambda model: total[model])
        found[of.CACHE_CONFIG] = {(name, str(sizes[fewest]), str(total[fewest])): 1.0}
    return found


def _blocks(member: MemberStats) -> Iterator[tuple[str, float]]:
    yield "used", member.used_blocks
    yield "cached", member.cached_blocks
    yield "free", member.total_blocks - member.used_blocks - member.cached_blocks


def _counts(pool: str, stats: PoolStats) -> Values:
    """What a replica has counted since it began, by metric and labels."""
    found: Values = {
        (of.SHADOWS_DROPPED.name, pool): stats.shadows_dropped,
        (of.LOG_DROPPED.name, pool): stats.log_dropped,
    }
    for member in stats.members:
        key = (of.RESTARTS.name, pool, member.model)
        found[key] = found.get(key, 0.0) + member.restarts
    for each in stats.endpoints:
        whose = (pool, each.model)
        found[of.ENDPOINT_RETRIES.name, *whose] = each.retries
        found[of.ENDPOINT_S.name, *whose] = each.seconds
        found[of.ENDPOINT_FIRST_S.name, *whose] = each.first_s
        found[of.ENDPOINT_OPENED.name, *whose] = each.opened
        found |= {(of.ENDPOINT_REQUESTS.name, *whose, outcome): count for outcome, count in each.requests.items()}
    if stats.audit is not None:
        audit = stats.audit
        results = {
            "equal": audit.equal,
            "tie": audit.ties,
            "mismatch": audit.mismatches,
            "dropped": audit.dropped,
            "failed": audit.failed,
        }
        found |= {(of.AUDITS.name, pool, result): count for result, count in results.items()}
        found[of.AUDIT_TOKENS.name, pool] = audit.tokens
    return found


def _reported_before(counts: Values, replica: PoolStats, age_s: float) -> Values:
    """What of the counts of a replica is older than that."""
    found = dict(counts)
    if replica.audit is not None:
        recent = sum(replica.since_s(diff.found_at) <= age_s for diff in replica.audit.last)
        for key in found:
            if key[0] == of.AUDITS.name and key[-1] == "mismatch":
                found[key] -= recent
    return found


def _summed(pairs: Iterable[tuple[tuple[str, ...], float]]) -> Values:
    found: Values = {}
    for labels, value in pairs:
        found[labels] = found.get(labels, 0.0) + value
    return found


def _family(metric: Metric, values: Values) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family
