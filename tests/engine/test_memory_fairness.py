"""Tenants share a model's memory: who fills it gives way, no time is kept for who waits for it, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.model import EngineModel
from pool.local_pool import LocalPool
from tests.engine.crowds import METHODS, alone_and_beside, load
from tests.engine.harness import call_of, pair_config, shrink, twins
from tests.engine.step_times import Clock, LinearTime
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing

TIMES = {"base": 4e-3, "per_token": 1e-4, "per_position": 1e-7, "per_sequence": 2e-4}
TINY = llama_config(60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
SIZE = 4
BLOCKS = 240  # of 8 tokens: a tenth of what the crowd below asks for at once


@pytest.fixture
async def full(pair_folder: Path) -> AsyncIterator[tuple[LocalPool, Clock]]:
    """A pool with little memory, whose forwards take exactly what its step time says."""
    pool = LocalPool.load("pair", pair_config(pair_folder, block_size=8))
    clock = Clock(LinearTime(**TIMES))
    for model in pool.engines.values():
        clock.drive(model)
        shrink(model, BLOCKS)
    yield pool, clock
    await pool.close()
    assert (pool.stats().requests, pool.stats().sequences, pool.stats().used_blocks) == (0, 0, 0)
    for model in pool.engines.values():
        model.pool.check_integrity()


@pytest.mark.parametrize(("method", "params"), METHODS)
@pytest.mark.parametrize("prompt", [3, 200])
async def test_a_tenant_that_fills_the_memory_at_most_doubles_the_latency_of_another(
    full: tuple[LocalPool, Clock], method: str, params: dict[str, Any], prompt: int
) -> None:
    pool, clock = full
    call = call_of([9] * prompt, method, params, tenant="b", max_tokens=80, ignore_eos=True)
    large = pool.engines["large"].pool
    crowd = load(100, method, params, "a")
    alone, beside = await alone_and_beside(pool, clock, call, crowd, lambda _: large.num_available <= 2)
    assert beside <= 2 * alone


def sequence(length: int, first: int, tenant: str, max_tokens: int = 20) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    tokens = [first, *(2 + i % 50 for i in range(length - 1))]
    return Sequence(tokens, sampling, seed=0, sharing=Sharing.private(tenant), tenant=tenant)


def small(num_blocks: int) -> tuple[EngineModel, Clock]:
    model, _ = twins(TINY, seed=4, block_size=SIZE, num_blocks=num_blocks)
    clock = Clock(LinearTime(**TIMES))
    clock.drive(model)
    return model, clock


async def finish(model: EngineModel, seq: Sequence) -> None:
    await model.decode(seq)
    model.release(seq)


def processed(seqs: list[Sequence]) -> int:
    return sum(seq.meter.models["m"].processed_tokens for seq in seqs)


async def run(tenants: str, num_blocks: int) -> tuple[list[Sequence], float]:
    """Sequences of these tenants, all there from the beginning, and how long they took together."""
    model, clock = small(num_blocks)
    seqs = [sequence(24, 10 + i, tenant) for i, tenant in enumerate(tenants)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(finish(model, seq) for seq in seqs))
    assert model.pool.num_held == 0
    await model.close()
    return seqs, clock.now


@pytest.mark.parametrize("tenants", ["ab" * 10, "a" * 14 + "b" * 6, "abcd" * 5])
async def test_who_waits_for_memory_keeps_no_time_from_those_who_have_it(tenants: str) -> None:
    # Room for six of the twenty sequences: every tenant's next prompt waits for memory nearly always.
    _, alone = await run("a" * len(tenants), 70)
    _, shared = await run(tenants, 70)
    assert shared < 1.25 * alone


@pytest.mark.parametrize("tenants", ["ab" * 10, "a" * 15 + "b" * 5, "aab" * 6, "abcd" * 5])
@pytest.mark.parametrize("num_blocks", [24, 40, 70])
async def test_tenants_do_not_take_memory_from_each_other_back_and_forth(tenants: str, num_blocks: int) -> None:
    roomy, _ = await run(tenants, 400)
    tight, _ = await run(tenants, num_blocks)
    single, _ = await run("a" * len(tenants), num_blocks)
    assert [seq.answer for seq in tight] == [seq.answer for seq in roomy]
    # Sequences that outgrow what they were promised are computed twice whoever shares the memory.
    assert processed(tight) <= max(1.5 * processed(single), 2 * processed(roomy))


async def test_the_youngest_sequences_of_who_has_most_give_way_and_say_what_they_would_have_said() -> None:
    model, clock = small(64)
    alone = [sequence(24, 10 + i, "a", 40) for i in range(7)]
    for seq in alone:
        await finish(model, seq)
    crowd = [sequence(24, 10 + i, "a", 40) for i in range(7)]
    model.pool.clear_cached()
    tasks = [asyncio.create_task(finish(model, seq)) for seq in crowd]
    while not all(seq.generated for seq in crowd[:5]):
        await asyncio.sleep(0)
    before = [len(model.batcher.tables[seq].blocks) for seq in crowd]
    other = sequence(100, 40, "b", 4)
    steps = len(clock.steps)
    await finish(model, other)
    assert len(clock.steps) - steps < 15
    gave_way = [seq for seq, held in zip(crowd, before, strict=True) if held and model.batcher.tables[seq].gave_way_at]
    assert gave_way
    assert gave_way == [seq for seq in crowd if before[crowd.index(seq)]][-len(gave_way) :], "the youngest"
    assert crowd[0] not in gave_way
    await asyncio.gather(*tasks)
    assert [seq.answer for seq in crowd] == [seq.answer for seq in alone]
    assert other.meter.models["m"].processed_tokens == 103
    await model.close()


async def test_a_sequence_longer_than_its_tenants_share_has_its_turn() -> None:
    """Beside tenants whose short requests never cease."""
    model, _ = small(40)
    done = asyncio.Event()

    async def stream(tenant: str, first: int) -> int:
        count = 0
        while not done.is_set():
            await finish(model, sequence(16, first, tenant, 6))
            count += 1
        return count

    streams = [asyncio.create_task(stream(tenant, 10 + i)) for i, tenant in enumerate("bbbccc")]
    while not model.pool.num_held:
        await asyncio.sleep(0)
    giant = sequence(120, 40, "a", 20)
    async with asyncio.timeout(60):
        await finish(model, giant)
        between = sum(seq.num_prompt_tokens == 16 for seq in model.batcher.tables)
        await finish(model, sequence(120, 41, "a", 20))
    done.set()
    assert between
    assert min(await asyncio.gather(*streams)) > 1
    await model.close()


async def test_memory_that_is_freed_is_seen_though_full_steps_repeat() -> None:
    """A tenant above its share waits for memory; when an idle cache of its own is freed, its prompt starts at once."""
    model, _ = twins(TINY, seed=4, block_size=32, num_blocks=26)
    Clock(LinearTime(base=0.0, per_token=0.05)).drive(model)
    model.batcher.limits = replace(model.batcher.limits, max_batch=4)
    idle = sequence(318, 40, "b", 4)
    await model.decode(idle, StopCondition(max_tokens=1))
    running = [sequence(2, 10 + place, "a", 29) for place in range(4)]
    tasks = [asyncio.create_task(finish(model, seq)) for seq in running]
    while len(running[0].generated) < 4:
        await asyncio.sleep(0)
    late = sequence(2, 41, "b", 1)
    waiting = asyncio.create_task(model.decode(late))
    while len(running[0].generated) < 9:
        await asyncio.sleep(0)
    assert not model.batcher.tables[late].blocks
    model.release(idle)
    await waiting
    assert all(len(seq.generated) < 29 for seq in running)
    await asyncio.gather(*tasks)
    model.release(late)
    assert model.pool.num_held == 0
    await model.close()
