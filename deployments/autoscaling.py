"""How many replicas a pool wants. Serve sends this module by value to its controller: it stays small."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# A pool that writes more tokens than this share of the most its replicas ever wrote keeps all of them.
FULL = 0.9
# What replicas report, as `deployments.replica_load.ReplicaLoad.autoscaling` names it.
METRICS = ("requests", "waiting_s", "kv", "tokens_per_second")


class PoolPolicy:
    """As many replicas as bring the scarcest of requests, waiting work and cache to its target.

    Fewer only where those left can write as many tokens per second as are written now. Delays and bounds are Serve's.

    Args:
        requests: in progress, for each replica.
        waiting_s: work that waits for a replica's models by its own forecast, in seconds.
        kv: share of the blocks of its fullest model.
        half_life_s: time in which the most that a replica ever wrote counts half: far longer than Serve waits before it
            ends replicas, or what they write now would pass for the most they can, and none would ever be ended.
        clock: seconds, the same wherever Serve's controller runs.
    """

    def __init__(
        self,
        requests: float,
        waiting_s: float,
        kv: float,
        half_life_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._half_life_s = half_life_s
        self._clock = clock
        self._targets = {"requests": requests, "waiting_s": waiting_s, "kv": kv}

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Serve's autoscaling policy: (replicas wanted, what to remember)."""
        newest = {name: _newest(context.raw_metrics, name) for name in METRICS}
        totals = {name: sum(values) for name, values in newest.items()}
        # Calls that have found no replica, as a mean over some seconds: where there is a replica now, those that it
        # works on were among them.
        totals["requests"] = max(totals["requests"], context.total_queued_requests or 0.0)
        wanted = max(totals[name] / target for name, target in self._targets.items())
        now, before = self._clock(), context.policy_state
        faded = 0.5 ** (max(now - before.get("at", now), 0.0) / self._half_life_s)
        most = max([faded * before.get("most", 0.0), *newest["tokens_per_second"]])
        running = context.current_num_replicas
        if wanted < running and most > 0:
            wanted = max(wanted, min(running, totals["tokens_per_second"] / (FULL * most)))
        return wanted, {"most": most, "at": now}


def _newest(raw: Any, name: str) -> list[float]:
    """Each replica's last value of a metric."""
    series = ((raw or {}).get(name) or {}).values()
    return [points[-1].value for points in series if points]
