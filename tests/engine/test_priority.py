"""Work of batches gives way to interactive requests within a step, uses what is left, and is answered the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.device import Device
from engine.scheduler.block_allocator import BlockAllocator
from engine.scheduler.fairness import LARGEST_BALANCE_S, MinimumShare
from pool.local_pool import LocalPool
from tests.engine.harness import answer, call_of, pair_config, random_prompts, shrink
from tests.engine.step_times import Clock, LinearTime
from turnout.calls import GenerateCall

# Nearly flat up to a few rows, then linear, as forwards are.
TIMES = {"base": 4e-3, "per_token": 1e-4, "per_position": 1e-7, "per_sequence": 2e-4}
METHODS = [
    ("plain", {"model": "large"}),
    ("speculative", {"length": "fixed", "draft_length": 3}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
]


async def make(folder: Path, **engine: float) -> tuple[LocalPool, Clock]:
    pool = LocalPool.load("pair", pair_config(folder, block_size=8, **engine))  # type: ignore[arg-type]
    clock = Clock(LinearTime(**TIMES))
    for model in pool.engines.values():
        clock.drive(model)
    for device in {model.batcher.device for model in pool.engines.values()}:
        by_clock(device, clock)
    return pool, clock


def by_clock(device: Device, clock: Clock) -> None:
    """Let the share that batches get be of the clock's time: a busy machine's own is anybody's guess."""
    device.clock = lambda: clock.now
    took = device.charge
    device.charge = lambda low_priority, _: took(low_priority, clock.times.of(clock.steps[-1][1]))  # type: ignore[method-assign]


@pytest.fixture
async def timed(pair_folder: Path) -> AsyncIterator[tuple[LocalPool, Clock]]:
    pool, clock = await make(pair_folder)
    yield pool, clock
    await pool.close()
    stats = pool.stats()
    assert (stats.requests, stats.batch_requests, stats.sequences, stats.used_blocks) == (0, 0, 0, 0)


def batch_calls(count: int, method: str, params: dict[str, object], tokens: int = 60) -> list[GenerateCall]:
    return [
        replace(
            call_of(prompt, method, params, tenant="offline", max_tokens=tokens, ignore_eos=True, seed=place),
            priority="batch",
        )
        for place, prompt in enumerate(random_prompts(count, 120, seed=3))
    ]


async def until(clock: Clock, steps: int) -> None:
    while len(clock.steps) < steps:
        await asyncio.sleep(0)


@pytest.mark.parametrize(("method", "params"), METHODS)
@pytest.mark.parametrize("tenant", ["offline", "other"])
async def test_no_step_of_a_batch_begins_while_an_interactive_request_waits(
    timed: tuple[LocalPool, Clock], method: str, params: dict[str, object], tenant: str
) -> None:
    pool, clock = timed
    crowd = [asyncio.create_task(answer(pool, each)) for each in batch_calls(40, method, params)]
    await until(clock, 12)
    call = call_of([9] * 100, method, params, tenant=tenant, max_tokens=40, ignore_eos=True)
    before = len(clock.steps)
    await answer(pool, call)
    steps = [[feed.table.seq.low_priority for feed in feeds] for _, feeds in clock.steps[before:]]
    own = [place for place, low in enumerate(steps) if not all(low)]
    assert own[0] <= 1  # one was under way when it came
    assert own == list(range(own[0], own[-1] + 1))
    assert not any(any(low) for low in steps[own[0] : own[-1] + 1])
    assert pool.stats().batch_requests > 0
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)


@pytest.mark.parametrize(("method", "params"), METHODS)
async def test_a_batch_is_answered_as_if_nobody_had_interrupted_it(
    timed: tuple[LocalPool, Clock], method: str, params: dict[str, object]
) -> None:
    pool, clock = timed
    calls = batch_calls(12, method, params, tokens=24)
    alone = [(await answer(pool, each)).ids for each in calls]
    crowd = [asyncio.create_task(answer(pool, each)) for each in calls]
    for start in range(6):
        await until(clock, len(clock.steps) + 3)
        await answer(pool, call_of([9, start], method, params, max_tokens=8, ignore_eos=True))
    assert [(await task).ids for task in crowd] == alone


async def test_a_step_of_a_batch_is_short(timed: tuple[LocalPool, Clock]) -> None:
    pool, clock = timed
    crowd = [asyncio.create_task(answer(pool, each)) for each in batch_calls(60, "plain", {"model": "large"})]
    await asyncio.gather(*crowd)
    limit = pool.engines["large"].batcher.limits.low_priority_slowdown * clock.times.seconds(1, 1, 1)
    assert max(clock.times.of(feeds) for _, feeds in clock.steps) <= limit
    # ... and no shorter than it must be: the crowd shares its steps.
    assert max(len(feeds) for _, feeds in clock.steps) > 20


