"""Requests that share and fork prefixes, a pool with a prefix store, and all of it in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence as Calls
from pathlib import Path
from typing import Any

import torch

from pool.local_pool import LocalPool
from tests.engine.harness import Reply, answer, call_of, pair_config
from tests.engine.mixed import SAMPLING
from turnout.calls import GenerateCall
from turnout.config import KVStoreConfig

BLOCK, CHUNK = 8, 16
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"model": "large"}),
    ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 3}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
    ("speculative", {"verifier": "rejection", "length": "fixed", "draft_length": 3}),
    ("plain", {"model": "small"}),
]


def tokens(length: int, start: int) -> list[int]:
    return [(start * 7 + i * i + i) % 57 + 2 for i in range(length)]


def forked_calls(count: int) -> list[GenerateCall]:
    """Two prefixes, each with forks of two depths, by two tenants, with every method and kind of sampling."""
    found = []
    for i in range(count):
        trunk = tokens(48, start=i % 2)
        branch = tokens(33, start=2 + i % 3)
        leaf = tokens(1 + 5 * i % 13, start=i)
        method, params = METHODS[i % len(METHODS)]
        options = {"max_tokens": 8, "seed": 100 + i, **SAMPLING[i % len(SAMPLING)]}
        found.append(call_of([*trunk, *branch, *leaf], method, params, tenant="ab"[i % 4 == 3], **options))
    return found


def open_pool(folder: Path, store: dict[str, Any] | None) -> LocalPool:
    """The pair, with a store where one is configured, whose forecast is that computing is slow."""
    config = pair_config(folder, block_size=BLOCK, token_budget=64)
    kvstore = KVStoreConfig(**(store or {"url": "off"}))
    pool = LocalPool.load("pair", config.model_copy(update={"kvstore": kvstore}))
    for model in pool.engines.values():
        if model.shared is not None:
            model.shared._seconds = lambda: lambda start, stop: 10.0 * (stop - start)
    return pool


async def answers(pool: LocalPool, calls: Calls[GenerateCall]) -> list[Reply]:
    """One after another, so that later ones find what earlier ones left."""
    return [await answer(pool, call) for call in calls]


async def settle(pool: LocalPool) -> None:
    """Until everything that was offered is stored, and the blocks of it are given back."""
    for model in pool.engines.values():
        if model.shared is not None:
            assert await model.shared.store.settle()
            while model.shared.kept:
                await asyncio.sleep(0)
            model.pool.check_integrity()
            assert model.pool.num_held == 0


async def _main(folder: str, store: str, count: str) -> None:
    pool = open_pool(Path(folder), json.loads(store))
    replies = await answers(pool, forked_calls(int(count)))
    cache = pool.stats().cache
    assert cache is not None
    await pool.close()
    sys.stdout.write(json.dumps({"ids": [reply.ids for reply in replies], "tokens": cache.tokens}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_main(*sys.argv[1:]))
