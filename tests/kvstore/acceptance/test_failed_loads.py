"""Acceptance test 10: loads that fail at once or half way, with nothing else to do and with shared blocks."""

from __future__ import annotations

import asyncio
import time

import pytest

from decoding.model import StopCondition
from kvstore.fakes import FaultyStore, Plan
from kvstore.redis.redis_store import RedisStore
from tests.engine.margin import assert_best
from tests.kvstore.acceptance.workers import CHUNK, Worker, prompt_of, store_prompt, working
from tests.kvstore.prefixes import gated, until

PROMPT = prompt_of(4 * CHUNK + 3)
BUDGET_S = 0.5
# Beyond the budget: for computing on a busy machine.
STALL_S = BUDGET_S + 4.0
RECOVERY_S = 40.0
SYNC = {
    "refused at once": Plan(faults=("refused",)),
    "unreachable at once": Plan(faults=("unreachable",)),
    "nothing is there any more": Plan(vanish=frozenset(range(4))),
}
ASYNC = {
    "unreachable after the probe": Plan(faults=(None, "unreachable")),
    "torn in the first value": Plan(torn=frozenset({0})),
    "torn in a later value": Plan(torn=frozenset({2})),
    "flipped": Plan(flip=frozenset({1})),
    "later than the budget": Plan(late_s=30.0),
}


@pytest.mark.parametrize("name", [*SYNC, *ASYNC])
async def test_an_idle_engine_answers_after_a_failed_load(store: RedisStore, name: str) -> None:
    """Nothing else happens in the engine that could wake it up."""
    await store_prompt(store, PROMPT)
    faulty = FaultyStore(store, Plan())
    async with working(faulty, fetch_timeout_s=BUDGET_S) as worker:
        await worker.answer(prompt_of(3))
        faulty.plan = {**SYNC, **ASYNC}[name]
        async with asyncio.timeout(STALL_S):
            got = await worker.answer(PROMPT)
        assert got.computed + got.cached == len(PROMPT)
        assert got.fetched <= 2 * CHUNK
        faulty.plan = Plan()
        await _until_all_is_fetched(worker)


async def _until_all_is_fetched(worker: Worker) -> None:
    """At once where the link was not slow; one that was is tried again after some seconds."""
    async with asyncio.timeout(RECOVERY_S):
        while True:
            await worker.forget()
            if (await worker.answer(PROMPT)).fetched == 4 * CHUNK:
                return


@pytest.mark.parametrize("name", ["refused at once", "torn in a later value", "flipped"])
async def test_those_who_share_the_blocks_of_a_failed_load_are_answered(store: RedisStore, name: str) -> None:
    """Two heads in common, one request that forks, and one that leaves in the middle."""
    await store_prompt(store, PROMPT)
    fork = [*PROMPT[: 3 * CHUNK], *prompt_of(CHUNK, start=7)]
    faulty = FaultyStore(store, Plan())
    async with working(faulty, fetch_timeout_s=BUDGET_S) as worker:
        faulty.plan = (SYNC | ASYNC)[name]
        leaving = asyncio.create_task(worker.answer(PROMPT))
        others = [asyncio.create_task(worker.answer(prompt)) for prompt in (PROMPT, fork, PROMPT[: 2 * CHUNK], fork)]
        await until(lambda: worker.store.stats().lookups or worker.model.batcher.tables)
        leaving.cancel()
        await asyncio.wait([leaving])
        async with asyncio.timeout(STALL_S):
            got = await asyncio.gather(*others)
        assert [each.computed + each.cached for each in got] == [len(PROMPT), len(fork), 2 * CHUNK, len(fork)]
        await worker.settle()
        assert worker.model.pool.num_held == 0


async def test_forks_of_a_sequence_whose_load_failed_go_on(store: RedisStore) -> None:
    await store_prompt(store, PROMPT)
    faulty = FaultyStore(store, Plan(torn=frozenset({1})))
    async with working(faulty, fetch_timeout_s=BUDGET_S) as worker:
        seq = worker.sequence(PROMPT)
        await worker.model.extend(seq)
        twins = [worker.model.fork(seq, seed) for seed in (1, 2)]
        async with asyncio.timeout(STALL_S):
            await asyncio.gather(*(worker.model.decode(each, StopCondition()) for each in (seq, *twins)))
        for each in (seq, *twins):
            rows = worker.plain.logits(each.tokens)[len(PROMPT) - 1 : -1]
            for row, token in zip(rows, each.tokens[len(PROMPT) :], strict=True):
                assert_best(token, row)
            worker.model.release(each)


async def test_others_are_answered_while_a_load_hangs(store: RedisStore) -> None:
    """And the one that waits is answered within its budget, by computing."""
    await store_prompt(store, PROMPT)
    slow = gated(store)
    async with working(slow, fetch_timeout_s=BUDGET_S, connections=1) as worker:
        began = time.monotonic()
        waiting = asyncio.create_task(worker.answer(PROMPT))
        await until(lambda: slow.waiting)
        await answers_of(worker, 5)
        assert not waiting.done() or time.monotonic() - began > BUDGET_S
        async with asyncio.timeout(STALL_S):
            assert (await waiting).fetched == 0
        slow.gate.set()


async def answers_of(worker: Worker, count: int) -> None:
    """Prompts too short for the store, one after another."""
    for start in range(count):
        await worker.answer(prompt_of(CHUNK - 1, start))
