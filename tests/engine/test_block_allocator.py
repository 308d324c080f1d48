"""Admission by memory: who starts finds its blocks, who does not waits, and nobody who runs pays for it."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from decoding.model import ReadSpec, StopCondition
from decoding.sequence import Sequence
from engine.cache.table import promised
from engine.model import EngineModel
from engine.scheduler.block_allocator import ROOM_BLOCKS, BlockAllocator
from engine.scheduler.queued_operation import QueuedOperation
from tests.engine.harness import twins
from training.random_models import llama_config
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams, Sharing

TINY = llama_config(60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
SIZE = 4


def sequence(length: int, first: int, max_tokens: int = 8, tenant: str = "a") -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens = [first, *(2 + i % 50 for i in range(length - 1))]
    return Sequence(tokens, sampling, seed=0, sharing=Sharing.private(tenant), tenant=tenant)


def small(num_blocks: int, **engine: int) -> EngineModel:
    return twins(TINY, seed=4, block_size=SIZE, num_blocks=num_blocks, **engine)[0]


async def finish(model: EngineModel, seq: Sequence) -> None:
    await model.decode(seq)
    model.release(seq)


def processed(seq: Sequence) -> int:
    return seq.meter.models["m"].processed_tokens


async def test_requests_wait_for_memory_and_nobody_is_preempted() -> None:
    # Each needs 6 blocks and its room: two fit.
    model = small(2 * (6 + ROOM_BLOCKS) + 3)
    seqs = [sequence(24, 10 + i) for i in range(8)]
    widest = 0
    original = model.batcher.runner.run

    def run(feeds: object) -> object:
        nonlocal widest
        widest = max(widest, sum(bool(table.blocks) for table in model.batcher.tables.values()))
        return original(feeds)  # type: ignore[arg-type]

    model.batcher.runner.run = run  # type: ignore[assignment, method-assign]
    async with asyncio.timeout(60):
        await asyncio.gather(*(finish(model, seq) for seq in seqs))
    assert widest == 2
    assert [processed(seq) for seq in seqs] == [24 + 7] * 8
    assert model.pool.num_held == 0
    await model.close()


async def test_blocks_of_a_prompt_in_the_making_are_promised() -> None:
    # 40 tokens are read in chunks of 8; meanwhile 10 blocks look free, but 9 of them are promised.
    model = small(12 + ROOM_BLOCKS, token_budget=8)
    long, short = sequence(40, 10, max_tokens=2), sequence(12, 11, max_tokens=2)
    reading = asyncio.create_task(finish(model, long))
    while not model.batcher.tables or len(model.batcher.tables[long]) < 8:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(finish(model, short))
    while not reading.done():
        await asyncio.sleep(0)
        if short in model.batcher.tables and not long.generated:
            assert not model.batcher.tables[short].blocks
    await waiting
    assert (processed(long), processed(short)) == (41, 13)
    await model.close()


async def test_a_shared_prefix_counts_once() -> None:
    model = small(8 + 2 * ROOM_BLOCKS + 2)
    first = sequence(32, 10, max_tokens=20)
    original, queued = model.batcher.runner.run, threading.Event()

    def run(feeds: Any) -> Any:
        assert not first.generated or queued.wait(60)  # its decode steps would not wait for the second one
        return original(feeds)

    model.batcher.runner.run = run  # type: ignore[method-assign]
    running = asyncio.create_task(finish(model, first))
    while not first.generated:
        await asyncio.sleep(0)
    sampling, sharing = SamplingParams(temperature=0.0), Sharing.private("a")
    second = Sequence([*first.tokens[:32], 9], sampling, seed=0, sharing=sharing, tenant="a")
    reading = asyncio.create_task(model.extend(second))
    while model.batcher.num_waiting < 2:
        await asyncio.sleep(0)
    queued.set()
    await reading
    assert not running.done()
    assert processed(second) == 1
    model.release(second)
    await running
    await model.close()


async def test_the_first_that_does_not_fit_is_not_overtaken() -> None:
    model = small(20)
    seqs = [sequence(40, 10), sequence(60, 11), sequence(8, 12)]
    finished: list[int] = []

    async def one(index: int) -> None:
        await finish(model, seqs[index])
        finished.append(index)

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(index) for index in range(3)))
    assert finished[0] == 0
    assert model.pool.num_held == 0
    assert [processed(seq) for seq in seqs] == [47, 67, 15]
    await model.close()


async def test_a_sequence_that_leaves_no_room_at_all_still_starts() -> None:
    model = small(10)
    other, whole = sequence(20, 10), sequence(40, 11, max_tokens=1)
    async with asyncio.timeout(60):
        await asyncio.gather(finish(model, other), finish(model, whole))
    assert processed(whole) == 40
    await model.close()


async def test_a_sequence_longer_than_the_pool_is_refused_before_it_waits() -> None:
    model = small(10)
    blocker, too_long = sequence(30, 10, max_tokens=9), sequence(41, 11)
    running = asyncio.create_task(finish(model, blocker))
    with pytest.raises(
        TurnoutError, match=r"a sequence of 41 tokens does not fit the KV cache of m \(40 tokens\)"
    ) as no:
        await model.extend(too_long, want=ReadSpec())
    assert no.value.code is Code.OUT_OF_RANGE
    assert not running.done()
    await running
    model.release(too_long)
    await model.close()


def recount(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks promised whenever they are asked for, compared with a full count; and the order of reservations."""
    counted: list[int] = []
    outstanding, ordered = BlockAllocator._outstanding, BlockAllocator.by_entitlement

    def checked(memory: BlockAllocator, low_priority: bool) -> int:
        found = outstanding(memory, low_priority)
        tables = [table for table in memory._tables.values() if low_priority or not table.seq.low_priority]
        assert found == promised(tables)
        counted.append(found)
        return found

    def compared(memory: BlockAllocator, shares: list[tuple[QueuedOperation, int]]) -> Any:
        found = ordered(memory, shares)
        needed = sum(work.table.blocks_needed(len(work.table) + work.cached_rows + tokens) for work, tokens in shares)
        if not shares or needed <= shares[0][0].table.pool.num_available:
            assert found == shares
        else:
            assert found == sorted(shares, key=lambda share: memory._is_above(share[0]))
        return found

    monkeypatch.setattr(BlockAllocator, "_outstanding", checked)
    monkeypatch.setattr(BlockAllocator, "by_entitlement", compared)
    return counted


