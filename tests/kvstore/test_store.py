from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.build import build_stores
from kvstore.fakes import RecordingStore
from kvstore.keys import Keyring
from kvstore.layout import choose_chunk_tokens, layer_groups
from kvstore.opening import open_keyring
from kvstore.redis.redis_store import RedisStore
from kvstore.types import ModelLayout, Offer
from tests.kvstore.prefixes import (
    BLOCK,
    CHUNK,
    FOUR,
    LAYOUT,
    MODEL,
    ROOT,
    Engine,
    config,
    fill,
    gated,
    kv_of,
    shared,
    soon,
    tokens,
    until,
)
from turnout.errors import TurnoutError
from turnout.types import Sharing


async def test_cold_finds_nothing_warm_everything_and_so_does_another_process(store: RedisStore, opened: Any) -> None:
    first, second = Engine(opened(store)), Engine(opened(store))
    assert (await first.serve(FOUR)).chunks == []
    for engine in (first, second):
        found = await engine.find(FOUR)
        assert (found.start, len(found.chunks), found.lossy, set(found.tiers)) == (0, 4, False, {"redis"})


async def test_forks_share_what_they_have_in_common(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    fork = FOUR[: 2 * CHUNK + 3] + tokens(20, seed=9)
    assert len((await Engine(opened(store)).find(fork)).chunks) == 2


async def test_the_host_tier_serves_what_it_has_and_redis_the_rest(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store, host_memory_bytes=1 << 20))
    await engine.serve(FOUR[: 2 * CHUNK + 1])
    await fill(store, FOUR)
    assert (await engine.find(FOUR)).tiers == ("memory", "memory", "redis", "redis")
    assert (await engine.find(FOUR)).tiers == ("memory",) * 4
    stats = engine.store.stats()
    assert stats.hits == {"memory": 6, "redis": 2}
    assert stats.tokens == {"memory": 6 * CHUNK, "redis": 2 * CHUNK}
    assert stats.memory_bytes == 4 * kv_of([1]).numel() * 4


async def test_a_hole_in_memory_is_filled_from_redis(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store, host_memory_bytes=1 << 20))
    await engine.serve(FOUR)
    memory = engine.store.memory
    first = engine.store.chain(Sharing.private("alice")).links(FOUR, 1)[0]
    memory._drop(first.namespace, (first.digest, "exact"))
    assert (await engine.find(FOUR)).tiers == ("redis", "memory", "memory", "memory")
    memory._drop(first.namespace, (first.digest, "exact"))
    encodings = engine.store.encodings
    assert store.delete(encodings.keys(first, encodings.all[0]), soon()) == 1
    assert (await engine.find(FOUR)).chunks == []


