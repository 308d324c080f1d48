"""What the pools' prefix stores did, for Prometheus: read from the replicas when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

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
    """Holds the last numbers that the replicas gave."""

    def __init__(self) -> None:
        self._pools: dict[str, list[CacheStats]] = {}

    def update(self, pools: Mapping[str, Iterable[PoolStats]]) -> None:
        """What the replicas of these pools hold, without those that have no store; other pools keep their numbers."""
        found = {name: [each.cache for each in stats if each.cache is not None] for name, stats in pools.items()}
        self._pools = {name: stats for name, stats in (self._pools | found).items() if stats}

    def collect(self) -> Iterator[Metric]:
        """The metrics, summed over a pool's replicas."""
        for name, text, count in TOTALS:
            total = CounterMetricFamily(f"turnout_cache_{name}", text, labels=["pool"])
            for pool, stats in self._pools.items():
                total.add_metric([pool], sum(map(count, stats)))
            yield total
        for name, text, label, counts in KINDS:
            by_kind = CounterMetricFamily(f"turnout_cache_{name}", text, labels=["pool", label])
            for pool, stats in self._pools.items():
                for kind in sorted({kind for each in stats for kind in counts(each)}):
                    by_kind.add_metric([pool, kind], sum(counts(each).get(kind, 0) for each in stats))
            yield by_kind
        memory = GaugeMetricFamily("turnout_cache_memory_bytes", "Held in the replicas' memory.", labels=["pool"])
        degraded = GaugeMetricFamily(
            "turnout_cache_degraded", "Replicas that cannot reach all of Redis.", labels=["pool"]
        )
        for pool, stats in self._pools.items():
            memory.add_metric([pool], sum(each.memory_bytes for each in stats))
            degraded.add_metric([pool], sum(each.health != "ok" for each in stats))
        yield memory
        yield degraded