@pytest.mark.parametrize("case", range(4))
async def test_promises_are_those_of_a_full_count(monkeypatch: pytest.MonkeyPatch, case: int) -> None:
    """Prompts of two tenants and both classes, some with prefixes in common, some given up, forked or drafted for."""
    counted, chance = recount(monkeypatch), random.Random(case)
    model = small(chance.choice([30, 60, 200]), token_budget=16, max_batch=chance.choice([2, 4, 8]))

    async def one(place: int) -> None:
        length, first = chance.randint(2, 50), chance.choice([10, 11, 20 + place])
        seq = sequence(length, first, chance.randint(1, 24), chance.choice("ab"))
        seq.low_priority = chance.random() < 0.25
        kept, kind, turns = [seq], chance.choice(["all", "left", "fork", "draft"]), chance.randint(0, 60)
        for _ in range(turns):
            await asyncio.sleep(0)
        try:
            if kind == "left":
                task = asyncio.create_task(model.decode(seq))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                return
            await model.decode(seq, StopCondition(max_tokens=3))
            if kind == "draft":
                await model.extend(seq, (5, 6, 7), every=True)
            if kind == "fork":
                kept.append(model.fork(seq))
            await asyncio.gather(*map(model.decode, kept))
            assert all(each.finished for each in kept)
        finally:
            for each in kept:
                model.release(each)

    async with asyncio.timeout(100):
        await asyncio.gather(*map(one, range(24)))
    assert len(counted) > 20
    assert any(counted)
    assert model.pool.num_held == 0
    model.pool.check_integrity()
    assert model.batcher.num_waiting == 0
    await model.close()
