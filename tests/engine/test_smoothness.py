"""Running requests go on at their pace while long prompts are read (seeds 239, Sarathi-Serve, and 186, Prepacking)."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.model import EngineModel
from pool.local_pool import LocalPool
from tests.engine.harness import Reference, ask, twins
from tests.engine.step_times import Clock, LinearTime
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing

TINY = llama_config(
    60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1, max_position_embeddings=4608
)
# A step of a few decodes takes about 5 ms; 1,000 tokens of a prompt 100 ms and more.
TIMES = {"base": 4e-3, "per_token": 1e-4, "per_position": 1e-7, "per_sequence": 1e-4}


def sequence(*tokens: int, max_tokens: int = 16, tenant: str = "a") -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(tokens, sampling, seed=0, sharing=Sharing.private(tenant), tenant=tenant)


def gaps(clock: Clock, seq: Sequence) -> list[float]:
    """Seconds between the steps that fed one running sequence."""
    ends = [now for now, feeds in clock.steps if any(feed.table.seq is seq for feed in feeds)]
    return [after - before for before, after in pairwise(ends)]


@pytest.fixture(scope="module")
def loaded() -> tuple[EngineModel, Reference]:
    return twins(TINY, seed=4)


async def test_a_prompt_of_4000_tokens_never_stalls_what_is_running() -> None:
    model, plain = twins(TINY, seed=4)
    clock = Clock(LinearTime(**TIMES))
    clock.drive(model)
    running = [sequence(2, 3 + i, max_tokens=400) for i in range(4)]
    tasks = [asyncio.create_task(model.decode(seq)) for seq in running]
    while len(clock.steps) < 5:
        await asyncio.sleep(0)
    prompt = sequence(*(5 + i % 50 for i in range(4000)))
    [row] = await model.extend(prompt, want=ReadSpec(logits=True))
    during = [(now, feeds) for now, feeds in clock.steps if any(feed.table.seq is prompt for feed in feeds)]
    for seq in running:
        assert len(seq.generated) < 400, "it ended before the prompt was read"
        assert max(gaps(clock, seq)) < 2.5 * clock.times.seconds(4, 4 * 100, 4)
        for _, feeds in during:
            assert sum(feed.table.seq is seq for feed in feeds) == 1
    chunks = [len(feed.tokens) for _, feeds in during for feed in feeds if feed.table.seq is prompt]
    assert sum(chunks) == 4000
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert row.logits is not None
    assert float((row.logits - plain.logits(prompt.tokens)[-1]).abs().max()) < 1e-4
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for seq in (*running, prompt):
        model.release(seq)
    await model.close()


async def steps_until(clock: Clock, count: int) -> None:
    while len(clock.steps) < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("others", ["b", "bc", "bcd", "bcdefgh"])
async def test_a_prompt_of_one_tenant_stalls_no_running_request_of_any_other(others: str) -> None:
    model, _ = twins(TINY, seed=4)
    clock = Clock(LinearTime(**TIMES))
    clock.drive(model)
    running = [sequence(2, 3 + i, max_tokens=600, tenant=tenant) for i, tenant in enumerate(others)]
    tasks = [asyncio.create_task(model.decode(seq)) for seq in running]
    await steps_until(clock, 5)
    started = len(clock.steps)
    prompt = sequence(*(5 + i % 50 for i in range(2000)), tenant="a", max_tokens=50)
    await model.decode(prompt)
    n, count = len(others) + 1, len(others)
    plain = clock.times.seconds(count, count * 100, count)
    for seq in running:
        assert len(seq.generated) < 600, "it ended before the prompt was read"
        assert max(gaps(clock, seq)) < 2.5 * plain
    # ... and the prompt gets what is left of the steps, not less.
    reading = [feeds for _, feeds in clock.steps[started:] if any(feed.table.seq is prompt for feed in feeds)]
    longest = max(clock.times.of(feeds) for feeds in reading[:-50])
    assert 1.6 * plain < longest
    assert max(gaps(clock, prompt)) < 2.5 * clock.times.seconds(n, n * 2100, n)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for seq in (*running, prompt):
        model.release(seq)
    await model.close()


async def test_prompts_of_a_crowd_stall_no_tenant_that_decodes_beside_it() -> None:
    model, _ = twins(TINY, seed=4)
    clock = Clock(LinearTime(**TIMES))
    clock.drive(model)
    running = [sequence(2, 3 + i, max_tokens=200, tenant=tenant) for i, tenant in enumerate("bcd")]
    tasks = [asyncio.create_task(model.decode(seq)) for seq in running]
    await steps_until(clock, 5)
    crowd = [sequence(*(5 + (i + j) % 50 for j in range(150)), max_tokens=30, tenant="a") for i in range(30)]
    tasks += [asyncio.create_task(model.decode(seq)) for seq in crowd]
    await asyncio.wait(tasks[:3])
    for seq in running:
        # Steps hold decodes of the crowd too: four tenants bear steps of four times their own.
        assert max(gaps(clock, seq)) < 4 * clock.times.seconds(1, 200, 1)
    alone = 200 * clock.times.seconds(1, 200, 1)
    assert clock.now < 4 * alone
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for seq in (*running, *crowd):
        model.release(seq)
    await model.close()


async def test_nobody_running_leaves_a_prompt_the_whole_budget(loaded: Any) -> None:
    model, _ = loaded
    clock = Clock(LinearTime(**TIMES))
    clock.drive(model)
    prompt = sequence(*(7 + i % 40 for i in range(1200)))
    await model.extend(prompt)
    assert [len(feed.tokens) for _, feeds in clock.steps for feed in feeds] == [512, 512, 176]
    model.release(prompt)


@pytest.mark.parametrize("tenant", ["default", "other"])
async def test_a_prompt_read_by_one_model_does_not_stall_those_who_run_on_the_other(
    pool: LocalPool, tenant: str
) -> None:
    clock = Clock(LinearTime(**TIMES))
    for model in pool.engines.values():
        clock.drive(model)
        model.batcher.limits = type(model.batcher.limits)(512, 64)
    decoding = asyncio.create_task(ask(pool, [1, 2, 3], "plain", {"model": "large"}, max_tokens=120, ignore_eos=True))
    while len(clock.steps) < 5:
        await asyncio.sleep(0)
    reply = await ask(pool, list(range(200)) * 2, "plain", {"model": "small"}, max_tokens=1, tenant=tenant)
    assert reply.usage.models["small"].prompt_tokens == 400
    large = pool.engines["large"]
    ends = [now for now, feeds in clock.steps if any(feed.table.store is large.store for feed in feeds)]
    assert len((await decoding).ids) == 120
    longest = max(after - before for before, after in pairwise(ends))
    assert longest < 2.5 * clock.times.seconds(1, 120, 1)


@pytest.mark.parametrize("budget", [512, 7])
async def test_packed_prompts_compute_what_each_computes_alone(budget: int) -> None:
    """Logits and KV, whether prompts share one forward whole or in chunks."""
    packed, plain = twins(TINY, seed=4, token_budget=budget, block_size=4)
    alone, _ = twins(TINY, seed=4, token_budget=512, block_size=4)
    prompts = [sequence(*range(10 * i, 10 * i + length)) for i, length in enumerate((5, 3, 2, 2, 9))]
    clock = Clock(LinearTime())
    clock.drive(packed)
    want = ReadSpec(logits=True)
    together = await asyncio.gather(*(packed.extend(seq, want=want) for seq in prompts))
    assert max(len(feeds) for _, feeds in clock.steps) == (5 if budget == 512 else 4)
    for seq, [row] in zip(prompts, together, strict=True):
        [own] = await alone.extend(seq, want=want)
        torch.testing.assert_close(row.logits, own.logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(row.logits, plain.logits(seq.tokens)[-1], atol=1e-4, rtol=0)
        for here, there in zip(packed.store.layers, alone.store.layers, strict=True):
            mine = packed.batcher.tables[seq].slots(0, len(seq))
            theirs = alone.batcher.tables[seq].slots(0, len(seq))
            torch.testing.assert_close(here[mine], there[theirs], atol=1e-4, rtol=0)
    for seq in prompts:
        packed.release(seq)
        alone.release(seq)
    await packed.close()
    await alone.close()


async def test_what_a_forward_cost_is_learnt(loaded: Any) -> None:
    model, _ = loaded
    times = model.batcher.times = LinearTime(**TIMES)
    before = model.batcher.forward_seconds
    first, second = sequence(2, 3, 4, max_tokens=2), sequence(2, 9, max_tokens=2)
    await asyncio.gather(model.decode(first), model.decode(second))
    assert times.observed == [(5, 6 + 3, 2), (2, 4 + 3, 2)]
    assert model.batcher.forward_seconds > before
    for seq in (first, second):
        model.release(seq)
