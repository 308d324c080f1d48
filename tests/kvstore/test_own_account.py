"""What a pool asks on its own account, shadows and audits, writes no more than the tenant may whose text it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvstore.keys import write_root_key
from kvstore.redis.embedded import EmbeddedServer
from pool.local_pool import LocalPool
from tests.engine import conftest as engine_fixtures
from tests.engine.harness import answer, call_of
from tests.engine.routed import LARGE, STATIC, routed_config
from tests.kvstore.forked_calls import CHUNK, settle, tokens
from turnout.config import KVStoreConfig, TurnoutConfig
from turnout.telemetry_config import AuditConfig, TelemetryConfig

pair_folder = engine_fixtures.pair_folder


def asking(folder: Path, own: str) -> TurnoutConfig:
    """A pool that looks at all its answers again."""
    if own == "audit":
        telemetry = TelemetryConfig(audit=AuditConfig(share=1.0))
        return routed_config(folder, {"policy": STATIC}).model_copy(update={"telemetry": telemetry})
    return routed_config(folder, {"policy": STATIC, "shadow": {"share": 1, "policy": LARGE}})


@pytest.mark.parametrize("own", ["shadow", "audit"])
@pytest.mark.parametrize("quota_bytes", [0, None])
async def test_of_a_tenant_that_may_not_write_nothing_is_written(
    pair_folder: Path, tmp_path: Path, own: str, quota_bytes: int | None
) -> None:
    write_root_key(tmp_path / "root.key")
    with EmbeddedServer(tmp_path / "redis", 64 << 20) as redis:
        store = KVStoreConfig(
            url=redis.url,
            root_key_file=str(tmp_path / "root.key"),
            chunk_tokens=CHUNK,
            admission="always",
            tenants={"y": {"quota_bytes": quota_bytes}},
        )
        pool = LocalPool.load("pair", asking(pair_folder, own).model_copy(update={"kvstore": store}))
        await answer(pool, call_of(tokens(4 * CHUNK + 1, start=3), "auto", tenant="y", max_tokens=CHUNK))
        async with asyncio.timeout(30):
            while (stats := pool.stats()).shadows or (stats.audit is not None and stats.audit.running):
                await asyncio.sleep(0.001)
        await settle(pool)
        cache = pool.stats().cache
        assert cache is not None
        assert (cache.memory_bytes > 0, cache.writes > 0) == (quota_bytes is None,) * 2
        assert ("quota" in cache.dropped) == (quota_bytes == 0)
        await pool.close()
