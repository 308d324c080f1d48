"""With whom a tenant shares, as its call tells: blocks are found by those of whom one group is told, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pool.audit import Audits
from pool.local_pool import LocalPool
from tests.engine.harness import answer, call_of, pair_config, until
from turnout.calls import GenerateCall, ScoreCall
from turnout.config import KVStoreConfig
from turnout.kvstore_config import TenantSharing
from turnout.telemetry_config import AuditConfig
from turnout.types import SharingPolicy

SIZE = 8
PROMPT = [(7 * i + i * i) % 57 + 2 for i in range(5 * SIZE + 1)]
ALL = 5 * SIZE
TEAM, OTHERS = (SharingPolicy(policy="group", group=name) for name in ("team", "others"))
PRIVATE, LISTENING = SharingPolicy(policy="private"), SharingPolicy(policy="private", group="team")
CONFIGURED = {name: TenantSharing(policy="group", group="team") for name in ("ann", "bob")}


@pytest.fixture(params=[False, True], ids=["nothing configured", "configured"])
async def pool(request: pytest.FixtureRequest, pair_folder: Path) -> AsyncIterator[LocalPool]:
    config = pair_config(pair_folder, block_size=SIZE)
    store = KVStoreConfig(url="off", tenants={"cid": TenantSharing()} if request.param else {})
    loaded = LocalPool.load("pair", config.model_copy(update={"kvstore": store}))
    yield loaded
    await loaded.close()


def asked(tenant: str, told: SharingPolicy | None) -> GenerateCall:
    return replace(call_of(PROMPT, "plain", {"model": "large"}, max_tokens=2, tenant=tenant), sharing=told)


async def cached(pool: LocalPool, tenant: str, told: SharingPolicy | None) -> int:
    return (await answer(pool, asked(tenant, told))).usage.cached_tokens


async def test_tenants_whose_calls_name_one_group_find_each_others_blocks(pool: LocalPool) -> None:
    assert await cached(pool, "ann", TEAM) == 0
    assert await cached(pool, "bob", TEAM) == ALL
    assert await cached(pool, "cid", TEAM) == ALL
    assert await cached(pool, "eve", OTHERS) == 0


@pytest.mark.parametrize("told", [PRIVATE, LISTENING, None])
async def test_who_is_set_back_to_private_finds_what_is_its_own(pool: LocalPool, told: SharingPolicy | None) -> None:
    await cached(pool, "ann", TEAM)
    assert await cached(pool, "bob", told) == 0
    assert await cached(pool, "bob", told) == ALL
    assert await cached(pool, "ann", told) == 0


async def test_what_a_call_tells_goes_before_what_is_configured(pair_folder: Path) -> None:
    store = KVStoreConfig(url="off", tenants=CONFIGURED)
    pool = LocalPool.load("pair", pair_config(pair_folder, block_size=SIZE).model_copy(update={"kvstore": store}))
    assert [await cached(pool, "ann", None), await cached(pool, "bob", PRIVATE)] == [0, 0]
    assert [await cached(pool, "bob", OTHERS), await cached(pool, "bob", None)] == [0, ALL]
    assert await cached(pool, "eve", TEAM) == ALL
    await pool.close()


async def test_scores_share_as_answers_do(pool: LocalPool) -> None:
    for tenant, told in (("ann", TEAM), ("bob", TEAM), ("cid", PRIVATE)):
        await pool.score(ScoreCall("r", "large", tuple(PROMPT), ((5,),), tenant, sharing=told))
    # Blocks that scores left: one of the group and one of cid's alone.
    assert [await cached(pool, "dan", TEAM), await cached(pool, "cid", None)] == [ALL, ALL]
    assert await cached(pool, "ann", None) == 0


async def test_an_audit_reads_the_cache_that_its_call_did(pair_folder: Path) -> None:
    pool = LocalPool.load("pair", pair_config(pair_folder, block_size=SIZE))
    pool.audits = Audits(AuditConfig(share=1.0), pool.model_pool, pool.tokenizer, "float32")
    await cached(pool, "ann", TEAM)
    audits = pool.audits
    await until(lambda: audits.stats().equal == 1)
    held = pool.engines["large"].stats().cached_blocks
    await pool.close()
    # The auditor's sequence is the group's: it left no second copy of the prompt under another name.
    assert held == ALL // SIZE
