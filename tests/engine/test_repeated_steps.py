"""A step like the last one is repeated without a plan: it is the step that a plan would come to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest

from decoding.model import Readout, StopCondition
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.runner import Feed
from engine.scheduler.step_builder import Step, StepBuilder
from tests.engine.harness import random_prompts, twins
from training.random_models import llama_config
from turnout.types import SamplingParams

TINY = llama_config(60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
PROMPTS = [[2 + token % 58 for token in prompt] for prompt in random_prompts(6, 20, seed=5)]
PLAN = StepBuilder._plan
Steps = list[list[tuple[int, tuple[int, ...]]]]  # by forward: whose tokens, and which


def watched(model: EngineModel, order: dict[Sequence, int]) -> Steps:
    """The forwards of a model from now on."""
    steps: Steps = []
    run = model.batcher.runner.run

    def noted(feeds: Items[Feed]) -> Items[list[Readout]]:
        steps.append([(order[feed.table.seq], tuple(feed.tokens)) for feed in feeds])
        return run(feeds)

    model.batcher.runner.run = noted  # type: ignore[method-assign]
    return steps


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each plan from now on."""
    plans: list[None] = []

    def counting(*args: Any) -> Step:
        plans.append(None)
        return PLAN(*args)

    monkeypatch.setattr(StepBuilder, "_plan", counting)
    return plans


async def work(model: EngineModel, tenants: int, kinds: Items[SamplingParams]) -> tuple[Steps, list[list[int]]]:
    """Answers that begin one after the other, end at different times, are forked and left; forwards and tokens."""
    sequences = [
        Sequence(prompt, sampling, seed, tenant=f"t{seed % tenants}")
        for seed, (prompt, sampling) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    order = {seq: place for place, seq in enumerate(sequences)}
    model.batcher.times = None  # predictions are learned from times, which no two runs share
    steps = watched(model, order)
    first = asyncio.create_task(asyncio.wait_for(model.decode(sequences[0]), 60))
    for seq in sequences[1:5]:
        await model.decode(seq, StopCondition(max_tokens=3))
    twin = model.fork(sequences[1])
    order[twin] = len(order)
    await asyncio.gather(*map(model.decode, [*sequences[1:4], twin]))
    planned = list(steps)  # from here on, when a task is cancelled says what is in a step
    left = asyncio.create_task(model.decode(sequences[4]))
    last = asyncio.create_task(model.decode(sequences[5]))
    while len(sequences[5].generated) < 5:
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(first, last)
    await asyncio.wait([left])
    said = [seq.answer for seq in [*sequences[:4], sequences[5], twin]]
    for seq in [*sequences, twin]:
        model.release(seq)
    return planned, said


def sampling(number: int) -> SamplingParams:
    return SamplingParams(temperature=(number % 2) / 2, max_tokens=40 + 9 * number, ignore_eos=True)


@pytest.mark.parametrize(("blocks", "tenants"), [(None, 1), (30, 1), (None, 2)])
async def test_steps_and_tokens_are_those_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, blocks: int | None, tenants: int
) -> None:
    found, plans = [], []
    for repeats in (True, False):
        if not repeats:
            monkeypatch.setattr(StepBuilder, "_repeated", lambda *_: None)
            monkeypatch.setattr(StepBuilder, "_run_of", lambda *_: None)
        counted = count_plans(monkeypatch)
        model, _ = twins(TINY, 3, num_blocks=blocks, block_size=4)
        found.append(await work(model, tenants, [sampling(number) for number in range(6)]))
        plans.append(len(counted))
        monkeypatch.undo()
        model.pool.check_integrity()
        await model.close()
    assert found[0] == found[1]
    assert len(found[0][0]) > 60
    assert plans[1] >= plans[0]
    if tenants == 1 and blocks is None:
        assert plans[0] < plans[1] / 3


async def test_a_full_step_is_repeated_while_prompts_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts wait for a place of two: a step is planned when an answer ends, and every step is the plan's."""
    found, plans = [], []
    for repeats in (True, False):
        if not repeats:
            monkeypatch.setattr(StepBuilder, "_repeated", lambda *_: None)
            monkeypatch.setattr(StepBuilder, "_run_of", lambda *_: None)
        counted = count_plans(monkeypatch)
        model, _ = twins(TINY, 3, block_size=4)
        model.batcher.times, model.batcher.limits = None, replace(model.batcher.limits, max_batch=2)
        sequences = [Sequence(prompt, sampling(number), number) for number, prompt in enumerate(PROMPTS)]
        steps = watched(model, {seq: place for place, seq in enumerate(sequences)})
        await asyncio.gather(*map(model.decode, sequences))
        found.append((steps, [seq.answer for seq in sequences]))
        plans.append(len(counted))
        monkeypatch.undo()
        assert max(map(len, steps)) == 2
        for seq in sequences:
            model.release(seq)
        model.pool.check_integrity()
        await model.close()
    assert found[0] == found[1]
    assert plans[0] < plans[1] / 3
