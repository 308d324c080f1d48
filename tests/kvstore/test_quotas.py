from __future__ import annotations

import time
from typing import Any

import pytest

from kvstore.base import ByteStore, StoreFault
from kvstore.fakes import PassOn
from kvstore.keys import Keyring
from kvstore.redis.redis_store import RedisStore
from kvstore.scripts import RECORD
from kvstore.tenants.encrypted_document import Sealer
from kvstore.tenants.quotas import Held, Quotas
from kvstore.tenants.registry import Prefix, Registry
from tests.kvstore.prefixes import FOUR, ROOT, Engine, shared, soon, tokens, until
from turnout.kvstore_config import TenantSharing
from turnout.types import Namespace, Sharing

ALICE, BOB = Namespace("private", "alice"), Namespace("private", "bob")
SIZE = 100


class Wall:
    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


class StoreAdmin:
    """Quotas with a clock of their own, and values to go with them."""

    def __init__(self, store: ByteStore, limit: int | None) -> None:
        self.store = store
        self.wall = Wall()
        self.quotas = Quotas(store, Keyring(ROOT), lambda _: limit, 60_000, self.wall)

    def write(self, names: list[str], namespace: Namespace = ALICE, used: tuple[str, ...] = ()) -> int:
        self.wall.now += 1.0
        for name in names:
            self.store.write(key(name), [bytes(SIZE)], 60_000, soon())
        written = [(key(name), SIZE) for name in names]
        return self.quotas.record(namespace, written, [(key(name), 0) for name in used], soon())

    def there(self, names: str) -> str:
        return "".join(name for name in names if self.store.count_prefix([key(name)], soon()))

    def held(self, namespace: Namespace = ALICE) -> Held:
        return self.quotas.held(namespace, soon())


def key(name: str) -> bytes:
    return b"to1:test:" + name.encode()


def test_bytes_and_values_are_counted_by_namespace(store: RedisStore) -> None:
    desk = StoreAdmin(store, None)
    desk.write(["a", "b"])
    desk.write(["c"], BOB)
    assert desk.held() == Held(2 * SIZE, 2)
    assert desk.held(BOB) == Held(SIZE, 1)
    assert desk.held(Namespace("group", "alice")) == Held(0, 0)


def test_writing_again_counts_once(store: RedisStore) -> None:
    desk = StoreAdmin(store, None)
    for _ in range(3):
        desk.write(["a"])
    assert desk.held() == Held(SIZE, 1)


def test_over_the_quota_the_oldest_of_the_same_namespace_go(store: RedisStore) -> None:
    desk = StoreAdmin(store, 3 * SIZE)
    desk.write(["x"], BOB)
    assert [desk.write([name]) for name in "abcde"] == [0, 0, 0, 1, 1]
    assert desk.there("abcdex") == "cdex"
    assert desk.held() == Held(3 * SIZE, 3)
    assert desk.held(BOB) == Held(SIZE, 1)


def test_what_was_used_lately_stays(store: RedisStore) -> None:
    desk = StoreAdmin(store, 3 * SIZE)
    for name in "abc":
        desk.write([name])
    desk.write(["d"], used=("a",))
    assert desk.there("abcd") == "acd"


def test_what_is_used_but_not_there_is_not_counted(store: RedisStore) -> None:
    desk = StoreAdmin(store, None)
    desk.write(["a"], used=("gone",))
    assert desk.held() == Held(SIZE, 1)


def test_of_a_chain_the_tail_goes_first(store: RedisStore) -> None:
    desk = StoreAdmin(store, 3 * SIZE)
    for depth, name in enumerate("abcde"):
        desk.write([name], used=tuple("abcde"[:depth]))
    assert desk.there("abcde")[:2] == "ab"


def test_what_expired_is_counted_no_more(store: RedisStore) -> None:
    desk = StoreAdmin(store, None)
    desk.write(["a"])
    desk.wall.now += 61.0
    desk.write(["b"])
    assert desk.held() == Held(SIZE, 1)


def test_a_chunk_larger_than_the_quota_may_not_be_written(store: RedisStore) -> None:
    assert not StoreAdmin(store, 0).quotas.may_write(ALICE, 1)
    assert not StoreAdmin(store, 99).quotas.may_write(ALICE, 100)
    assert StoreAdmin(store, 100).quotas.may_write(ALICE, 100)
    assert StoreAdmin(store, None).quotas.may_write(ALICE, 1 << 40)


