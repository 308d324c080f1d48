"""Acceptance test 6: whole prompts, parts of chunks, gaps, and keys that go missing inside a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import kvstore.encodings
from kvstore.base import ByteStore, StoreFault
from kvstore.encodings import BufferPool, Encodings
from kvstore.fakes import FaultyStore, Plan
from kvstore.redis.redis_store import RedisStore
from tests.kvstore.acceptance.workers import BLOCK, CHUNK, FAR, Worker, prompt_of, store_prompt, working
from tests.kvstore.prefixes import soon

WHOLE = prompt_of(4 * CHUNK + 1)


def keys_of(worker: Worker, prompt: list[int], tenant: str = "alice") -> list[bytes]:
    """Of the values of a prompt's chunks: one value for each, in their order."""
    encodings = worker.store.encodings
    links = worker.store.chain(worker.stores.sharing(tenant, prompt)).links(prompt, len(prompt) // CHUNK)
    return [key for link in links for key in encodings.keys(link, encodings.all[0])]


@pytest.mark.parametrize("chunks", [1, 4])
async def test_a_prompt_of_which_all_is_stored_leaves_a_block_to_compute(store: RedisStore, chunks: int) -> None:
    prompt = prompt_of(chunks * CHUNK)
    await store_prompt(store, prompt)
    async with working(store) as worker:
        got = await worker.answer(prompt)
        assert (got.computed, got.fetched) == (BLOCK, chunks * CHUNK - BLOCK)


@pytest.mark.parametrize("tail", [1, BLOCK, CHUNK - 1])
async def test_what_is_less_than_a_chunk_is_computed(store: RedisStore, tail: int) -> None:
    prompt = prompt_of(2 * CHUNK + tail)
    await store_prompt(store, prompt)
    async with working(store) as worker:
        got = await worker.answer(prompt)
        assert (got.computed, got.fetched) == (tail, 2 * CHUNK)


@pytest.mark.parametrize("common", [CHUNK - 1, CHUNK, 3 * CHUNK - 1])
async def test_a_fork_inside_a_chunk_takes_the_chunks_before_it(store: RedisStore, common: int) -> None:
    await store_prompt(store, WHOLE)
    fork = WHOLE[:common] + [(each - 1) % 57 + 2 for each in WHOLE[common:]]
    async with working(store) as worker:
        got = await worker.answer(fork)
        assert got.fetched == common // CHUNK * CHUNK


@pytest.mark.parametrize("gap", range(4))
async def test_nothing_behind_a_gap_is_used(store: RedisStore, gap: int) -> None:
    await store_prompt(store, WHOLE)
    async with working(store) as worker:
        assert store.delete([keys_of(worker, WHOLE)[gap]], soon()) == 1
        got = await worker.answer(WHOLE)
        assert (got.computed, got.fetched) == (len(WHOLE) - gap * CHUNK, gap * CHUNK)
        await worker.settle()
    async with working(store) as healed:
        assert (await healed.answer(WHOLE)).fetched == 4 * CHUNK


@pytest.mark.parametrize("segment", [range(1), range(1, 3), range(2, 4)])
async def test_nothing_behind_a_missing_segment_is_used(store: RedisStore, segment: range) -> None:
    await store_prompt(store, WHOLE)
    async with working(FaultyStore(store, Plan(drop=frozenset(segment)))) as worker:
        got = await worker.answer(WHOLE)
        assert got.fetched == segment.start * CHUNK


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory that values or chunks come into holds what would be noticed."""

    def poisoned_chunk(self: Encodings) -> torch.Tensor:
        return torch.full(self.chunk_size, float("nan"), dtype=self.layout.dtype)

    def poisoned_buffer(self: BufferPool) -> bytearray:
        return bytearray(b"\xff" * self.num_bytes)

    monkeypatch.setattr(Encodings, "empty_chunk", poisoned_chunk)
    monkeypatch.setattr(BufferPool, "take", poisoned_buffer)


class Claiming:
    """A store whose reads claim that every value came, though one was never put where it belongs.

    Args:
        inner: a real one.
        missing: places of values that are only claimed.
    """

    def __init__(self, inner: ByteStore, missing: set[int]) -> None:
        self._inner = inner
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(
        self,
        keys: Sequence[bytes],
        place: Callable[[int, int], memoryview | None],
        done: Callable[[int], bool],
        ttl_ms: int,
        deadline: float,
    ) -> int:
        for index, key in enumerate(keys):
            held: list[bytearray] = []

            def keep(_: int, size: int, held: list[bytearray] = held) -> memoryview:
                held.append(bytearray(size))
                return memoryview(held[0])

            if not self._inner.read([key], keep, lambda _: True, ttl_ms, deadline):
                raise StoreFault("broken", "the test stored too little")
            view = place(index, len(held[0]))
            if view is None:
                return index
            if index not in self._missing:
                view[:] = held[0]
            if not done(index):
                return index + 1
        return len(keys)


MISSED = {
    "vanish": lambda place: Plan(vanish=frozenset({place})),
    "torn": lambda place: Plan(torn=frozenset({place})),
    "truncate": lambda place: Plan(truncate=frozenset({place})),
}


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("how", [*MISSED, "claimed"])
async def test_a_key_that_is_missed_inside_a_batch_leaves_no_unread_memory(
    store: RedisStore, how: str, place: int
) -> None:
    """LMCache#5124: the buffer of a value that was not read was taken for the value."""
    await store_prompt(store, WHOLE)
    lying: Any = Claiming(store, {place}) if how == "claimed" else FaultyStore(store, MISSED[how](place))
    async with working(lying) as worker:
        # The first look-up reads one chunk alone, to learn how fast the link is.
        assert await worker.logits_error(prompt_of(1 + CHUNK, start=1)) < FAR
        got = await worker.answer(WHOLE)
        assert got.fetched <= place * CHUNK
        assert not worker.poisoned()
        if how == "claimed":
            assert worker.store.stats().faults
            assert set(worker.store.stats().faults) <= {"magic", "header", "tag"}


@pytest.mark.usefixtures("poison")
async def test_the_poison_would_be_seen(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without the check of values: the answer is wrong, so the tests above can fail."""
    await store_prompt(store, WHOLE)

    def unchecked(keyring: Any, namespace: Any, key: Any, codec: Any, shape: Any, value: Any, out: Any) -> int:
        size = int(shape.raw_bytes)
        out[:size] = value[:size]
        return size

    monkeypatch.setattr(kvstore.encodings, "open_into", unchecked)
    worker = Worker(Claiming(store, {0, 1}))
    assert not await worker.logits_error(WHOLE) < FAR
    assert worker.poisoned()
    await worker.close()
