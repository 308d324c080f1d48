"""Engines that share a real Redis: the same answers, with less computed; and strangers share nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.admin import StoreAdmin
from kvstore.keys import write_root_key
from kvstore.opening import open_keyring, open_store
from kvstore.redis.embedded import EmbeddedServer
from pool.local_pool import LocalPool
from tests.engine import conftest as engine_fixtures
from tests.engine.harness import answer, call_of
from tests.engine.mixed import assert_same_reply
from tests.kvstore.forked_calls import CHUNK, answers, forked_calls, open_pool, settle, tokens
from turnout.calls import GenerateCall
from turnout.config import KVStoreConfig
from turnout.errors import TurnoutError
from turnout.types import SharingPolicy

ROOT = Path(__file__).parents[2]
pair_folder = engine_fixtures.pair_folder
CALLS = 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "redis", 64 << 20) as server:
        yield server


@pytest.fixture
def store(redis: EmbeddedServer, tmp_path: Path) -> dict[str, Any]:
    """A configuration of the store in it."""
    write_root_key(tmp_path / "root.key")
    return {
        "url": redis.url,
        "root_key_file": str(tmp_path / "root.key"),
        "chunk_tokens": CHUNK,
        "admission": "always",
        "host_memory_bytes": 0,
        "write_queue": 1000,
        "fetch_timeout_s": 20.0,
    }


def found(pool: LocalPool) -> dict[str, int]:
    cache = pool.stats().cache
    assert cache is not None
    assert cache.faults == {}
    assert cache.health == "ok"
    return cache.tokens


async def test_answers_are_the_same_without_a_store_cold_warm_and_in_other_engines(
    pair_folder: Path, store: dict[str, Any]
) -> None:
    calls = forked_calls(CALLS)
    without = open_pool(pair_folder, None)
    expected = await answers(without, calls)
    first = open_pool(pair_folder, store)
    cold = await answers(first, calls)
    await settle(first)
    assert found(first).get("redis", 0) == 0
    warm = await answers(first, calls)
    second = open_pool(pair_folder, store)
    elsewhere = await answers(second, calls)
    for got in (cold, warm, elsewhere):
        for call, mine, theirs in zip(calls, expected, got, strict=True):
            assert_same_reply(pair_folder, call, mine, theirs)
    assert found(second)["redis"] >= CALLS * CHUNK
    computed = [sum(m.prompt_tokens for reply in run for m in reply.usage.models.values()) for run in (cold, elsewhere)]
    assert computed[1] < 0.5 * computed[0]
    for pool in (without, first, second):
        await settle(pool)
        await pool.close()


async def test_another_process_finds_it(pair_folder: Path, store: dict[str, Any]) -> None:
    calls = forked_calls(5)
    pool = open_pool(pair_folder, store)
    here = await answers(pool, calls)
    await settle(pool)
    await pool.close()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.kvstore.forked_calls", str(pair_folder), json.dumps(store), "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there["tokens"]["redis"] >= 5 * CHUNK
    # Divergences at ties are for the test above, which has the texts.
    assert [reply.ids for reply in here] == there["ids"]


def one(prompt: list[int], tenant: str = "a", **options: Any) -> GenerateCall:
    return call_of(prompt, "plain", {"model": "large"}, max_tokens=4, tenant=tenant, **options)


async def test_a_whole_prompt_that_is_stored_leaves_a_token_to_compute(
    pair_folder: Path, store: dict[str, Any]
) -> None:
    first, second = open_pool(pair_folder, store), open_pool(pair_folder, store)
    prompt = tokens(4 * CHUNK, start=9)
    expected = await answer(first, one(prompt))
    await settle(first)
    got = await answer(second, one(prompt))
    assert got.ids == expected.ids
    meter = got.usage.models["large"]
    assert (meter.fetched_tokens, meter.prompt_tokens) == (4 * CHUNK - 8, 8)
    for pool in (first, second):
        await pool.close()


async def test_groups_share_and_strangers_do_not(pair_folder: Path, store: dict[str, Any]) -> None:
    tenants = {name: {"policy": "group", "group": "team"} for name in ("ann", "bob")}
    first, second = (open_pool(pair_folder, {**store, "tenants": tenants}) for _ in range(2))
    prompt = tokens(4 * CHUNK + 1, start=10)
    await answer(first, one(prompt, "ann"))
    await settle(first)
    fetched = {}
    for tenant in ("eve", "bob"):
        got = await answer(second, one(prompt, tenant))
        fetched[tenant] = got.usage.models["large"].fetched_tokens
    assert fetched == {"eve": 0, "bob": 4 * CHUNK}
    for pool in (first, second):
        await settle(pool)
        await pool.close()


async def test_groups_of_which_only_calls_tell_share_and_are_known_to_the_store(
    pair_folder: Path, store: dict[str, Any]
) -> None:
    first, second = (open_pool(pair_folder, store) for _ in range(2))
    prompt, team = tokens(4 * CHUNK + 1, start=12), SharingPolicy(policy="group", group="team")
    await answer(first, replace(one(prompt, "ann"), sharing=team))
    await settle(first)
    fetched = {}
    for tenant, told in (("eve", None), ("bob", SharingPolicy(policy="private")), ("cid", team)):
        got = await answer(second, replace(one(prompt, tenant), sharing=told))
        fetched[tenant] = got.usage.models["large"].fetched_tokens
    assert fetched == {"eve": 0, "bob": 0, "cid": 4 * CHUNK}
    for pool in (first, second):
        await settle(pool)
        await pool.close()
    config = KVStoreConfig(**store)
    redis = open_store(config)
    desk = StoreAdmin(config, redis, open_keyring(config))
    [row] = [each for each in desk.report().namespaces if each.policy == "group"]
    assert (row.id, row.values >= 4) == ("team", True)
    assert desk.flush([desk.of_group("team")]) == row.values
    redis.close()


async def test_other_weights_under_the_same_name_find_nothing(
    pair_folder: Path, store: dict[str, Any], tmp_path: Path
) -> None:
    first = open_pool(pair_folder, store)
    prompt = tokens(4 * CHUNK + 1, start=11)
    await answer(first, one(prompt))
    await settle(first)
    await first.close()
    folder = shutil.copytree(pair_folder, tmp_path / "models")
    weights = load_file(folder / "large" / "model.safetensors")
    weights["model.norm.weight"][0] += 0.01
    save_file(weights, folder / "large" / "model.safetensors", metadata={"format": "pt"})
    for models, fetched in ((folder, 0), (pair_folder, 4 * CHUNK)):
        pool = open_pool(models, store)
        got = await answer(pool, one(prompt))
        assert got.usage.models["large"].fetched_tokens == fetched
        await settle(pool)
        await pool.close()


async def test_another_root_key_is_refused_when_the_pool_is_loaded(
    pair_folder: Path, store: dict[str, Any], tmp_path: Path
) -> None:
    first = open_pool(pair_folder, store)
    await first.close()
    write_root_key(tmp_path / "other.key")
    with pytest.raises(TurnoutError, match=r"kvstore\.root_key_file"):
        open_pool(pair_folder, {**store, "root_key_file": str(tmp_path / "other.key")})


async def test_a_redis_that_ends_in_the_middle_changes_no_answer(
    pair_folder: Path, store: dict[str, Any], redis: EmbeddedServer
) -> None:
    calls = forked_calls(6)
    without, pool = open_pool(pair_folder, None), open_pool(pair_folder, {**store, "fetch_timeout_s": 0.5})
    expected = await answers(without, calls)
    before = await answers(pool, calls[:3])
    await settle(pool)
    redis.stop()
    after = await answers(pool, calls[3:])
    for call, mine, theirs in zip(calls, expected, before + after, strict=True):
        assert_same_reply(pair_folder, call, mine, theirs)
    cache = pool.stats().cache
    assert cache is not None
    assert sum(cache.faults.values()) > 0
    await settle(pool)
    await pool.close()
    await without.close()