def test_a_sweep_finds_what_redis_dropped_and_mends_the_count(store: RedisStore) -> None:
    desk = StoreAdmin(store, None)
    desk.write(list("abcdefgh"))
    assert desk.quotas.sweep(ALICE, soon()) == 0.0
    store.delete([key("b"), key("c"), key("h")], soon())
    assert desk.held().values == 8
    assert desk.quotas.sweep(ALICE, soon()) == 3 / 8
    assert desk.held() == Held(5 * SIZE, 5)
    assert desk.quotas.sweep(ALICE, soon()) == 0.0


def test_a_sweep_of_nothing_finds_nothing(store: RedisStore) -> None:
    assert StoreAdmin(store, None).quotas.sweep(ALICE, soon()) == 0.0


def test_flushing_removes_one_namespace(store: RedisStore) -> None:
    desk = StoreAdmin(store, None)
    desk.write(list("abc"))
    desk.write(["x"], BOB)
    assert desk.quotas.flush(ALICE, soon()) == 3
    assert desk.there("abcx") == "x"
    assert desk.held() == Held(0, 0)
    assert desk.quotas.flush(ALICE, soon()) == 0


async def test_nothing_is_left_of_a_namespace_that_nobody_uses(store: RedisStore) -> None:
    quotas = Quotas(store, Keyring(ROOT), lambda _: None, 200)
    assert store.write(key("a"), [bytes(SIZE)], 200, soon())
    quotas.record(ALICE, [(key("a"), SIZE)], [], soon())
    index = quotas._keys(ALICE)
    lives = [store.script("return redis.call('pttl', KEYS[1])", [each], [], soon()) for each in (key("a"), *index)]
    assert lives[0] < min(lives[1:])  # it is known for as long as it is there
    await until(lambda: store.script("return redis.call('dbsize')", [], [], soon()) == 0)


class Forgetful(PassOn):
    """Batches that are not entered, and values that are not removed, as often as told."""

    unentered = unremoved = 0

    def script(self, text: str, keys: Any, args: Any, deadline: float) -> Any:
        if text == RECORD and self.unentered:
            self.unentered -= 1
            raise StoreFault("late", "planned")
        return super().script(text, keys, args, deadline)

    def delete(self, keys: Any, deadline: float) -> int:
        if self.unremoved:
            self.unremoved -= 1
            raise StoreFault("late", "planned")
        return super().delete(keys, deadline)


@pytest.mark.parametrize("use", ["found", "pinned"])
async def test_what_the_index_missed_is_entered_when_it_is_used(store: RedisStore, opened: Any, use: str) -> None:
    """Else each use would renew its life, and no flush and no quota would ever reach it."""
    forgetful = Forgetful(store)
    stores = opened(forgetful)
    engine, quotas = Engine(stores), stores.maintenance.context.quotas
    forgetful.unentered = 4
    await engine.serve(FOUR)
    assert quotas.held(ALICE, soon()) == Held(0, 0)
    if use == "found":
        assert len((await engine.find(FOUR)).chunks) == 4
        assert await engine.store.settle()
    else:
        Registry(store, Sealer(Keyring(ROOT))).put(Prefix("p", "private", "alice", {"t": tuple(FOUR)}), soon())
        stores.refresh()
        stores.maintenance.keep()
    assert quotas.held(ALICE, soon()).values == 4
    assert quotas.flush(ALICE, soon()) == 4
    assert (await Engine(opened(store)).find(FOUR)).chunks == []


@pytest.mark.parametrize("evicted", [0, 1])
def test_half_an_index_is_none(store: RedisStore, evicted: int) -> None:
    desk = StoreAdmin(store, 2 * SIZE)
    desk.write(["a", "b"])
    assert store.delete([desk.quotas._keys(ALICE)[evicted]], soon()) == 1
    assert desk.write(["c"]) == 0
    assert desk.held() == Held(SIZE, 1)


def test_what_is_over_the_quota_is_known_until_it_is_removed(store: RedisStore) -> None:
    forgetful = Forgetful(store)
    desk = StoreAdmin(forgetful, 2 * SIZE)
    desk.write(["a", "b"])
    forgetful.unremoved = 1
    with pytest.raises(StoreFault):
        desk.write(["c"])
    assert desk.held() == Held(3 * SIZE, 3)
    assert desk.write([]) == 1
    assert len(desk.there("abc")) == 2
    assert desk.held() == Held(2 * SIZE, 2)