async def test_it_is_shorter_while_interactive_requests_come(
    timed: tuple[LocalPool, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.device.RECENT_S", 0.5)
    pool, clock = timed
    plain: tuple[str, dict[str, object]] = ("plain", {"model": "large"})
    crowd = [asyncio.create_task(answer(pool, each)) for each in batch_calls(60, *plain)]
    await until(clock, 12)
    await answer(pool, call_of([9] * 40, *plain, tenant="other", max_tokens=8, ignore_eos=True))
    came, before = clock.now, len(clock.steps)
    await asyncio.gather(*crowd)
    limits, single = pool.engines["large"].batcher.limits, clock.times.seconds(1, 1, 1)
    row = single - TIMES["base"]  # a prompt is fed one token in any case
    at, beside, later = came, [], []
    for _, feeds in clock.steps[before + 1 :]:  # the first one may have been planned before it ended
        (beside if at < came + 0.4 else later).append(took := clock.times.of(feeds))
        at += took
    assert max(beside) <= limits.low_priority_slowdown_interactive * single + row
    assert limits.low_priority_slowdown_interactive * single + row < max(later) <= limits.low_priority_slowdown * single


async def test_with_a_share_a_batch_goes_on_beside_interactive_requests(pair_folder: Path) -> None:
    pool, clock = await make(pair_folder, batch_share=0.25)
    try:
        crowd = [asyncio.create_task(answer(pool, each)) for each in batch_calls(20, "plain", {"model": "large"})]
        await until(clock, 12)
        before, start = len(clock.steps), clock.now
        call = call_of([9] * 40, "plain", {"model": "large"}, tenant="other", max_tokens=200, ignore_eos=True)
        await answer(pool, call)
        spent = sum(
            clock.times.of(feeds)
            for _, feeds in clock.steps[before + 1 : -1]
            if any(feed.table.seq.low_priority for feed in feeds)
        )
        assert 0.15 <= spent / (clock.now - start) <= 0.35
        await asyncio.gather(*crowd)
    finally:
        await pool.close()


async def test_a_batch_that_fills_the_cache_gives_its_blocks_to_an_interactive_request(pair_folder: Path) -> None:
    pool, clock = await make(pair_folder)
    for model in pool.engines.values():
        shrink(model, 40)
    try:
        calls = [
            replace(
                call_of([place, 7] * 10, "plain", {"model": "large"}, max_tokens=80, ignore_eos=True), priority="batch"
            )
            for place in range(6)
        ]
        alone = [(await answer(pool, each)).ids for each in calls]
        crowd = [asyncio.create_task(answer(pool, each)) for each in calls]
        await until(clock, len(clock.steps) + 40)
        assert pool.stats().used_blocks > 20
        # Two at once: the second must not wait until the first has ended, or a batch has.
        steps = len(clock.steps)
        pair = [
            answer(pool, call_of([each] * 90, "plain", {"model": "large"}, max_tokens=10, ignore_eos=True))
            for each in (200, 201)
        ]
        await asyncio.gather(*pair)
        assert len(clock.steps) - steps < 40
        assert [(await task).ids for task in crowd] == alone
    finally:
        await pool.close()


async def test_a_batch_that_finds_no_memory_does_not_stop_others_by_its_share(pair_folder: Path) -> None:
    pool, clock = await make(pair_folder, batch_share=0.25)
    for model in pool.engines.values():
        shrink(model, 30)
    try:
        call = call_of([9] * 150, "plain", {"model": "large"}, max_tokens=60, ignore_eos=True)
        first = asyncio.create_task(answer(pool, call))
        await until(clock, 5)
        [waiting] = [asyncio.create_task(answer(pool, each)) for each in batch_calls(1, "plain", {"model": "large"})]
        async with asyncio.timeout(20):
            answers = await asyncio.gather(first, waiting)
        assert [len(each.ids) for each in answers] == [60, 60]
    finally:
        await pool.close()


async def test_without_batches_nobody_looks_for_their_memory(
    timed: tuple[LocalPool, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, _ = timed
    asked = []
    monkeypatch.setattr(BlockAllocator, "_takeable", lambda *given: asked.append(given) or 0)
    calls = [call_of([place, 9] * 20, "plain", {}, max_tokens=8, ignore_eos=True) for place in range(6)]
    answers = await asyncio.gather(*(answer(pool, each) for each in calls))
    assert [len(each.ids) for each in answers] == [8] * 6
    assert asked == []


async def test_batches_take_no_places_of_interactive_requests(pair_folder: Path) -> None:
    config = pair_config(pair_folder)
    pool_settings = config.pools["pair"].model_copy(update={"max_ongoing_requests": 2, "max_queued_requests": 100})
    pool = LocalPool.load("pair", config.model_copy(update={"pools": {"pair": pool_settings}}))
    try:
        crowd = [asyncio.create_task(answer(pool, each)) for each in batch_calls(20, "plain", {})]
        while pool.stats().batch_requests <= 2:
            await asyncio.sleep(0)
        stats = pool.stats()
        assert (stats.requests, stats.queued) == (0, stats.batch_requests - 2)
        await answer(pool, call_of([9], "plain", max_tokens=4))
        assert not all(task.done() for task in crowd)
        await asyncio.gather(*crowd)
    finally:
        await pool.close()


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 0.2)), max_size=60), st.floats(0.05, 0.9))
def test_a_floor_gives_its_share_whatever_the_steps_are(steps: list[tuple[bool, float]], share: float) -> None:
    floor, patient_s, other_s = MinimumShare(share), 0.0, 0.0
    for _, seconds in steps * 5:
        if floor.due:
            patient_s += seconds
        else:
            other_s += seconds
        floor.charge(floor.due, seconds)
    total = patient_s + other_s
    assert abs(patient_s - share * total) <= max(0.2, LARGEST_BALANCE_S) + 1e-6


def test_without_a_share_there_is_no_floor() -> None:
    floor = MinimumShare()
    floor.charge(False, 10.0)
    assert not floor.due
