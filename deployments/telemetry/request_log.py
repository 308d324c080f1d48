"""The log of requests: one JSON line for each that ended. Who asked, who answered, how it ended, how long it took."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from deployments.telemetry.monotonic_counters import OVERLAP_S
from router.log import MOST_WAITING, RouteLog
from turnout.config import RouteLogConfig
from turnout.pool_stats import AuditDiff, PoolStats
from turnout.telemetry_config import LogsConfig

SERVE_LOG = "ray.serve"


class RequestLog:
    """Writes to a file of its own; or through Ray Serve's log, which is JSON where this is on. A thread does it.

    Args:
        config: where to.

    Raises:
        TurnoutError: INVALID_ARGUMENT: the file cannot be opened.
    """

    def __init__(self, config: LogsConfig) -> None:
        self.texts = config.texts
        self._file: RouteLog | None = None
        if config.path is not None:
            values = {"path": config.path, "max_bytes": config.max_bytes, "backups": config.backups}
            self._file = RouteLog(RouteLogConfig(**values), alone=False, field="telemetry.logs.path")
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._writer = threading.Thread(target=self._pass_on, name="request log", daemon=True)
        if self._file is None:
            self._writer.start()

    def write(self, entry: dict[str, Any]) -> None:
        """Hand an entry over; returns at once."""
        if self._file is not None:
            self._file.write(entry)
        else:
            with suppress(queue.Full):  # a slow disk costs entries, not requests
                self._waiting.put_nowait(entry)

    def close(self) -> None:
        """Write what waits."""
        if self._file is not None:
            self._file.close()
        elif self._writer.is_alive():
            self._waiting.put(None)
            self._writer.join()

    def _pass_on(self) -> None:
        serve = logging.getLogger(SERVE_LOG)
        while (entry := self._waiting.get()) is not None:
            # Serve has a request id of its own, which is not the one that its caller knows.
            fields = {f"turnout_{name}": value for name, value in entry.items()}
            serve.info("request", extra={"ray_serve_extra_fields": fields})


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
