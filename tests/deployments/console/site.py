"""Turnout with its demo models, over HTTP, in a thread of this process: what the console is driven against."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import uvicorn

from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica, load_engine
from deployments.service import GenerationService
from tests.deployments.in_process import InProcessBackend
from turnout.calls import MethodDescription
from turnout.config import TurnoutConfig, parse_config
from turnout.free_ports import free_port


class Replica(InProcessBackend):
    """With the methods there really are."""

    async def methods(self) -> list[MethodDescription]:
        return self.replica.methods()


def demo_config(**sections: Any) -> TurnoutConfig:
    """The demo, exact, so that answers can be compared."""
    values = TurnoutConfig.demo().model_dump(mode="json", exclude_unset=True)
    for model in values["models"].values():
        model["dtype"] = "float32"
    return parse_config({**values, "engine": {"threads": 1}, **sections})


class Site:
    """A running server.

    Attributes:
        port: where it listens.
        replica: of its pool.
    """

    def __init__(self, config: TurnoutConfig) -> None:
        self._config = config
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        # As long as it takes on a busy machine, but not after it has failed.
        while not self._ready.wait(1):
            assert self._thread.is_alive(), "the server did not start"

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.replica = PoolReplica("demo", self._config, load_engine)
        service = GenerationService(self._config, {"demo": Replica(self.replica)}, Metrics())
        self.port = free_port()
        server = uvicorn.Server(uvicorn.Config(build_http(service), port=self.port, log_level="error"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        self._ready.set()
        await self._stop.wait()
        server.should_exit = True
        await serving

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def requests(self) -> int:
        """Calls in progress."""
        return self.replica.stats().requests

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
