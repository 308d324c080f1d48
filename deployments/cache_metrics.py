"""What the pools' prefix stores did, for Prometheus: read from the replicas at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deployments.telemetry.monotonic_counters import Counts as Values
from deployments.telemetry.monotonic_counters import Growing
from turnout.calls import CacheStats, PoolStats

Count = Callable[[CacheStats], float]
Counts = Callable[[CacheStats], Mapping[str, int]]

TOTALS: tuple[tuple[str, str, Count], ...] = (
    ("lookups", "Sequences whose prefix was looked for in the store.", lambda stats: stats.lookups),
    ("writes", "Values written to Redis.", lambda stats: stats.writes),
    ("read_bytes", "Bytes read from Redis.", lambda stats: stats.bytes_read),
    ("written_bytes", "Bytes written to Redis.", lambda stats: stats.bytes_written),
    ("regret_seconds", "Time that the other choice between fetching and computing would have saved, by the forecasts.",
     lambda stats: stats.regret_s),
)  # fmt: skip
KINDS: tuple[tuple[str, str, str, Counts], ...] = (
    ("tokens", "Tokens whose keys and values were found, by where.", "tier", lambda stats: stats.tokens),
    ("faults", "What went wrong with the store and became a miss.", "kind", lambda stats: stats.faults),
    ("dropped", "Values that were not written.", "reason", lambda stats: stats.dropped),
)


class CacheCollector(Collector):
    """Holds the last numbers that the replicas gave, and the sums of what they counted.

    What replicas had counted before the ingress began is left out, as in `PoolCollector`.
    """

    def __init__(self) -> None:
        self._pools: dict[str, list[CacheStats]] = {}
        self._grown = Growing()

    def update(self, pools: Mapping[str, Iterable[PoolStats]]) -> None:
        """What the replicas of these pools hold, without those that have no store; other pools keep their numbers."""
        for name, stats in pools.items():
            found = []
            for place, replica in enumerate(stats):
                if replica.cache is not None:
                    found.append(replica.cache)
                    self._take(name, replica.place or str(place), replica, _counts(name, replica.cache))
            self._pools[name] = found

    def _take(self, pool: str, place: str, replica: PoolStats, counts: Values) -> None:
        old = replica.since_s(replica.began) > self._grown.age_s
        self._grown.take((pool, place), counts, before=counts if old else None)

    def collect(self) -> Iterator[Metric]:
        """The metrics, summed over a pool's replicas."""
        totals = {
            name: CounterMetricFamily(f"turnout_cache_{name}", text, labels=["pool", *labels])
            for name, text, *labels in (*(each[:2] for each in TOTALS), *(each[:3] for each in KINDS))
        }
        for (name, *labels), value in sorted(self._grown.totals.items()):
            totals[name].add_metric(labels, value)
        yield from totals.values()
        memory = GaugeMetricFamily("turnout_cache_memory_bytes", "Held in the replicas' memory.", labels=["pool"])
        degraded = GaugeMetricFamily(
            "turnout_cache_degraded", "Replicas that cannot reach all of Redis.", labels=["pool"]
        )
        for pool, stats in self._pools.items():
            if stats:
                memory.add_metric([pool], sum(each.memory_bytes for each in stats))
                degraded.add_metric([pool], sum(each.health != "ok" for each in stats))
        yield memory
        yield degraded


def _counts(pool: str, stats: CacheStats) -> Values:
    """What a replica's stores have counted since it began, by metric and labels."""
    found: Values = {(name, pool): count(stats) for name, _, count in TOTALS}
    found |= {(name, pool, kind): number for name, _, _, counts in KINDS for kind, number in counts(stats).items()}
    return found