async def test_what_the_engine_holds_is_not_looked_for(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    found = await Engine(opened(store)).find(FOUR, held=2 * CHUNK + BLOCK)
    assert (found.start, len(found.chunks)) == (2 * CHUNK, 2)


@pytest.mark.parametrize(
    ("length", "chunks"), [(CHUNK - 1, 0), (CHUNK, 1), (CHUNK + 1, 1), (2 * CHUNK, 2), (2 * CHUNK + BLOCK, 2)]
)
async def test_only_full_chunks_with_a_block_to_use_are_fetched(
    store: RedisStore, opened: Any, length: int, chunks: int
) -> None:
    await fill(store, FOUR)
    assert len((await Engine(opened(store)).find(FOUR[:length])).chunks) == chunks


async def test_a_prompt_of_one_block_is_always_computed(store: RedisStore, opened: Any) -> None:
    layout = ModelLayout({"weights": "w"}, 3, 2, 4, torch.float32, CHUNK)
    engine = Engine(opened(store, layout=layout), layout=layout)
    await engine.serve(FOUR)
    assert len((await engine.find(FOUR[: 2 * CHUNK])).chunks) == 1
    assert (await engine.find(FOUR[:CHUNK])).chunks == []


@pytest.mark.parametrize("missing", [0, 1, 3])
async def test_a_gap_ends_what_is_found(store: RedisStore, opened: Any, missing: int) -> None:
    await fill(store, FOUR)
    engine = Engine(opened(store))
    encodings = engine.store.encodings
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[missing]
    assert store.delete(encodings.keys(link, encodings.all[0]), soon()) == 1
    assert len((await engine.find(FOUR)).chunks) == missing


async def test_another_model_of_the_same_name_finds_nothing(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    changed = ModelLayout({**LAYOUT.fingerprint_parts, "weights": "new"}, 3, 2, 4, torch.float32, BLOCK)
    engine = Engine(opened(store, layout=changed), layout=changed)
    assert (await engine.store.fetch(engine.wanted(FOUR))).chunks == []


async def test_a_raised_epoch_finds_nothing_from_before(store: RedisStore, opened: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(ROOT.hex())
    (tmp_path / "key").chmod(0o600)
    for epoch, chunks in ((0, 0), (0, 4), (5, 0), (5, 4), (0, 4)):
        keyring = open_keyring(config(root_key_file=str(tmp_path / "key"), epoch=epoch))
        engine = Engine(opened(store, keyring=keyring))
        assert len((await engine.serve(FOUR)).chunks) == chunks


async def test_layer_groups_come_back_as_one_chunk(store: RedisStore, opened: Any) -> None:
    layout = ModelLayout({"weights": "wide"}, 3, 64, 512, torch.float32, BLOCK)  # 1 MiB a layer of four tokens
    recording = RecordingStore(store)
    engine = Engine(opened(recording, layout=layout, chunk_tokens=CHUNK), layout=layout)
    assert len(engine.store.encodings.groups) == 3
    prompt = tokens(CHUNK + 1)
    await engine.serve(prompt)
    assert len((await engine.find(prompt)).chunks) == 1
    assert [len(call.keys) for call in recording.named("read")] == [3]


async def test_exact_requests_read_no_lossy_codec(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR, codecs=("int8",))
    engine = Engine(opened(store, codecs=("int8",), host_memory_bytes=1 << 20))
    assert (await engine.find(FOUR)).chunks == []
    found = await engine.find(FOUR, lossy=True)
    assert (len(found.chunks), found.lossy) == (4, True)
    assert (await engine.find(FOUR)).chunks == []  # what memory has now is not exact either
    assert (await engine.find(FOUR, lossy=True)).tiers == ("memory",) * 4


async def test_a_lossy_request_that_gets_exact_chunks_is_not_tainted(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR, codecs=("raw", "int8"))
    found = await Engine(opened(store, codecs=("raw", "int8"))).find(FOUR, lossy=True)
    assert (len(found.chunks), found.lossy) == (4, False)


@pytest.mark.parametrize(("residual", "chunks"), [(0, 4), (1, 4), (2, 3), (9, 3), (10, 2), (25, 1), (26, 0), (99, 0)])
async def test_the_end_of_a_prompt_is_not_read_from_a_lossy_codec(
    store: RedisStore, opened: Any, residual: int, chunks: int
) -> None:
    """33 tokens in chunks of 8: the last chunk ends 1 token before the prompt's end, the one before 9."""
    await fill(store, FOUR, codecs=("int8",))
    engine = Engine(opened(store, codecs=("int8",), residual_tokens=residual, host_memory_bytes=1 << 20))
    for tier in ("redis", "memory"):
        found = await engine.find(FOUR, lossy=True)
        assert (found.tiers, found.lossy) == ((tier,) * chunks, chunks > 0)


async def test_the_end_of_a_prompt_is_read_where_exact_values_are_there(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR, codecs=("raw",))
    found = await Engine(opened(store, codecs=("raw", "int8"), residual_tokens=32)).find(FOUR, lossy=True)
    assert (len(found.chunks), found.lossy) == (4, False)


async def test_a_codec_is_part_of_the_key(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR, codecs=("raw",))
    assert (await Engine(opened(store, codecs=("int8",))).find(FOUR, lossy=True)).chunks == []


async def test_what_is_seen_once_is_not_stored(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store, admission="second"))
    await engine.serve(FOUR)
    assert engine.offered == 0
    await engine.serve(FOUR)
    assert engine.offered == 4
    assert len((await engine.find(FOUR)).chunks) == 4


async def test_a_closed_store_finds_and_takes_nothing(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    engine = Engine(opened(store))
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 1)[0]
    await engine.store.close()
    assert (await engine.find(FOUR)).chunks == []
    assert not engine.store.wants(link)
    ended: list[int] = []
    assert not engine.store.offer(Offer(link, "alice", lambda: kv_of(FOUR[:CHUNK]), lambda: ended.append(1)))
    assert ended == [1]
    assert engine.store.stats().dropped == {"closed": 1}


async def test_closing_while_requests_look_up_ends_them(store: RedisStore, opened: Any) -> None:
    await fill(store, FOUR)
    slow = gated(store)
    stores = opened(slow)
    engine = Engine(stores)
    task = asyncio.create_task(engine.find(FOUR))
    await until(lambda: slow.waiting)
    slow.gate.set()
    await asyncio.to_thread(stores.close)
    assert len((await task).chunks) <= 4


async def test_without_redis_the_host_tier_works_alone(opened: Any) -> None:
    engine = Engine(opened(None, host_memory_bytes=1 << 20))
    await engine.serve(FOUR)
    assert (await engine.find(FOUR)).tiers == ("memory",) * 4
    assert engine.store.health() == "off"
    nothing = Engine(opened(None))
    await nothing.serve(FOUR)
    assert nothing.offered == 0


async def test_accounts_say_what_tenants_found(store: RedisStore, opened: Any) -> None:
    stores = opened(store)
    await Engine(stores, "ann").serve(FOUR)
    await Engine(stores, "ann").find(FOUR)
    await Engine(stores, "bob").find(FOUR)
    tenants = Engine(stores).store.stats().tenants
    ann, bob = tenants["ann"], tenants["bob"]
    assert (ann.lookups, ann.hits, ann.tokens_asked, ann.tokens_found) == (2, 1, 64, 32)
    assert (bob.lookups, bob.hits, bob.tokens_found, bob.bytes_written) == (1, 0, 0, 0)
    assert ann.bytes_written > 0


def test_an_unreachable_redis_is_a_warning_and_the_store_works_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text(ROOT.hex())
    (tmp_path / "key").chmod(0o600)
    settings = config(url=f"unix://{tmp_path}/nobody", root_key_file=str(tmp_path / "key"))
    stores = build_stores(settings, {MODEL: LAYOUT})
    try:
        assert "kvstore.url" in caplog.text
        assert stores.sharing("alice", [1, 2]) == Sharing.private("alice")
    finally:
        stores.close()


def test_unknown_models_and_codecs_are_refused() -> None:
    with shared(None) as stores, pytest.raises(TurnoutError, match="'other' is not known; available: m"):
        stores.of("other")
    with pytest.raises(TurnoutError, match="codecs"):
        build_stores(config(codecs=("zip",)), {MODEL: LAYOUT}, keyring=Keyring(ROOT))


def test_chunks_are_whole_blocks_of_about_a_mebibyte() -> None:
    def layout(layers: int, heads: int, width: int, block: int) -> ModelLayout:
        return ModelLayout({"weights": "w"}, layers, heads, width, torch.bfloat16, block)

    assert choose_chunk_tokens(layout(24, 2, 64, 16)) == 64  # 12 KiB a token
    assert choose_chunk_tokens(layout(28, 4, 128, 16)) == 16
    assert choose_chunk_tokens(layout(2, 1, 16, 16)) == 256
    assert choose_chunk_tokens(layout(2, 1, 16, 12)) == 192
    large = layout(80, 8, 128, 16)
    assert choose_chunk_tokens(large) == 16
    groups = layer_groups(large, 16)
    assert sum(group.layers for group in groups) == 80
    assert all(group.raw_bytes <= 2 << 20 for group in groups)
    assert [group.first_layer for group in groups] == [sum(g.layers for g in groups[:i]) for i in range(len(groups))]
    for wrong in (24, 8, 512):
        with pytest.raises(TurnoutError, match=r"kvstore\.chunk_tokens: must be one of 16, 32, 64, 128, 256"):
            choose_chunk_tokens(layout(24, 2, 64, 16), wrong)


async def test_what_memory_serves_does_not_expire_in_redis(store: RedisStore, opened: Any) -> None:
    engine = Engine(opened(store, host_memory_bytes=1 << 20))
    await engine.serve(FOUR)
    encodings = engine.store.encodings
    links = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)
    keys = [key for link in links for key in encodings.keys(link, encodings.all[0])]
    assert store.touch(keys, 60_000, soon()) == [True] * 4
    assert (await engine.find(FOUR)).tiers == ("memory",) * 4
    assert await engine.store.settle()
    lives = [store.script("return redis.call('pttl', KEYS[1])", [key], [], soon()) for key in keys]
    assert min(lives) > 3_000_000


async def test_what_was_stored_at_once_is_looked_for_though_the_tenants_look_ups_did_not_pay(
    store: RedisStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(opened(store))
    monkeypatch.setattr(engine.store.fetcher.gate, "pays", lambda tenant, compute_s: False)
    assert (await engine.serve(FOUR)).chunks == []
    assert len((await engine.find(FOUR)).chunks) == 4


async def test_a_full_hit_leaves_its_connection_to_the_next_look_up(store: RedisStore, opened: Any) -> None:
    def connections() -> int:
        stats = store.script("return redis.call('info', 'stats')", [], [], soon()).decode()
        return int(stats.partition("total_connections_received:")[2].split()[0])

    engine = Engine(opened(store))
    await engine.serve(FOUR)
    before = connections()
    for _ in range(8):
        assert len((await engine.find(FOUR)).chunks) == 4
    assert connections() - before <= 2  # as many as the store may have open
