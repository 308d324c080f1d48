"""With whom a tenant shares cached prefixes, as the tenants file says: through real front ends over a real engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.access.callers import Caller
from deployments.backend import Batch
from deployments.batches.job import BatchJob
from deployments.batches.records import BatchRecord
from deployments.batches.store import BatchStore
from deployments.fan_out import answer
from deployments.metrics import Metrics
from deployments.pool_deployment import PoolReplica, load_engine
from deployments.schemas import completion_job
from deployments.service import GenerationService
from tests.batches.house import jsonl, line
from tests.deployments.access.kit import House, house_config, served, write_house
from tests.deployments.access.test_callers import RSA, public_pem, token
from tests.deployments.access.test_tenants_file import until
from tests.deployments.fake_pool import load_fake_pool
from tests.deployments.in_process import InProcessBackend
from tests.near_pair import save_near_pair
from turnout.batches_config import BatchesConfig
from turnout.calls import GenerateCall, ScoreCall
from turnout.client import Client
from turnout.config import parse_config
from turnout.types import SamplingParams, SharingPolicy

PLAIN = {"decoding": {"method": "plain", "params": {"model": "large"}}, "max_tokens": 1}
TEAM, PRIVATE = SharingPolicy(policy="group", group="team"), SharingPolicy(policy="private")
TOLD: dict[str, dict[str, Any]] = {"ann": {"sharing": TEAM}, "bob": {"sharing": TEAM}, "cid": {"sharing": PRIVATE}}


@dataclass
class Home(House):
    url: str = ""
    address: str = ""

    def cached(self, tenant: str, prompt: str, key: str = "", **more: Any) -> int:
        """Of a prompt's tokens, those that were found."""
        headers = {"Authorization": f"Bearer {key or self.keys[tenant]}"}
        body = {"model": "demo", "prompt": prompt, **PLAIN, **more}
        answered = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answered.status_code == 200, answered.text
        return int(answered.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Tenants ann and bob, who are private; nothing is configured under kvstore.tenants."""
    folder = tmp_path_factory.mktemp("home")
    save_near_pair(folder)
    (folder / "key.pem").write_bytes(public_pem(RSA))
    signed = {"issuer": "https://id", "audience": "turnout", "key_file": str(folder / "key.pem")}
    model = {"dtype": "float32", "kv_memory_bytes": 4 << 20}
    config = parse_config(
        {
            "models": {role: {"path": str(folder / role), **model} for role in ("small", "large")},
            "pools": {"demo": {"small": "small", "large": "large"}},
            "engine": {"threads": 1},
            "access": {"tenants_file": str(folder / "tenants.yaml"), "jwt": signed},
        }
    )
    keys = write_house(folder, {"ann": {}, "bob": {}})
    service = GenerationService(config, {"demo": InProcessBackend(PoolReplica("demo", config, load_engine))}, Metrics())
    with served(service) as server:
        yield Home(service, keys, folder, server.url, server.address)
    service.close()


def fresh() -> str:
    return secrets.token_hex(60)


def set_to(home: House, told: SharingPolicy | None, *names: str) -> None:
    """As `turnout tenants set` does it; the service has it when this returns."""
    for name in names:
        home.change(name, **({"sharing": told} if told is not None else {}))
    until(lambda: all(home.service.callers.sharing(name) == told for name in names), 20.0)


def test_a_group_that_the_file_names_shares_until_it_names_it_no_more(home: Home) -> None:
    prompt = fresh()
    whole = len(prompt) // 16 * 16
    try:
        assert [home.cached(name, prompt) for name in ("ann", "bob")] == [0, 0]  # the file says nothing
        set_to(home, TEAM, "ann", "bob")
        assert [home.cached(name, prompt) for name in ("ann", "bob")] == [0, whole]
        # A token of the identity provider names the tenant just as its key does.
        assert home.cached("bob", prompt, token(tenant="bob")) == whole
        set_to(home, PRIVATE, "bob")
        other = fresh()
        assert [home.cached(name, other) for name in ("ann", "bob")] == [0, 0]
        assert home.cached("bob", prompt) == whole  # of its own, from before
        set_to(home, None, "ann")
        third = fresh()
        assert [home.cached(name, third) for name in ("bob", "ann")] == [0, 0]
    finally:
        set_to(home, None, "ann", "bob")


def test_grpc_and_scores_share_alike(home: Home) -> None:
    prompt = fresh()
    try:
        set_to(home, TEAM, "ann", "bob")
        with Client(home.address, api_key=home.keys["ann"]) as client:
            client.score(prompt, ["x"], model="large")
        assert home.cached("bob", prompt) > 0
        with Client(home.address, api_key=home.keys["bob"]) as client:
            got = client.generate(prompt, model="demo", method="plain", params={"model": "large"}, max_tokens=1)
        assert got.usage.cached_tokens > 0
    finally:
        set_to(home, None, "ann", "bob")


@pytest.mark.parametrize("field", ["sharing", "group"])
def test_no_request_says_with_whom_it_shares(home: Home, field: str) -> None:
    headers = {"Authorization": f"Bearer {home.keys['bob']}"}
    body = {"model": "demo", "prompt": "x", **PLAIN, field: {"policy": "group", "group": "team"}}
    answered = httpx.post(f"{home.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answered.status_code == 400
    assert field in answered.json()["error"]["message"]


class Noting(InProcessBackend):
    """Notes what it is told."""

    def __init__(self, replica: PoolReplica) -> None:
        super().__init__(replica)
        self.told: list[tuple[str, str, SharingPolicy | None]] = []

    async def stream(self, call: GenerateCall) -> AsyncGenerator[Batch, None]:
        self._note(call)
        async with aclosing(super().stream(call)) as batches:
            async for batch in batches:
                yield batch

    async def complete(self, call: GenerateCall) -> Batch:
        self._note(call)
        return await super().complete(call)

    async def score(self, call: ScoreCall) -> Any:
        self._note(call)
        return await super().score(call)

    def _note(self, call: GenerateCall | ScoreCall) -> None:
        self.told.append((type(call).__name__, call.tenant, call.sharing))


@pytest.fixture
def noting(tmp_path: Path) -> Iterator[tuple[House, Noting]]:
    keys = write_house(tmp_path, {**TOLD, "dan": {}})
    config = house_config(tmp_path)
    backend = Noting(PoolReplica("demo", config, load_fake_pool))
    service = GenerationService(config, {"demo": backend, "other": backend}, Metrics())
    yield House(service, keys, tmp_path), backend
    service.close()


def one(tenant: str, sharing: SharingPolicy | None = None) -> GenerateCall:
    return GenerateCall("r", "demo", SamplingParams(max_tokens=1), prompt="hello", tenant=tenant, sharing=sharing)


async def test_every_call_is_told_what_the_file_says_whatever_it_says_itself(noting: tuple[House, Noting]) -> None:
    home, backend = noting
    for tenant in ("ann", "cid", "dan"):
        await home.service.generate(one(tenant, SharingPolicy(policy="group", group="another's")))
        async for _ in home.service.stream(one(tenant, TEAM)):
            pass
        await home.service.score(ScoreCall("r", "large", "x", ("y",), tenant, sharing=TEAM))
    told = {"ann": TEAM, "cid": PRIVATE, "dan": None}
    kinds = ("GenerateCall", "GenerateCall", "ScoreCall")
    assert backend.told == [(kind, tenant, told[tenant]) for tenant in told for kind in kinds]


async def test_an_echo_is_read_where_its_answer_was(noting: tuple[House, Noting]) -> None:
    home, backend = noting
    job = completion_job({"model": "demo", "prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 1})
    await answer(home.service, replace(job, calls=tuple(map(Caller("ann").attributed, job.calls))))
    assert {(kind, sharing) for kind, _, sharing in backend.told} == {("GenerateCall", TEAM), ("ScoreCall", TEAM)}


async def test_lines_of_a_batch_share_as_their_tenant_does_when_they_are_asked(
    noting: tuple[House, Noting], tmp_path: Path
) -> None:
    home, backend = noting
    store = BatchStore(BatchesConfig(folder=str(tmp_path / "batches")))
    for tenant in ("bob", "dan"):
        file, now = (
            store.add_file(tenant, "in.jsonl", "batch", [jsonl([line("a", "x", max_tokens=1)])]),
            int(time.time()),
        )
        times = {"created_at": now, "expires_at": now + 3600, "completion_window": "1h"}
        made = {"id": f"batch_{tenant.encode().hex():0>24}", "endpoint": "/v1/completions", "input_file_id": file.id}
        record = BatchRecord.model_validate({"tenant": tenant, "key_id": "", "seed": 1, **made, **times})
        store.add_batch(record)
        await BatchJob(record, store, home.service, asyncio.Semaphore(1)).run()
    assert [(tenant, sharing) for _, tenant, sharing in backend.told] == [("bob", TEAM), ("dan", None)]


def test_a_tenant_reads_with_whom_it_shares(noting: tuple[House, Noting]) -> None:
    home, _ = noting
    with served(home.service) as server:
        said = httpx.get(
            f"{server.url}/v1/tenant", timeout=30, headers={"Authorization": f"Bearer {home.keys['ann']}"}
        ).json()
    assert said["limits"]["sharing"] == {"policy": "group", "group": "team"}
