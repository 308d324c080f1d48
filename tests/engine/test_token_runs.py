"""Steps that follow each other on the device's thread: the tokens, meters and blocks of steps taken one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from collections.abc import Sequence as Items
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from decoding.model import StopCondition
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.runner import Feed
from engine.scheduler.queued_operation import QueuedOperation
from engine.token_batch import TokenBatch
from tests.engine.harness import random_prompts, twins
from training.random_models import llama_config
from turnout.errors import TurnoutError
from turnout.types import SamplingParams

TINY = llama_config(60, hidden_size=32, intermediate_size=48, pad_token_id=0, eos_token_id=1)
PROMPTS = [[2 + token % 58 for token in prompt] for prompt in random_prompts(6, 20, seed=5)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]


class StopAfter:
    """Ends the text with one of some tokens, once there are enough of them."""

    watches = True

    def __init__(self, ends: Iterable[int], least: int) -> None:
        self.ends, self.left = frozenset(ends), least

    def feed(self, token_id: int) -> bool:
        self.left -= 1
        return self.left < 0 and token_id in self.ends

    def clone(self) -> StopAfter:
        return StopAfter(self.ends, self.left)


def answers(kinds: Items[int], ends: frozenset[int] = frozenset()) -> list[Sequence]:
    """Sequences to be decoded, of these kinds; some end at end tokens, some at texts."""
    made = []
    for place, kind in enumerate(kinds):
        sampling = SamplingParams(max_tokens=30 + 7 * place, ignore_eos=place % 2 == 0, **KINDS[kind])
        stop = StopAfter(ends, 5 + place) if ends else None
        made.append(Sequence(PROMPTS[place], sampling, 100 + place, eos_ids=(7, 11), stop=stop))
    return made


def batches(model: EngineModel) -> list[int]:
    """Rows of the forwards that follow each other, from now on."""
    rows: list[int] = []
    run = model.batcher.runner.run

    def noted(feeds: Items[Feed]) -> Any:
        if isinstance(feeds, TokenBatch):
            rows.append(len(feeds))
        return run(feeds)

    model.batcher.runner.run = noted  # type: ignore[method-assign]
    return rows


def log_probabilities(seqs: Iterable[Sequence]) -> list[float]:
    """Those of all tokens and their alternatives, in their order."""
    tokens = [token for seq in seqs for token in seq.generated if token.logprob is not None]
    return [value for token in tokens for value in (token.logprob or 0.0, *(each for _, each in token.top))]


async def streamed(model: EngineModel, seq: Sequence) -> list[int]:
    async with aclosing(model.stream(seq)) as segments:  # type: ignore[type-var]
        return [token.id async for segment in segments for token in segment.tokens]


@pytest.mark.parametrize("blocks", [None, 30])
@pytest.mark.parametrize("ends", [frozenset[int](), frozenset(range(20, 40))])
@pytest.mark.parametrize("kinds", [[0, 0, 0, 0], [1, 2, 4], [0, 1, 2, 3, 4], [0, 5, 1]])
async def test_answers_are_those_of_single_steps(
    monkeypatch: pytest.MonkeyPatch, kinds: list[int], ends: frozenset[int], blocks: int | None
) -> None:
    found, measured = [], []
    for runs in (True, False):
        if not runs:
            monkeypatch.setattr(QueuedOperation, "runs", False)
        model, _ = twins(TINY, 3, num_blocks=blocks, block_size=4)
        followed, seqs, streams = batches(model), answers(kinds, ends), answers(kinds, ends)
        said = await asyncio.gather(*map(model.decode, seqs))
        if runs and 5 not in kinds:
            assert len(followed) > 10
        assert [segment.tokens for segment in said] == [tuple(seq.generated) for seq in seqs]
        assert await asyncio.gather(*(streamed(model, seq) for seq in streams)) == [seq.answer for seq in seqs]
        fed = [seq.meter.models[model.name].decode_tokens for seq in (*seqs, *streams) if blocks is None]
        wrote = [[(token.id, token.source) for token in seq.generated] for seq in (*seqs, *streams)]
        found.append((wrote, [seq.finish_reason for seq in (*seqs, *streams)], fed))
        measured.append(log_probabilities([*seqs, *streams]))
        for seq in (*seqs, *streams):
            model.release(seq)
        assert model.pool.num_held == 0
        model.pool.check_integrity()
        await model.close()
    assert found[0] == found[1]
    # An answer that has ended leaves a run a step later, and where memory is short others wait: batches differ, and in
    # another batch float32 products round their last bits otherwise, as between an answer in a batch and one alone.
    assert measured[0] == pytest.approx(measured[1], abs=1e-5)
    assert bool(measured[0]) is (3 in kinds)
    assert all(seq.finish_reason is not None for seq in seqs)


@pytest.mark.parametrize("change", ["join", "cancel", "release", "quiet"])
async def test_what_changes_is_seen_by_the_next_step(change: str) -> None:
    model, _ = twins(TINY, 3)
    [first, second], run = answers([0, 0]), model.batcher.runner.run
    second.sampling = first.sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    rows, changed, begun = list[int](), threading.Event(), threading.Event()

    def held(feeds: Items[Feed]) -> Any:
        rows.append(len(feeds))
        if isinstance(feeds, TokenBatch) and not begun.is_set():
            begun.set()
            assert changed.wait(60)
        return run(feeds)

    model.batcher.runner.run = held  # type: ignore[method-assign]
    tasks = [asyncio.create_task(model.decode(seq)) for seq in (first, second)]
    while not begun.is_set():
        await asyncio.sleep(0)
    before = len(rows)
    third = Sequence(PROMPTS[2], SamplingParams(temperature=0.0, max_tokens=4), 0)
    if change == "join":
        tasks.append(asyncio.create_task(model.decode(third, StopCondition(max_tokens=2))))
    elif change == "cancel":
        tasks[1].cancel()
    elif change == "release":
        model.release(second)
    else:
        tasks.append(asyncio.create_task(model.batcher.device.between(lambda: rows.append(0))))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    changed.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert rows[before] == {"join": 3, "cancel": 1, "release": 1, "quiet": 0}[change]
    assert len(first.generated) == 40
    expected = {"cancel": asyncio.CancelledError, "release": TurnoutError}.get(change)
    assert expected is None or isinstance(results[1], expected)
    alone = answers([0])[0]
    alone.sampling = first.sampling
    await model.decode(alone)
    assert alone.answer == first.answer
    for seq in (first, second, third, alone):
        model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


async def test_a_forward_that_fails_among_others_costs_no_token() -> None:
    model, _ = twins(TINY, 3)
    [seq], [expected], failed, run = answers([0]), answers([0]), [0], model.batcher.runner.run
    await model.decode(expected)

    def faulty(feeds: Items[Feed]) -> Any:
        failed[0] += isinstance(feeds, TokenBatch)
        if failed[0] == 3:
            failed[0] += 1
            raise RuntimeError("no such kernel")
        return run(feeds)

    model.batcher.runner.run = faulty  # type: ignore[method-assign]
    await model.decode(seq)
    assert failed[0] > 3
    assert seq.generated == expected.generated
    await model.close()


async def test_who_leaves_a_stream_leaves_nothing_and_is_charged_for_what_came() -> None:
    model, _ = twins(TINY, 3)
    [seq] = answers([0])
    seq.sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)  # more than a run or two give
    async with aclosing(model.stream(seq)) as segments:  # type: ignore[type-var]
        async for segment in segments:
            assert segment.tokens
            # The first token comes of the prompt; what runs still is not entered anywhere yet.
            assert seq.meter.models[model.name].decode_tokens == len(seq.generated) - 1
            if len(seq.generated) > 6:
                break
    left = len(seq.generated)
    model.release(seq)
    assert model.batcher.num_waiting == 0
    async with model.batcher.device.quiet():
        assert model.pool.num_held == 0
    assert len(seq.generated) == left < 200
    await model.close()


@pytest.mark.parametrize("at", ["layout", "forward"])
async def test_where_every_run_fails_planned_steps_write_all_answers(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """No answer fails, of the run or of those that wait for a place, and no failing run is begun again at once."""
    model, _ = twins(TINY, 3)
    seqs, expected, failed, run = answers([0] * 4), answers([0] * 4), list[int](), model.batcher.runner.run
    for seq in expected:
        await model.decode(seq)
    model.batcher.limits = replace(model.batcher.limits, max_batch=2)

    def faulty(feeds: Any, *_: Any) -> Any:
        if at == "forward" and not isinstance(feeds, TokenBatch):
            return run(feeds)
        failed.append(sum(len(seq.generated) for seq in seqs))
        raise RuntimeError("no memory left on the device")

    if at == "forward":
        model.batcher.runner.run = faulty  # type: ignore[method-assign]
    else:
        monkeypatch.setattr("engine.scheduler.token_run.TokenBatch", faulty)
    async with asyncio.timeout(60):
        await asyncio.gather(*map(model.decode, seqs))
    assert [seq.answer for seq in seqs] == [seq.answer for seq in expected]
    assert len(failed) > 10
    assert len(set(failed)) == len(failed)  # between two of them tokens were written
    for seq in (*seqs, *expected):
        model.release(seq)
    assert model.pool.num_held == 0
    model.pool.check_integrity()
    await model.close()
