"""Several nodes: a cluster whose slots move and whose nodes fail, and sentinels that name another master."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis.crc import key_slot

from kvstore.base import StoreFault
from kvstore.keys import Keyring
from kvstore.redis.checks import check_address
from kvstore.redis.nodes import NodeAddress, parse_url
from kvstore.redis.redis_store import RedisStore
from kvstore.redis.resp import ErrorReply
from kvstore.redis.topology import Redirect
from kvstore.tenants.quotas import Quotas
from tests.kvstore.landing import LIFE_MS, read, soon
from tests.kvstore.servers import RedisProcess, cluster_url, redis_cluster, redis_watched, until
from turnout.types import Namespace


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[RedisProcess]]:
    with redis_cluster(tmp_path) as nodes:
        yield nodes


def owner_of(nodes: list[RedisProcess], key: bytes) -> int:
    return min(key_slot(key) * len(nodes) // 16384, len(nodes) - 1)


def test_redirects_are_read_and_nonsense_is_not() -> None:
    asked = NodeAddress("10.0.0.1", 1)
    assert Redirect.of(ErrorReply("MOVED 5 10.0.0.2:7000"), asked) == Redirect(5, NodeAddress("10.0.0.2", 7000), False)
    assert Redirect.of(ErrorReply("ASK 5 :7000"), asked) == Redirect(5, NodeAddress("10.0.0.1", 7000), True)
    assert Redirect.of(ErrorReply("MOVED 5 ::1:7000"), asked) == Redirect(5, NodeAddress("::1", 7000), False)
    for text in ("MOVED", "MOVED x h:1", "MOVED 99999 h:1", "MOVED 5 h:x", "ERR 5 h:1"):
        assert Redirect.of(ErrorReply(text), asked) is None
    assert Redirect.of(b"MOVED 5 h:1", asked) is None


def test_a_moving_slot_is_followed_and_a_dead_node_is_misses(cluster: list[RedisProcess]) -> None:
    store = RedisStore(parse_url(cluster_url(cluster)))
    keys = [b"to1:%d" % i for i in range(60)]
    assert len({key_slot(key) for key in keys}) == 60
    for key in keys:
        assert store.write(key, [key * 50], LIFE_MS, soon())
    owners = [owner_of(cluster, key) for key in keys]
    owners[3] = _while_a_slot_moves(store, cluster, keys)
    assert read(store, keys) == [key * 50 for key in keys]
    _after_a_node_died(store, cluster, keys, owners)
    store.close()


def _while_a_slot_moves(store: RedisStore, cluster: list[RedisProcess], keys: list[bytes]) -> int:
    """The slot of the fourth key goes to another node: first as an offer, then for good; which node."""
    moving = keys[3]
    slot, old = key_slot(moving), owner_of(cluster, moving)
    new = (old + 1) % len(cluster)
    with closing(cluster[old].client()) as source, closing(cluster[new].client()) as target:
        ids = [each.execute_command("CLUSTER MYID") for each in (source, target)]
        target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        there = cluster[new].endpoint
        source.execute_command("MIGRATE", there.host, there.port, moving, 0, 5000)
        # ASK: the key is already there, the slot is not.
        assert store.count_prefix(keys, soon()) == len(keys)
        assert read(store, keys) == [key * 50 for key in keys]
        assert store.touch([moving], LIFE_MS, soon()) == [True]
        assert store.script("return redis.call('STRLEN', KEYS[1])", [moving], [], soon()) == len(moving) * 50
        for each in (target, source):
            each.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
    # MOVED: first met by each of these, on a map that is out of date.
    assert read(store, keys) == [key * 50 for key in keys]
    fresh = RedisStore(parse_url(cluster_url(cluster)))
    assert fresh.count_prefix(keys, soon()) == len(keys)
    fresh.close()
    assert not store.write(moving, [b"again"], LIFE_MS, soon())
    return new


def _after_a_node_died(store: RedisStore, cluster: list[RedisProcess], keys: list[bytes], owners: list[int]) -> None:
    dead = owners[20]
    lost = [owner == dead for owner in owners]
    first = lost.index(True)
    cluster[dead].kill()
    for _ in range(5):
        try:
            assert read(store, keys) == [key * 50 for key in keys[:first]]
            assert store.count_prefix(keys, soon()) <= first
        except StoreFault as fault:
            assert first == 0, fault  # only when nothing comes before the loss
    kept = [key for key, gone in zip(keys, lost, strict=True) if not gone]
    assert read(store, kept) == [key * 50 for key in kept]
    assert store.health() == "degraded"
    assert store.delete(kept, soon()) == len(kept)


def test_a_flush_that_does_not_reach_every_node_fails_and_forgets_nothing(tmp_path: Path) -> None:
    alice = Namespace("private", "alice")
    with redis_cluster(tmp_path, 2) as nodes:
        store = RedisStore(parse_url(cluster_url(nodes)))
        quotas = Quotas(store, Keyring(bytes(32)), lambda _: None, LIFE_MS)
        keys = [b"to1:%d" % i for i in range(40)]
        for key in keys:
            assert store.write(key, [b"x"], LIFE_MS, soon())
        quotas.record(alice, [(key, 1) for key in keys], [], soon())
        index, _ = quotas._keys(alice)
        nodes[1 - owner_of(nodes, index)].kill()
        with pytest.raises(StoreFault):
            quotas.flush(alice, soon())
        assert quotas.held(alice, soon()).values == 40
        store.close()


def test_a_master_that_died_is_replaced_by_the_one_that_the_sentinels_name(tmp_path: Path) -> None:
    with redis_watched(tmp_path) as watched:
        found = check_address(parse_url(watched.url))
        assert found.reachable
        store = RedisStore(parse_url(watched.url), breaker_cooldown_s=0.2)
        assert store.write(b"to1:before", [b"x"], LIFE_MS, soon())
        with closing(watched.replica.client()) as client:
            until(lambda: client.exists("to1:before") == 1)
        watched.master.kill()

        def written() -> bool:
            try:
                return store.write(b"to1:after", [b"y"], LIFE_MS, soon(0.5))
            except StoreFault:
                return False

        until(written, 90)  # a sentinel that was held up does nothing for half a minute
        assert read(store, [b"to1:before", b"to1:after"]) == [b"x", b"y"]
        store.close()


def test_sentinels_that_do_not_know_the_service_are_a_fault_at_once_and_a_warning_at_start(tmp_path: Path) -> None:
    url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/nobody"
    store = RedisStore(parse_url(url))
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises(StoreFault) as caught:
            store.count_prefix([b"k"], soon())
        assert caught.value.kind == "unreachable"
    assert time.monotonic() - began < 5
    assert store.health() == "off"
    found = check_address(parse_url(url))
    assert not found.reachable
    assert "'nobody'" in found.warnings[0]
    store.close()
