"""What a spoilt value or answer leaves behind: nothing that lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.keys import Keyring
from kvstore.redis.redis_store import RedisStore
from kvstore.tenants.enrolment import CLAIM, PROOF
from kvstore.tenants.enrolment import ROOT as CLAIMED
from kvstore.tenants.registry import Prefix, Registry
from kvstore.tenants.sealed import Sealer
from tests.kvstore.prefixes import CHUNK, FOUR, MODEL, ROOT, Engine, soon, until
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
    """A spoiled value is refused, read again and kept alive by every request, and nobody may write another."""
    engine = Engine(opened(store))
    await engine.serve(FOUR)
    forms = engine.store.forms
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[1]
    key = forms.keys(link, forms.forms[0])[0]
    store.script(SET, [key], [spoil(store.script(GET, [key], [], soon()))], soon())
    assert len((await engine.find(FOUR)).chunks) == 1
    for _ in range(3):
        await engine.serve(FOUR)
    assert len((await engine.find(FOUR)).chunks) == 4


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
async def test_upkeep_outlives_one_answer_that_is_not_its_own(store: RedisStore, opened: Any, reply: Any) -> None:
    confused = Confused(store, reply)
    upkeep = opened(confused)._upkeep
    assert upkeep is not None
    confused.left = 1
    upkeep._due = dict.fromkeys(upkeep._due, 0.0)
    await until(lambda: confused.done, 10.0)
    await until(lambda: not upkeep._thread.is_alive() or min(upkeep._due.values()) > 0, 10.0)
    assert upkeep._thread.is_alive()


async def test_upkeep_goes_on_when_the_right_root_key_is_back(
    store: RedisStore, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for period in ("TICK_S", "REFRESH_S", "KEEP_S"):
        monkeypatch.setattr(f"kvstore.upkeep.{period}", 0.01)
    stores = opened(store)
    right = store.script(GET, [CLAIMED], [], soon())
    store.script(SET, [CLAIMED], [Sealer(Keyring(bytes(32))).seal(CLAIMED, PROOF)], soon())
    await until(lambda: stores.of(MODEL).stats().faults.get("root_key"))  # three wrong ones in a row
    store.script(SET, [CLAIMED], [right], soon())
    Registry(store, Sealer(Keyring(ROOT))).put(Prefix("p", "public", "", {"t": tuple(FOUR[:CHUNK])}), soon())
    await until(lambda: stores.sharing("alice", FOUR) != Sharing.private("alice"))
    assert stores._upkeep._thread.is_alive()
