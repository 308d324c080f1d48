"""What pools learned of a tenant's texts is forgotten when the tenant goes, before another one of its name comes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from deployments.access.callers import RemovedTenants
from deployments.access.keys import make_key
from deployments.access.tenants_file import Tenant, Tenants, new_entry, read_tenants, write_tenants
from deployments.batches.job import BatchJob
from deployments.batches.store import BatchStore
from deployments.http import build_http
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica
from deployments.service import GenerationService
from tests.batches.house import jsonl, line
from tests.deployments.access.kit import house_config, write_house
from tests.deployments.access.test_tenants_file import until
from tests.deployments.fake_pool import FakePool, load_fake_pool
from tests.deployments.in_process import InProcessBackend
from turnout.batches_config import BatchesConfig
from turnout.calls import Event, GenerateCall
from turnout.config import TurnoutConfig
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams


class Learning(FakePool):
    """Tells whether it knows the tenant of a call."""

    def __init__(self, name: str, config: TurnoutConfig) -> None:
        super().__init__(name, config)
        self.known: set[str] = set()
        self.met: list[bool] = []

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        self.met.append(call.tenant in self.known)
        self.known.add(call.tenant)
        async for event in super().generate(call):
            yield event

    def forget(self, tenant: str) -> None:
        self.known.discard(tenant)


async def test_a_later_tenant_of_a_name_inherits_nothing(tmp_path: Path) -> None:
    write_house(tmp_path, {"acme": {}, "other": {}})
    config, file = house_config(tmp_path), tmp_path / "tenants.yaml"
    replicas = {name: PoolReplica(name, config, Learning) for name in config.pools}
    service = GenerationService(config, {name: InProcessBackend(each) for name, each in replicas.items()}, Metrics())
    pools: dict[str, Any] = {name: each._pool for name, each in replicas.items()}

    async def ask(tenant: str, pool: str = "demo") -> None:
        await service.generate(GenerateCall("r", pool, SamplingParams(max_tokens=2), prompt="x", tenant=tenant))

    try:
        for tenant in ("acme", "acme", "other"):
            await ask(tenant)
        await ask("acme", "other")
        both = read_tenants(file)
        write_tenants(file, both.without("acme"))
        until(lambda: not service.callers.knows("acme"), 30)
        with pytest.raises(TurnoutError):
            await ask("acme")
        write_tenants(file, both.holding("acme", Tenant()))
        until(lambda: service.callers.knows("acme"), 30)
        for tenant in ("acme", "acme", "other"):
            await ask(tenant)
        await ask("acme", "other")
    finally:
        service.close()
    assert pools["demo"].met == [False, True, False, False, True, True]
    assert pools["other"].met == [False, False]


@pytest.mark.parametrize("served_meanwhile", [True, False])
async def test_files_and_batches_are_not_those_of_a_later_tenant_of_a_name(
    tmp_path: Path, served_meanwhile: bool
) -> None:
    file, config = tmp_path / "tenants.yaml", house_config(tmp_path)
    config = config.model_copy(update={"batches": BatchesConfig(folder=str(tmp_path / "batches"))})
    store = BatchStore(config.batches)  # type: ignore[arg-type]

    def served() -> GenerationService:
        replica = PoolReplica("demo", config, load_fake_pool)
        return GenerationService(config, {"demo": InProcessBackend(replica)}, Metrics())

    def add() -> dict[str, str]:
        key, record = make_key()
        held = read_tenants(file) if file.exists() else Tenants()
        write_tenants(file, held.holding("acme", Tenant(id=new_entry(), keys=(record,))))
        return {"Authorization": f"Bearer {key}"}

    first, service = add(), served()
    try:
        web = TestClient(build_http(service))
        sent = {"data": {"purpose": "batch"}, "files": {"file": ("a", jsonl([line("a")]))}}
        file_id = web.post("/v1/files", headers=first, **sent).json()["id"]  # type: ignore[arg-type]
        wanted = {"input_file_id": file_id, "endpoint": "/v1/completions"}
        batch_id = web.post("/v1/batches", headers=first, json=wanted).json()["id"]
        [record] = store.unfinished()
        if not served_meanwhile:
            service.close()
        write_tenants(file, read_tenants(file).without("acme"))
        if served_meanwhile:
            until(lambda: not service.callers.knows("acme"), 30)
        second = add()
        if not served_meanwhile:
            service = served()
            web = TestClient(build_http(service))
        until(lambda: service.callers.knows("acme"), 30)
        for path in ("/v1/files", "/v1/batches"):
            assert web.get(path, headers=second).json()["data"] == []
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
            assert web.get(path, headers=second).status_code == 404
        assert web.post("/v1/batches", headers=second, json=wanted).status_code == 404
        # What the former one began is not done in the name, and at the cost, of the later one.
        await BatchJob(record, store, service, asyncio.Semaphore(1)).run()
        assert (record.status, record.request_counts.completed, record.request_counts.failed) == ("completed", 0, 1)
        assert service.admission.used("acme")["tokens"] == 0
    finally:
        service.close()


class Names:
    """Callers, as far as they tell who has changed."""

    def __init__(self, *changed: str) -> None:
        self.changes = deque([set(changed)])

    def changed(self) -> set[str]:
        return self.changes.popleft() if self.changes else set()


class Slow:
    """A pool that forgets when it is let."""

    def __init__(self, error: TurnoutError | None = None) -> None:
        self.may, self.error = asyncio.Event(), error
        self.forgotten: list[str] = []

    async def forget(self, tenant: str) -> None:
        await self.may.wait()
        if self.error is not None:
            raise self.error
        self.forgotten.append(tenant)


async def test_only_who_has_the_name_waits_and_pools_that_do_not_answer_hold_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = Slow(), Slow(TurnoutError(Code.UNAVAILABLE, "no answer"))
    names = Names("acme")
    departed = RemovedTenants(names, {"good": good, "bad": bad})  # type: ignore[arg-type]
    await departed.settled("other")
    first, second = (asyncio.create_task(departed.settled("acme")) for _ in range(2))
    await asyncio.sleep(0)
    names.changes.append({"acme"})  # once more, before the first time is over
    third = asyncio.create_task(departed.settled("acme"))
    first.cancel()  # its caller has gone; the others still wait for the same
    await asyncio.sleep(0)
    assert (first.cancelled(), second.done(), third.done(), good.forgotten) == (True, False, False, [])
    good.may.set()
    bad.may.set()
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        await asyncio.gather(second, third)
    assert good.forgotten == ["acme", "acme"]
    assert departed._tasks == {}
    said = [record.message for record in caplog.records if record.name == "ray.serve"]
    assert ["pool bad may still know" in message for message in said] == [True, True]
