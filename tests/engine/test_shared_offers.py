"""What an engine offers the prefix store: full chunks, computed exactly, once; and what that costs the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding.model import StopCondition
from tests.engine import shared_engines
from tests.engine.shared_engines import SIZE, Engine, prompt, sequence

first, second = shared_engines.first, shared_engines.second


async def test_answers_are_offered_as_they_fill_chunks(first: Engine, second: Engine) -> None:
    seq = sequence(prompt(13), max_tokens=20)
    await first.model.decode(seq, StopCondition())
    assert len(seq) == 33
    first.model.release(seq)
    await first.settled()
    assert len(first.store.shelf) == 4
    longer = sequence(seq.tokens)
    await second.right(longer)
    assert longer.meter.models["m"].fetched_tokens == 32


async def test_a_chunk_is_offered_once(first: Engine) -> None:
    first.store.wants_all = False
    seq = sequence(prompt(33), max_tokens=4)
    await first.model.decode(seq)
    twin = first.model.fork(seq)
    await first.read(twin)
    first.model.batcher.tables[seq].drop()
    await first.read(seq)
    assert len(first.store.wanted) == len(set(first.store.wanted)) == 4


async def test_who_finds_it_in_the_pool_is_a_second_sighting(first: Engine) -> None:
    first.store.wants_all = False
    await first.right(sequence(prompt(33)))
    first.store.wants_all = True
    await first.right(sequence(prompt(33)))
    assert len(first.store.shelf) == 4


async def test_what_the_store_gave_is_not_offered_again(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(33)))
    second.store.shelf.pop(next(reversed(second.store.shelf)))
    await second.right(sequence(prompt(33)))
    assert len(second.store.wanted) == 1


async def test_blocks_are_kept_until_the_store_has_read_them(first: Engine) -> None:
    first.store.takes = False
    seq = sequence(prompt(17))
    await first.right(seq)
    assert first.model.pool.num_held == 4
    first.store.take_waiting()
    await first.settled()
    assert first.model.pool.num_held == 0
    assert len(first.store.shelf) == 2


async def test_a_slow_store_keeps_an_eighth_of_the_pool_at_most() -> None:
    engine = Engine(num_blocks=48)
    engine.store.takes = False
    for start in range(4):
        await engine.right(sequence(prompt(100, start)))
    assert engine.model.pool.num_held == 6
    await engine.store.close()
    await engine.close()


async def test_what_was_read_is_what_was_computed(first: Engine) -> None:
    """Kept blocks are not written to by those who go on from them."""
    first.store.takes = False
    seq = sequence(prompt(16))
    await first.read(seq, keep=True)
    table = first.model.batcher.tables[seq]
    before = first.model.store.read_blocks(table.blocks[:4], SIZE)
    table.truncate(14)
    await first.model.extend(seq, (3, 4, 5))
    first.model.release(seq)
    first.store.take_waiting()
    links = first.store.chain(seq.sharing).links(seq.tokens, 2)
    assert torch.equal(torch.cat([first.store.shelf[link.digest] for link in links], dim=1), before)


@pytest.mark.parametrize("where", ["wants", "offer", "chain"])
async def test_a_store_that_breaks_fails_nobody(
    first: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(first.store, where, broken)
    await first.right(sequence(prompt(20)))
    assert first.model.shared is not None
    assert first.model.shared.faults >= 1
    assert "planted" in caplog.text
    first.model.pool.release(held := [b for b in range(first.model.pool.num_blocks) if first.model.pool._refs[b]])
    first.model.shared.kept -= len(held)  # what a broken offer kept is never given back: nobody knows who reads it