async def test_of_what_is_pinned_the_ends_go_first(store: RedisStore, opened: Any) -> None:
    stores = opened(store)
    engine = Engine(stores)
    for seed in (1, 2):
        await engine.serve(tokens(33, seed))
        Registry(store, Sealer(Keyring(ROOT))).put(
            Prefix(f"p{seed}", "private", "alice", {"t": tuple(tokens(33, seed))}), soon()
        )
    stores.refresh()
    stores.maintenance.keep()
    encodings, quotas = engine.store.encodings, stores.maintenance.context.quotas
    depths = {
        key: link.index
        for seed in (1, 2)
        for link in engine.store.chain(Sharing.private("alice")).links(tokens(33, seed), 4)
        for key in encodings.keys(link, encodings.all[0])
    }
    order = store.script("return redis.call('zrange', KEYS[1], 0, -1)", quotas._keys(ALICE)[:1], [], soon())
    assert [depths[key] for key in order] == [3, 3, 2, 2, 1, 1, 0, 0]


async def test_a_tenant_stays_within_its_quota_and_keeps_the_heads_of_its_prompts(store: RedisStore) -> None:
    quota = 5 * 1300
    with shared(store, tenants={"alice": TenantSharing(quota_bytes=quota)}) as stores:
        alice, bob = Engine(stores), Engine(stores, "bob")
        for seed in range(4):
            await alice.serve(tokens(33, seed))
            await bob.serve(tokens(33, seed))
        quotas = Quotas(store, Keyring(ROOT), lambda _: None, 60_000)
        assert 0 < quotas.held(ALICE, soon()).bytes <= quota
        assert quotas.held(BOB, soon()).values == 16
        found = await alice.find(tokens(33, 3))
        assert len(found.chunks) >= 2
        assert len((await bob.find(tokens(33, 0))).chunks) == 4


async def test_a_quota_of_nothing_bars_from_writing_not_from_reading(store: RedisStore) -> None:
    team = {"group": "team", "policy": "group"}
    tenants = {"alice": TenantSharing(**team, quota_bytes=0), "bob": TenantSharing(**team)}
    with shared(store, tenants=tenants) as stores:
        alice, bob = Engine(stores), Engine(stores, "bob")
        await alice.serve(tokens(33))
        assert stores.of("m").stats().dropped == {"quota": 4}
        assert alice.freed == 4
        assert (await bob.serve(tokens(33))).chunks == []
        assert len((await alice.find(tokens(33))).chunks) == 4


async def test_a_quota_of_nothing_leaves_memory_to_others(store: RedisStore) -> None:
    tenants = {"alice": TenantSharing(quota_bytes=0)}
    with shared(store, tenants=tenants, host_memory_bytes=1 << 20) as stores:
        await Engine(stores).serve(FOUR)
        stats = stores.of("m").stats()
        assert (stats.memory_bytes, stats.dropped) == (0, {"quota": 4})
        await Engine(stores, "bob").serve(FOUR)
        assert stores.of("m").stats().memory_bytes > 0


@pytest.mark.parametrize("memory", [0, 1 << 20])
async def test_what_is_found_counts_as_used_whichever_tier_it_came_from(store: RedisStore, memory: int) -> None:
    tenants = {"alice": TenantSharing(quota_bytes=8 * 1700)}  # room for two prompts
    with shared(store, tenants=tenants, host_memory_bytes=memory) as stores, shared(store) as others:
        alice = Engine(stores)
        for seed in (1, 2):
            await alice.serve(tokens(33, seed))
        written = time.time()
        await until(lambda: time.time() > written + 0.02)  # times of use count in milliseconds
        assert len((await alice.find(tokens(33, 1))).chunks) == 4
        assert await alice.store.settle()
        await alice.serve(tokens(33, 3))
        found = [len((await Engine(others).find(tokens(33, seed))).chunks) for seed in (1, 2, 3)]
        assert found == [4, 0, 4]


@pytest.mark.parametrize("use", ["found", "continued", "pinned"])
async def test_what_is_used_for_longer_than_it_lives_can_still_be_flushed(
    store: RedisStore, opened: Any, use: str
) -> None:
    """Without any quota: what the index forgot would survive a flush."""
    stores = opened(store, ttl_s=3600.0)
    engine, quotas, wall = Engine(stores), stores.maintenance.context.quotas, Wall()
    quotas._wall = wall
    await engine.serve(FOUR)
    wall.now += 2000.0
    if use == "found":
        assert len((await engine.find(FOUR)).chunks) == 4
    elif use == "continued":
        assert engine.compute(tokens(41), start=4) == 1
    else:
        Registry(store, Sealer(Keyring(ROOT))).put(Prefix("p", "private", "alice", {"t": tuple(FOUR)}), soon())
        stores.maintenance.keep()
    assert await engine.store.settle()
    wall.now += 2000.0
    await engine.serve(tokens(33, seed=9))  # its writes rid the index of what expired
    assert quotas.flush(ALICE, soon()) == 8 + (use == "continued")
    assert (await engine.find(FOUR)).chunks == []
