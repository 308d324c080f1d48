"""The log of requests: one JSON line for each that ended. Who asked, who answered, how it ended, how long it took."""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from typing import Any

from router.log import MOST_WAITING, RouteLog
from turnout.config import RouteLogConfig
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
