"""A service with tenants over a fake pool, and the same behind real gRPC and HTTP servers in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from deployments.access.keys import make_key
from deployments.access.tenants_file import Tenant, Tenants, read_tenants, write_tenants
from deployments.access.usage_record import UsageRecord
from deployments.access.usage_totals import RecordFiles
from deployments.direct_servers import DirectServers
from deployments.grpc_server import GrpcServicer
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from deployments.telemetry.request_log import RequestLog
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import InProcessBackend
from turnout.access_config import TenantLimits
from turnout.client_messages import error as client_error
from turnout.config import ServerConfig, TurnoutConfig, parse_config
from turnout.errors import Code, TurnoutError
from turnout.free_ports import free_port


def house_config(folder: Path, access: dict[str, Any] | None = None, **server: Any) -> TurnoutConfig:
    """Pools `demo` and `other`, and a section `access` with a tenants file and usage records in the folder."""
    pair = {"small": "small", "large": "large"}
    files = {"tenants_file": str(folder / "tenants.yaml"), "usage": {"folder": str(folder / "usage")}}
    return parse_config(
        {
            "models": {name: {"path": "none"} for name in ("small", "large", "small-2", "large-2")},
            "pools": {"demo": pair, "other": {"small": "small-2", "large": "large-2"}},
            "server": server,
            "access": {**files, **(access or {})},
        }
    )


def write_house(folder: Path, tenants: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Writes a tenants file; the key of each tenant."""
    keys, found = {}, {}
    for name, limits in tenants.items():
        keys[name], record = make_key()
        found[name] = Tenant(limits=TenantLimits.model_validate(limits), keys=(record,))
    write_tenants(folder / "tenants.yaml", Tenants(tenants=found))
    return keys


@dataclass
class House:
    """A service with tenants, the key of each, and where its files are."""

    service: GenerationService
    keys: dict[str, str]
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "tenants.yaml"

    def key_id(self, tenant: str) -> str:
        return self.keys[tenant].split("_")[1]

    def change(self, name: str, **limits: Any) -> None:
        """Other limits, as `turnout tenants set` would write them."""
        tenants = read_tenants(self.file)
        tenant = tenants.tenant(name).model_copy(update={"limits": TenantLimits.model_validate(limits)})
        write_tenants(self.file, tenants.holding(name, tenant))

    def assert_idle(self, timeout_s: float = 20.0) -> None:
        """Of all that was asked nothing is left."""
        until = time.monotonic() + timeout_s
        while any(self.service.held().values()):
            assert time.monotonic() < until, self.service.held()
            time.sleep(0.01)

    def records(self) -> list[UsageRecord]:
        assert self.service.admission.flush()
        return sorted(RecordFiles(self.folder / "usage").between(), key=lambda record: record.time)


@contextmanager
def house(
    folder: Path,
    tenants: dict[str, dict[str, Any]],
    access: dict[str, Any] | None = None,
    log: RequestLog | None = None,
    **server: Any,
) -> Iterator[House]:
    keys = write_house(folder, tenants)
    config = house_config(folder, access, **server)
    backends = {name: InProcessBackend(PoolReplica(name, config, load_fake_pool)) for name in config.pools}
    service = GenerationService(config, backends, Metrics(), log)
    made = House(service, keys, folder)
    try:
        yield made
        made.assert_idle()
    finally:
        service.close()


def with_time_to_retry(error: TurnoutError) -> TurnoutError:
    """The same refusal; of a stream's Serve passes on code and message only, which must tell the time to retry."""
    passed_on = client_error(grpc.StatusCode[error.code.value], error.message)
    if error.code is Code.RESOURCE_EXHAUSTED:
        assert passed_on.retry_after_s == pytest.approx(error.retry_after_s, abs=0.1)
    return error


class Served:
    """A service's gRPC and HTTP endpoints, in a thread."""

    def __init__(self, service: GenerationService) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))
        self._thread.start()
        assert self._ready.wait(30)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        servicer = GrpcServicer()
        servicer.service = self.service
        app = build_http(self.service)
        ports = ServerConfig(grpc_port=self.grpc_port, http_port=self.http_port)
        servers = DirectServers(ports, app, servicer)
        async with app.router.lifespan_context(app):
            await servers.start()
            self._ready.set()
            await self._stop.wait()
            await servers.stop(0)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@contextmanager
def served(service: GenerationService) -> Iterator[Served]:
    server = Served(service)
    try:
        yield server
    finally:
        server.stop()
