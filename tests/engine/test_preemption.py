"""Too little memory for everybody: requests queue and are preempted, and say exactly what they say alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.scheduler.limits import Limits
from pool.local_pool import LocalPool
from tests.engine.harness import (
    Reply,
    answer,
    ask_all,
    assert_claimed,
    call_of,
    pair_config,
    random_prompts,
    reference,
    shrink,
    twins,
)
from tests.engine.margin import assert_same_tokens
from tests.properties import cases
from training.random_models import llama_config
from turnout.calls import GenerateCall
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

TINY = llama_config(60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
SWITCH = {"window": 2, "min_stay": 3, "threshold": 2.0}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("speculative", {"length": "fixed", "draft_length": 3}),
    ("entropy_adaptive", SWITCH),
    ("entropy_adaptive", {**SWITCH, "catch_up": "shadow"}),
    ("speculative", {"length": "fixed", "draft_length": 4, "verifier": "rejection"}),
    ("random_switch", {"share": 0.5, "mean_run": 4.0, "min_stay": 2, "catch_up": "eager"}),
]


def small_pool(folder: Path, num_blocks: int, **engine: int) -> LocalPool:
    """The pair with exactly so many blocks of 4 tokens for each model."""
    loaded = LocalPool.load("pair", pair_config(folder, **{"block_size": 4, "token_budget": 16, **engine}))
    for model in loaded.engines.values():
        shrink(model, num_blocks)
    return loaded


async def close(pool: LocalPool) -> None:
    """Nothing may be left in it."""
    assert (pool.stats().sequences, pool.stats().used_blocks, pool.stats().waiting) == (0, 0, 0)
    for model in pool.engines.values():
        model.pool.check_integrity()
    await pool.close()


def forwards(replies: list[Reply]) -> int:
    return sum(meter.processed_tokens for reply in replies for meter in reply.usage.models.values())


def mixed_calls(count: int, longest: int = 30) -> list[GenerateCall]:
    """Every method, greedy and sampled."""
    return [
        call_of(prompt, *METHODS[i % len(METHODS)], max_tokens=20, seed=i, temperature=(i % 3) / 2)
        for i, prompt in enumerate(random_prompts(count, longest, seed=41))
    ]


# 14 blocks hold one sequence of at most 30 + 20 + a draft of 4; nobody fits beside it.
@pytest.mark.parametrize("num_blocks", [14, 20, 33])
async def test_everybody_finishes_with_the_tokens_it_gives_alone(pair_folder: Path, num_blocks: int) -> None:
    calls = mixed_calls(12)
    roomy = small_pool(pair_folder, 400)
    alone = [await answer(roomy, call) for call in calls]
    await close(roomy)
    tight = small_pool(pair_folder, num_blocks)
    crowded = await ask_all(tight, calls)
    assert forwards(crowded) > forwards(alone), "nobody was preempted"
    for call, mine, theirs in zip(calls, alone, crowded, strict=True):
        if call.method == "speculative":
            scores = reference(pair_folder / "large").scores(call.prompt, mine.ids, call.sampling, call.sampling.seed)
            assert_same_tokens(mine.ids, theirs.ids, scores.__getitem__, "speculative")
        else:
            assert_claimed(pair_folder, call, theirs)
            assert [t.source for t in mine.tokens] == [t.source for t in theirs.tokens]
            assert len(mine.ids) == len(theirs.ids)
        assert theirs.text == mine.text
    await close(tight)


@cases(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 12), st.sampled_from("abc")), min_size=2, max_size=9),
    num_blocks=st.integers(9, 24),
    token_budget=st.integers(1, 20),
    max_batch=st.integers(1, 6),
)
def test_any_load_ends_with_the_right_tokens(
    lengths: list[tuple[int, int, str]],
    num_blocks: int,
    token_budget: int,
    max_batch: int,
    shared: tuple[EngineModel, Any],
) -> None:
    model, plain = shared
    model.batcher.limits = Limits(token_budget, max_batch)
    shrink(model, num_blocks)

    async def go() -> None:
        model.batcher.device.turn = asyncio.Lock()
        seqs = [
            Sequence(
                [2 + i, *range(3, 2 + prompt)], SamplingParams(temperature=0.0, max_tokens=count), 0, tenant=tenant
            )
            for i, (prompt, count, tenant) in enumerate(lengths)
        ]

        async def one(index: int, seq: Sequence) -> None:
            for _ in range(4 * index):  # they come one after the other
                await asyncio.sleep(0)
            await model.decode(seq)
            if index % 2:
                model.release(seq)  # the others' caches stay, idle

        async with asyncio.timeout(60):
            await asyncio.gather(*(one(index, seq) for index, seq in enumerate(seqs)))
        for seq in seqs:
            logits = plain.logits(seq.tokens)[seq.num_prompt_tokens - 1 : -1]
            ids = [token.id for token in seq.generated]
            assert_same_tokens(logits.argmax(-1).tolist(), ids, logits.__getitem__, "load")
            assert seq.finished
            model.release(seq)
        model.pool.check_integrity()
        assert model.pool.num_held == 0

    asyncio.run(go())


@pytest.fixture(scope="module")
def shared() -> tuple[EngineModel, Any]:
    return twins(TINY, seed=4, block_size=4)


async def test_only_the_youngest_sequence_gives_way() -> None:
    # 20 blocks: all three prompts fit, but only two whole answers (9 blocks each).
    model, _ = twins(TINY, seed=4, block_size=4, token_budget=64, num_blocks=20)
    seqs = [Sequence([2, i] * 5, SamplingParams(temperature=0.0, max_tokens=25), seed=0) for i in range(3, 6)]
    finished: list[int] = []

    async def one(index: int) -> None:
        await model.decode(seqs[index])
        finished.append(index)
        model.release(seqs[index])

    async with asyncio.timeout(60):
        await asyncio.gather(*(one(index) for index in range(3)))
    assert finished == [0, 1, 2]
    first, second, third = (seq.meter.models["m"].processed_tokens for seq in seqs)
    assert first == second == 10 + 24
    assert third > 10 + 24
    await model.close()


async def test_idle_caches_are_given_up_first_and_come_back_right() -> None:
    model, plain = twins(TINY, seed=4, block_size=4, num_blocks=8)
    idle = Sequence([5] * 14, SamplingParams(temperature=0.0), seed=0)
    busy = Sequence([6] * 14, SamplingParams(temperature=0.0, max_tokens=8), seed=0)
    await model.extend(idle)
    await model.decode(busy)
    assert not model.batcher.tables[idle].blocks
    row = (await model.extend(idle, want=ReadSpec(logits=True)))[0]
    assert float((row.logits - plain.logits(idle.tokens)[-1]).abs().max()) < 1e-4
    for seq in (idle, busy):
        model.release(seq)
    await model.close()


async def test_reading_ahead_never_takes_memory_from_anybody() -> None:
    model, _ = twins(TINY, seed=4, block_size=4, num_blocks=8)
    held = Sequence([5] * 24, SamplingParams(temperature=0.0), seed=0)
    await model.extend(held)
    ahead = Sequence([6] * 24, SamplingParams(temperature=0.0), seed=0)
    async with asyncio.timeout(10):
        await asyncio.gather(model.prefill_ahead(ahead), model.prefill_ahead(ahead))
    assert len(model.batcher.tables[held]) == 24
    assert len(model.batcher.tables[ahead]) < 24
    for seq in (held, ahead):
        model.release(seq)
    await model.close()


async def test_a_sequence_that_can_never_fit_is_refused_at_once() -> None:
    model, _ = twins(TINY, seed=4, block_size=4, num_blocks=8)
    fits = Sequence([5] * 30, SamplingParams(temperature=0.0, max_tokens=2), seed=0)
    running = asyncio.create_task(model.decode(fits))
    too_long = Sequence([5] * 33, SamplingParams(temperature=0.0), seed=0)
    with pytest.raises(TurnoutError, match=r"a sequence of 33 tokens does not fit .* \(32 tokens\)") as caught:
        await model.extend(too_long)
    assert caught.value.code is Code.OUT_OF_RANGE
    assert len((await running).tokens) == 2
    for seq in (fits, too_long):
        model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


async def test_a_call_that_can_never_fit_leaves_nothing(pair_folder: Path) -> None:
    tight = small_pool(pair_folder, 8)
    with pytest.raises(TurnoutError) as caught:
        await answer(tight, call_of([5] * 40, "plain"))
    assert caught.value.code is Code.OUT_OF_RANGE
    reply = await answer(tight, call_of([5] * 10, "plain", max_tokens=4))
    assert len(reply.ids) == 4
    await close(tight)
