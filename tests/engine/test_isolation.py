"""A forward that fails fails only the operations that cause it; the others get what they would have got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decoding.sequence import Sequence as Tokens
from engine.runner import Feed
from pool.local_pool import LocalPool
from tests.engine.harness import ask_all, call_of, random_prompts, until
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

POISON = 77


def poisoned(feed: Feed) -> bool:
    return POISON in feed.table.seq.tokens


def plant(pool: LocalPool, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Sequence[Feed]], bool]) -> list[int]:
    """Let forwards with a fault raise; returns the number of sequences in each that did."""
    failed: list[int] = []
    for model in pool.engines.values():
        original = model.batcher.runner.run

        def run(feeds: Sequence[Feed], original: Any = original) -> Any:
            if fault(feeds):
                failed.append(len(feeds))
                raise RuntimeError("no such kernel")
            return original(feeds)

        monkeypatch.setattr(model.batcher.runner, "run", run)
    return failed


@pytest.mark.parametrize(
    ("method", "params"), [("plain", {}), ("speculative", {"length": "fixed"}), ("entropy_adaptive", {"window": 2})]
)
async def test_only_the_guilty_fail(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch, method: str, params: dict[str, Any]
) -> None:
    prompts = [[token % 70 for token in prompt] for prompt in random_prompts(6, 30, seed=2)]
    # Greedy answers are bytes above the poison, or the test would show it at once.
    calls = [call_of(prompt, method, params, max_tokens=8, logit_bias={POISON: -100.0}) for prompt in prompts]
    expected = await ask_all(pool, calls)
    failed = plant(pool, monkeypatch, lambda feeds: any(poisoned(feed) for feed in feeds))
    bad = [call_of([5, POISON, i], method, params) for i in range(2)]
    mixed = [calls[0], bad[0], *calls[1:4], bad[1], *calls[4:]]
    outcomes = await asyncio.gather(*(ask_all(pool, [call]) for call in mixed), return_exceptions=True)
    assert [type(outcome) for outcome in (outcomes[1], outcomes[5])] == [RuntimeError] * 2
    good = [outcome[0].ids for i, outcome in enumerate(outcomes) if i not in (1, 5)]  # type: ignore[index]
    assert good == [reply.ids for reply in expected]
    assert max(failed) > 2, "the guilty were never in a batch with others"
    assert failed.count(1) == 2, "each of the guilty is tried alone once"


async def test_an_operation_that_fails_alone_is_not_tried_again(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = plant(pool, monkeypatch, lambda feeds: True)
    with pytest.raises(RuntimeError, match="no such kernel"):
        await ask_all(pool, [call_of([5, 6], "plain")])
    assert failed == [1]


async def test_a_fault_of_the_batch_alone_fails_nobody(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [call_of(prompt, "plain", max_tokens=6) for prompt in random_prompts(5, 20, seed=4)]
    expected = await ask_all(pool, calls)
    failed = plant(pool, monkeypatch, lambda feeds: len(feeds) > 3)
    assert [reply.ids for reply in await ask_all(pool, calls)] == [reply.ids for reply in expected]
    assert failed


async def test_who_is_released_while_the_others_are_tried_gives_its_blocks_back(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pool.engines["large"]
    seqs = [Tokens([5 + i] * 9, SamplingParams(temperature=0.0), seed=0) for i in range(3)]
    loop, original = asyncio.get_running_loop(), model.batcher.runner.run

    def run(feeds: Sequence[Feed]) -> Any:
        if len(feeds) > 1:
            raise RuntimeError("no such kernel")
        if feeds[0].table.seq is seqs[0]:
            loop.call_soon_threadsafe(model.release, seqs[1])
        return original(feeds)

    monkeypatch.setattr(model.batcher.runner, "run", run)
    first, second, third = await asyncio.gather(*(model.extend(seq) for seq in seqs), return_exceptions=True)
    assert isinstance(second, TurnoutError)
    assert second.code is Code.CANCELLED
    assert [len(rows) for rows in (first, third)] == [1, 1]  # type: ignore[arg-type]
    for seq in (seqs[0], seqs[2]):
        model.release(seq)


async def test_a_fault_between_two_steps_leaves_no_operation_waiting(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seq = pool.engines["large"], Tokens([5] * 9, SamplingParams(temperature=0.0), seed=0)

    def fail(member: Any) -> bool:
        raise RuntimeError("no such forecast")

    with monkeypatch.context() as patch:
        patch.setattr(model.batcher.device, "is_delayed", fail)
        reading = asyncio.create_task(model.extend(seq))
        await until(lambda: not model.batcher.num_waiting and reading.done())
    with pytest.raises(RuntimeError, match="no such forecast"):
        await reading
    assert len(await model.extend(seq)) == 1
    model.release(seq)
