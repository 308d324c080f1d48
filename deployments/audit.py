"""Audits as the ingress sees them: each mismatch that a replica tells of is logged once, with its diff."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deployments.telemetry.monotonic_counters import OVERLAP_S
from turnout.pool_stats import AuditDiff, PoolStats

REMEMBERED = 1000


class AuditLog:
    """Writes down what audits found wrong since it began; what was found before, another ingress has written down.

    Args:
        write: takes an entry of the log.
        texts: whether tokens are written as texts too.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], texts: bool = False) -> None:
        self._write = write
        self._texts = texts
        self._began = time.monotonic()
        self._known: OrderedDict[tuple[str, AuditDiff], None] = OrderedDict()

    def take(self, pools: Mapping[str, Iterable[PoolStats]]) -> None:
        """What the replicas of each pool say now; what was said before is not written again."""
        age_s = time.monotonic() - self._began + OVERLAP_S
        for pool, replicas in pools.items():
            for stats in replicas:
                for diff in stats.audit.last if stats.audit is not None else ():
                    if stats.since_s(diff.found_at) <= age_s and (pool, diff) not in self._known:
                        self._known[pool, diff] = None
                        self._write(self._entry(pool, stats.place, diff))
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def _entry(self, pool: str, place: str, diff: AuditDiff) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "request_id": diff.request_id,
            "kind": "audit",
            "outcome": "mismatch",
            "model": pool,
            "method": diff.method,
            "place": place,
            "answer": diff.answer,
            "position": diff.position,
            "wrote": diff.wrote[0],
            "expected": diff.expected[0],
            "margin_nats": diff.margin_nats,
        }
        if self._texts:
            entry |= {"wrote_text": diff.wrote[1], "expected_text": diff.expected[1]}
        return entry
