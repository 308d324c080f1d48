"""Acceptance test 9: strangers share nothing and the same tenant everything, through every tier, in pairs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvstore.redis.redis_store import RedisStore
from tests.kvstore.acceptance.workers import BLOCK, CHUNK, Answered, Worker, prompt_of, working
from turnout.types import Namespace, Sharing

TIERS = ["device", "memory", "redis"]
ALICE, BOB = Namespace("private", "alice"), Namespace("private", "bob")
PUBLIC = Namespace("public", "p")
# Different in every one of these ways, and in nothing else.
PAIRS = {
    "tenants": (Sharing(ALICE), Sharing(BOB)),
    "private and group": (Sharing(ALICE), Sharing(Namespace("group", "alice"))),
    "group and public": (Sharing(Namespace("group", "p")), Sharing(PUBLIC)),
    "groups": (Sharing(Namespace("group", "g")), Sharing(Namespace("group", "h"))),
    "names that run into each other": (
        Sharing(Namespace("private", "org_1|2345")), Sharing(Namespace("private", "org_12345|"))
    ),
    "a name inside another": (Sharing(Namespace("private", "a")), Sharing(Namespace("private", "a\0"))),
    "letter case": (Sharing(Namespace("private", "Alice")), Sharing(ALICE)),
}  # fmt: skip
# Leading tokens in common.
OVERLAPS = {
    "a public head": (Sharing(ALICE, ((2 * CHUNK, PUBLIC),)), Sharing(BOB, ((2 * CHUNK, PUBLIC),)), 2 * CHUNK),
    "a public head that ends in a chunk": (
        Sharing(ALICE, ((2 * CHUNK - 1, PUBLIC),)), Sharing(BOB, ((2 * CHUNK - 1, PUBLIC),)), 2 * CHUNK - 1
    ),
    "public, then group": (
        Sharing(ALICE, ((CHUNK, PUBLIC), (3 * CHUNK, Namespace("group", "g")))),
        Sharing(BOB, ((CHUNK, PUBLIC), (3 * CHUNK, Namespace("group", "g")))),
        3 * CHUNK,
    ),
    "public, then another group": (
        Sharing(ALICE, ((CHUNK, PUBLIC), (3 * CHUNK, Namespace("group", "g")))),
        Sharing(BOB, ((CHUNK, PUBLIC), (3 * CHUNK, Namespace("group", "h")))),
        CHUNK,
    ),
}  # fmt: skip


class Tier:
    """Two requests of which the second can find what the first left in this tier alone."""

    def __init__(self, name: str, first: Worker, second: Worker) -> None:
        self.name = name
        self.first = first
        self.second = second

    @property
    def unit(self) -> int:
        """Tokens that are found together or not at all."""
        return BLOCK if self.name == "device" else CHUNK

    async def leave(self, prompt: list[int], sharing: Sharing) -> None:
        """Have the first answer a prompt."""
        await self.first.answer(prompt, sharing=sharing)
        await self.first.settle()

    async def found(self, prompt: list[int], sharing: Sharing) -> int:
        """Tokens that the second did not compute."""
        if self.name != "device":
            await self.second.forget()
        got: Answered = await self.second.answer(prompt, sharing=sharing)
        assert got.computed + got.cached == len(prompt)
        assert got.fetched == (0 if self.name == "device" else got.cached)
        tiers = {tier for tier, tokens in self.second.model.shared.tokens.items() if tokens}  # type: ignore[union-attr]
        assert tiers <= {self.name}
        return got.cached


@asynccontextmanager
async def opened(name: str, store: RedisStore) -> AsyncIterator[Tier]:
    async with AsyncExitStack() as stack:
        if name == "redis":
            first, second = [await stack.enter_async_context(working(store)) for _ in range(2)]
        else:
            first = second = await stack.enter_async_context(working(None, host_memory_bytes=1 << 24))
        if name == "memory":
            second = await stack.enter_async_context(working(None, first.stores))
        yield Tier(name, first, second)


@pytest.mark.parametrize("tier", TIERS)
async def test_strangers_find_nothing_and_the_same_find_everything(store: RedisStore, tier: str) -> None:
    found = {}
    async with opened(tier, store) as between:
        for index, (pair, (mine, theirs)) in enumerate(PAIRS.items()):
            prompt = prompt_of(4 * CHUNK + 1, start=index)
            await between.leave(prompt, mine)
            found[pair] = await between.found(prompt, theirs), await between.found(prompt, mine)
    assert found == dict.fromkeys(PAIRS, (0, 4 * CHUNK))


@pytest.mark.parametrize("tier", TIERS)
async def test_what_is_shared_ends_where_the_spans_part(store: RedisStore, tier: str) -> None:
    found, expected = {}, {}
    async with opened(tier, store) as between:
        for index, (overlap, (mine, theirs, common)) in enumerate(OVERLAPS.items()):
            prompt = prompt_of(4 * CHUNK + 1, start=index)
            await between.leave(prompt, mine)
            found[overlap] = await between.found(prompt, theirs), await between.found(prompt, mine)
            expected[overlap] = common // between.unit * between.unit, 4 * CHUNK
    assert found == expected
