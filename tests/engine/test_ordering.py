"""Prompts ordered by what is cached of them (seed 222): the order, the bound on waiting, and what it brings."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.block import Block
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.scheduler.fairness import FairShare
from engine.scheduler.limits import DeviceState, Limits, arranged, note_started
from engine.scheduler.policy import Policy, plan_step
from engine.scheduler.queued_operation import QueuedOperation
from tests.engine.harness import twins
from tests.engine.step_times import Clock, LinearTime
from training.random_models import llama_config
from turnout.types import SamplingParams, Sharing

TINY = llama_config(
    60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1, max_position_embeddings=2048
)


@dataclass(eq=False)
class Item:
    """An operation that has not started, as ordering and the scheduler see it."""

    order: int
    hit_rate: float = 0.0
    overtaken: int = 0
    remaining: int = 10
    atomic: int = 1
    started: bool = False
    background: bool = False
    running: bool = False
    cached: int = 0
    tenant: str = "a"


def orders(prompts: list[Item], max_overtaken: int = 9, most: int = 64) -> list[int]:
    return [prompts[place].order for place in arranged(prompts, max_overtaken, most)]


def test_what_is_cached_most_goes_first_and_equals_by_age() -> None:
    prompts = [Item(3, 0.5), Item(1, 0.0), Item(2, 0.9), Item(0, 0.5)]
    assert orders(prompts) == [2, 0, 3, 1]
    assert orders(prompts, most=1) == [2, 0, 1, 3]


def test_who_was_overtaken_often_enough_is_next() -> None:
    prompts = [Item(0, 0.0, overtaken=1), Item(1, 0.9), Item(2, 0.8), Item(3, 0.7)]
    assert orders(prompts, max_overtaken=3) == [1, 2, 0, 3]
    assert orders(prompts, max_overtaken=1) == [0, 1, 2, 3]
    assert orders(prompts, max_overtaken=0) == [0, 1, 2, 3]
    # Older ones overtake nobody.
    assert orders([Item(0, 0.9), Item(1, 0.0, overtaken=3)], max_overtaken=3) == [0, 1]


def test_counting_is_of_younger_ones_only() -> None:
    prompts = [Item(order) for order in range(5)]
    note_started(prompts, {prompts[1], prompts[3]})
    assert [prompt.overtaken for prompt in prompts] == [2, 0, 1, 0, 0]


@given(st.integers(0, 10_000), st.integers(0, 5), st.integers(1, 4), st.integers(10, 40))
def test_nobody_is_overtaken_more_often_than_is_allowed(seed: int, bound: int, room: int, budget: int) -> None:
    """A stream of prompts of which more and better cached ones keep coming, through the scheduler, to its end."""
    draw = random.Random(seed)
    limits = Limits(budget, room, order="hit_rate", max_overtaken=bound)
    waiting: list[Item] = []
    overtakes: dict[int, int] = {}
    begun: list[int] = []
    number = 0
    for step in range(400):
        if step < 60:
            for _ in range(draw.randrange(4)):
                waiting.append(Item(number, hit_rate=draw.random() + number / 100, remaining=draw.randint(1, 30)))
                number += 1
        fresh = [item for item in waiting if not item.started]
        shares = plan_step(waiting, limits)
        stepping = [waiting[share.place] for share in shares]
        started = [item for item in fresh if item in stepping]
        note_started(fresh, set(started))
        for item in started:
            begun.append(item.order)
            for other in fresh:
                if other not in started and other.order < item.order:
                    overtakes[other.order] = overtakes.get(other.order, 0) + 1
        for share, item in zip(shares, stepping, strict=True):
            item.started, item.remaining = True, item.remaining - share.tokens
        waiting = [item for item in waiting if item.remaining]
    assert not waiting
    assert max(overtakes.values(), default=0) <= bound
    if bound == 0:
        assert begun == sorted(begun)


def test_without_a_bound_the_same_stream_starves_somebody() -> None:
    """The planted fault: it shows that the bound, and not the stream, keeps the oldest from waiting for ever."""
    waits = {}
    for bound in (5, 10**9):
        oldest = Item(0, 0.0)
        waiting = [oldest]
        for number in range(1, 200):
            waiting.append(Item(number, 0.9))
            limits = Limits(10, 1, order="hit_rate", max_overtaken=bound)
            [share] = plan_step(waiting, limits)
            first = waiting.pop(share.place)
            note_started([*waiting, first], {first})
            if first is oldest:
                waits[bound] = number
                break
    assert waits == {5: 6}


def test_other_precedence_stays_and_first_come_first_served_is_the_default() -> None:
    queue = [
        Item(0, 0.9, background=True, remaining=3),
        Item(1, 0.1),
        Item(2, 0.5, started=True),
        Item(3, 0.8),
        replace(Item(4), started=True, running=True, remaining=1),
    ]
    limits = Limits(100, 64)
    assert [share.place for share in plan_step(queue, limits)] == [4, 2, 1, 3, 0]
    assert [share.place for share in plan_step(queue, replace(limits, order="hit_rate"))] == [4, 2, 3, 1, 0]


def test_the_default_order_asks_nobody_what_is_cached() -> None:
    class Silent(Item):
        @property
        def hit_rate(self) -> float:  # type: ignore[override]
            raise AssertionError("asked")

        @hit_rate.setter
        def hit_rate(self, value: float) -> None:
            pass

    assert len(plan_step([Silent(0), Silent(1)], Limits(100, 64))) == 2


def prefix(seed: int, length: int) -> list[int]:
    return [(seed * 7 + i * i + i * seed) % 57 + 2 for i in range(length)]


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(tokens, SamplingParams(temperature=0.0, max_tokens=4), seed=0, sharing=Sharing.private("a"))


async def first_tokens(model: EngineModel, **limits: Any) -> list[float]:
    """Seconds of virtual time to the first token of prompts that come at once; every other one has a known prefix."""
    clock = Clock(LinearTime())
    clock.drive(model)
    model.batcher.limits = replace(model.batcher.limits, **limits)
    known = prefix(1, 320)
    seq = sequence([*known, 3])
    await model.extend(seq)
    model.release(seq)
    began = clock.now
    seqs = [sequence([*known, 4 + i] if i % 2 else prefix(2 + i, 321)) for i in range(12)]

    async def ttft(seq: Sequence) -> float:
        await model.extend(seq)
        return clock.now - began

    times = await asyncio.gather(*(ttft(seq) for seq in seqs))
    for seq in seqs:
        model.release(seq)
    await model.close()
    return times


async def test_the_mean_time_to_the_first_token_falls_where_prefixes_are_shared() -> None:
    means, longest = {}, {}
    for order in ("fifo", "hit_rate"):
        model, _ = twins(TINY, seed=4, token_budget=256)
        times = await first_tokens(model, order=order)
        means[order], longest[order] = sum(times) / len(times), max(times)
    assert means["hit_rate"] < 0.75 * means["fifo"]
    assert longest["hit_rate"] == pytest.approx(longest["fifo"], rel=0.05)


async def test_hit_rates_are_what_the_pool_has() -> None:
    model, _ = twins(TINY, seed=4)
    known = prefix(1, 320)
    seq = sequence([*known, 3])
    await model.extend(seq)
    model.release(seq)
    for tokens, expected in (
        ([*known, 5], 320 / 321),
        ([*known[:100], *prefix(9, 101)], 96 / 201),
        (prefix(8, 50), 0.0),
        ([7], 0.0),
    ):
        seq = sequence(tokens)
        assert QueuedOperation(model._table(seq)).hit_rate == pytest.approx(expected)
        model.release(seq)
    await model.close()


async def test_what_is_found_behind_a_gap_does_not_count() -> None:
    model, _ = twins(TINY, seed=4)
    known = prefix(1, 320)
    seq, again = sequence([*known, 3]), sequence([*known, 5])
    await model.extend(seq)
    model.pool.unpublish(model._table(seq).blocks[2])
    assert QueuedOperation(model._table(again)).hit_rate == pytest.approx(32 / 321)
    for each in (seq, again):
        model.release(each)
    await model.close()


async def test_a_prompt_that_got_no_room_in_its_step_has_started() -> None:
    """It shares its prefix from then on: what starts beside it did not overtake it."""
    model, _ = twins(TINY, seed=4)
    known = prefix(1, 96)
    await model.extend(seq := sequence([*known, 3]))
    older, younger = sequence([*known[:64], 4]), sequence([*known, 5])
    # The younger one is worth more; then there is room for 8 tokens, and the draft cannot be cut.
    model.batcher.limits = replace(model.batcher.limits, order="hit_rate", token_budget=9)
    draft = Block.chain((6,) * 8)
    works = [QueuedOperation(model._table(older), block=draft, apart=True), QueuedOperation(model._table(younger))]
    for work in works:
        model.batcher._queue.add(work)
    policy = Policy(model.batcher.limits, model.batcher.times, FairShare())
    assert [work for work, _ in model.batcher._builder.plan(policy, DeviceState()).parts] == [works[1]]
    assert works[0].started
    assert [work.overtaken for work in works] == [0, 0]
    await model.close()
    for each in (seq, older, younger):
        model.release(each)
    assert model.pool.num_held == 0
