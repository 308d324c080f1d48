"""What a spoilt value or answer leaves behind: nothing that lasts."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.redis.redis_store import RedisStore
from kvstore.tenants.enrolment import CLAIM
from tests.kvstore.prefixes import FOUR, Engine, soon, until
from turnout.types import Sharing


async def test_a_value_that_was_refused_is_replaced(store: RedisStore, opened: Any) -> None:
    """A spoiled value is refused, read again and kept alive by every request, and nobody may write another."""
    engine = Engine(opened(store))
    await engine.serve(FOUR)
    forms = engine.store.forms
    link = engine.store.chain(Sharing.private("alice")).links(FOUR, 4)[1]
    key = forms.keys(link, forms.forms[0])[0]
    value = bytearray(store.script("return redis.call('get', KEYS[1])", [key], [], soon()))
    value[-1] ^= 1
    store.script("return redis.call('set', KEYS[1], ARGV[1])", [key], [bytes(value)], soon())
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
