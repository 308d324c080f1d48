"""What a spoilt value or answer leaves behind: nothing that lasts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvstore import value as values
from kvstore.keys import Keyring
from kvstore.lookup import reader
from kvstore.redis.redis_store import RedisStore
from kvstore.scripts import CLAIM
from kvstore.tenants.encrypted_document import Sealer
from kvstore.tenants.manifest import PROOF
from kvstore.tenants.manifest import ROOT as CLAIMED
from kvstore.tenants.registry import Prefix, Registry
from kvstore.value import OVERHEAD_BYTES
from tests.kvstore.prefixes import CHUNK, FOUR, LAYOUT, MODEL, ROOT, Engine, fill, soon, tokens, until
from tests.kvstore.profiled import alike_kv, profiles_of
from turnout.types import Sharing

GET = "return redis.call('get', KEYS[1])"
SET = "return redis.call('set', KEYS[1], ARGV[1])"


def turned(value: bytes) -> bytes:
    return value[:-1] + bytes([value[-1] ^ 1])


def over_long(value: bytes) -> bytes:
    return value + bytes(1 << 20)  # it is not even received


@pytest.mark.parametrize("spoil", [turned, over_long])
async def test_a_value_that_was_refused_is_replaced(
    store: RedisStore, opened: Any, spoil: Callable[[bytes], bytes]
) -> None:
    """A spoiled value is refused, read again and kept alive by every request, and no other may be written."""
    engine = Engine(opened(store))
    await engine.serve(FOUR)
    encodings = engine.store.encodings
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[1]
    key = encodings.keys(link, encodings.all[0])[0]
    store.script(SET, [key], [spoil(store.script(GET, [key], [], soon()))], soon())
    assert len((await engine.find(FOUR)).chunks) == 1
    for _ in range(3):
        await engine.serve(FOUR)
    assert len((await engine.find(FOUR)).chunks) == 4


async def test_what_is_refused_in_one_form_is_read_in_another(
    store: RedisStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "REMOVE_S", 5.0)  # removed in one try, which a busy machine may take longer for
    engine = Engine(opened(store, codecs=("raw", "int8")))
    await engine.serve(FOUR)
    encodings = engine.store.encodings
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[1]
    key = encodings.keys(link, encodings.all[0])[0]
    store.script(SET, [key], [turned(store.script(GET, [key], [], soon()))], soon())
    found = await engine.find(FOUR, lossy=True)
    assert (len(found.chunks), found.lossy) == (4, True)
    assert engine.store.stats().faults == {"tag": 1}
    await until(lambda: not store.count_prefix([key], soon()))  # and it was removed all the same


async def test_values_of_another_profile_lie_beside_ours(store: RedisStore, opened: Any) -> None:
    """A value that could not be decoded would be refused and kept alive by every request, and never be replaced."""
    one, other = (profiles_of(alike_kv(200, seed, width=4)) for seed in (1, 2))
    for profiles, expected in ((one, [0, 4]), (other, [0, 4]), (one, [4])):
        layout = replace(LAYOUT, profiles=profiles)
        engine = Engine(opened(store, layout=layout, codecs=("cachegen-0",)), layout=layout)
        for count in expected:
            found = await engine.store.fetch(engine.wanted(FOUR, lossy=True))
            assert len(found.chunks) == count
            engine.compute(FOUR, count)
            assert await engine.store.settle()
        assert engine.store.stats().faults == {}


async def test_values_that_compress_differently_are_of_the_same_few_lengths(store: RedisStore, opened: Any) -> None:
    layout = replace(LAYOUT, profiles=profiles_of(alike_kv(200, 1, width=4)))
    engine = Engine(opened(store, layout=layout, codecs=("cachegen-0",)), layout=layout)
    for seed in range(4):
        engine.compute(tokens(33, seed))
    assert await engine.store.settle()
    encodings = engine.store.encodings
    codec: Any = encodings.all[0].codec
    most, usual = (bound(encodings.groups[0]) for bound in (codec.max_bytes, codec.usual_bytes))
    size = "return redis.call('strlen', KEYS[1])"
    links = [
        link for seed in range(4) for link in engine.store.chain(Sharing.private("alice")).links(tokens(33, seed), 4)
    ]
    lengths = {
        store.script(size, encodings.keys(link, encodings.all[0]), [], soon()) - OVERHEAD_BYTES for link in links
    }
    assert lengths <= {*range(usual, most, -(-most // 16)), most}


async def test_values_of_a_later_format_lie_beside_ours(
    store: RedisStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(values, "VERSION", values.VERSION + 1)
        await fill(store, FOUR)
    engine = Engine(opened(store))
    assert (await engine.serve(FOUR)).chunks == []
    assert len((await engine.find(FOUR)).chunks) == 4
    assert engine.store.stats().faults == {}


class Confused:
    """One answer to the claim of the root key is another command's."""

    def __init__(self, inner: Any, reply: Any) -> None:
        self._inner, self.reply, self.left, self.done = inner, reply, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def script(self, text: str, *args: Any) -> Any:
        if text == CLAIM and self.left:
            self.left, self.done = self.left - 1, self.done + 1
            return self.reply
        return self._inner.script(text, *args)


@pytest.mark.parametrize("reply", [b"x" * 60, 1, [b"a"], b""])
async def test_maintenance_outlives_one_answer_that_is_not_its_own(store: RedisStore, opened: Any, reply: Any) -> None:
    confused = Confused(store, reply)
    maintenance = opened(confused).maintenance
    assert maintenance is not None
    confused.left = 1
    maintenance._due = dict.fromkeys(maintenance._due, 0.0)
    await until(lambda: confused.done, 10.0)
    await until(lambda: not maintenance._thread.is_alive() or min(maintenance._due.values()) > 0, 10.0)
    assert maintenance._thread.is_alive()


async def test_maintenance_continues_when_the_right_root_key_is_back(
    store: RedisStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for period in ("TICK_S", "REFRESH_S", "KEEP_S"):
        monkeypatch.setattr(f"kvstore.maintenance.{period}", 0.01)
    stores = opened(store)
    right = store.script(GET, [CLAIMED], [], soon())
    store.script(SET, [CLAIMED], [Sealer(Keyring(bytes(32))).seal(CLAIMED, PROOF)], soon())
    await until(lambda: stores.of(MODEL).stats().faults.get("root_key"))  # three wrong ones in a row
    store.script(SET, [CLAIMED], [right], soon())
    Registry(store, Sealer(Keyring(ROOT))).put(Prefix("p", "public", "", {"t": tuple(FOUR[:CHUNK])}), soon())
    await until(lambda: stores.sharing("alice", FOUR) != Sharing.private("alice"))
    assert stores.maintenance._thread.is_alive()
