"""Giving up on a call, at any moment, frees its memory, tasks and place in the queue within a step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from decoding.sequence import Sequence
from decoding.tree import DraftTree
from decoding.verifiers.match import MatchVerifier
from pool.local_pool import LocalPool
from tests.engine.harness import ask, call_of, until
from turnout.calls import Chunk
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("speculative", {"length": "fixed"}),
    ("entropy_adaptive", {"window": 2, "min_stay": 2, "threshold": 2.0, "catch_up": "shadow"}),
    ("sentence_lead", {"catch_up": "eager"}),
]


class Gate:
    """Holds up a pool's forwards: each waits for `open` while `shut`."""

    def __init__(self, pool: LocalPool) -> None:
        self.forwards = 0
        self.inside = False
        self._open = threading.Event()
        self._open.set()
        for model in pool.engines.values():
            self._wrap(model.batcher.runner)

    def _wrap(self, runner: Any) -> None:
        original = runner.run

        def run(feeds: Any) -> Any:
            self.forwards += 1
            self.inside = True
            assert self._open.wait(timeout=30)
            self.inside = False
            return original(feeds)

        runner.run = run

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(pool: LocalPool) -> Iterator[Gate]:
    gate = Gate(pool)
    yield gate
    gate.open()


async def settled(pool: LocalPool, gate: Gate) -> None:
    """What was given up is gone at once, its blocks within a step."""
    assert (pool.stats().requests, pool.stats().sequences, pool.stats().waiting) == (0, 0, 0)
    before = gate.forwards
    gate.open()
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    assert gate.forwards <= before + 1
    assert pool.stats().used_blocks == 0


async def consume(stream: Any, seen: list[Any]) -> None:
    async for event in stream:
        seen.append(event)  # noqa: PERF401 one by one: others look at what has come so far


def long_call(method: str, params: dict[str, Any], prompt: int = 20, **options: Any) -> Any:
    return call_of([70] * prompt, method, params, max_tokens=300, ignore_eos=True, **options)


@pytest.mark.parametrize(("method", "params"), METHODS)
@pytest.mark.parametrize("phase", ["queued", "in the first forward", "mid-prefill", "mid-stream", "in a later forward"])
async def test_cancelling_frees_everything(
    pool: LocalPool, gate: Gate, method: str, params: dict[str, Any], phase: str
) -> None:
    seen: list[Any] = []
    task = asyncio.create_task(consume(pool.generate(long_call(method, params, prompt=200, n=2)), seen))
    if phase == "queued":
        gate.shut()
        other = asyncio.create_task(ask(pool, [1, 2], max_tokens=1))
        await until(lambda: gate.inside)
        await asyncio.sleep(0)
        other.cancel()
    elif phase == "in the first forward":
        gate.shut()
        await until(lambda: gate.inside)
    elif phase == "mid-prefill":
        await until(lambda: gate.forwards == 2)
        gate.shut()
        await until(lambda: gate.inside)
        assert not seen
    elif phase == "mid-stream":
        await until(lambda: len(seen) > 4)
    else:
        await until(lambda: len(seen) > 4)
        gate.shut()
        await until(lambda: gate.inside)
    task.cancel()
    await asyncio.wait([task] + ([other] if phase == "queued" else []))
    assert task.cancelled()
    assert len(seen) < 300
    await settled(pool, gate)
    assert (await ask(pool, [70] * 200, max_tokens=3)).ids


async def test_closing_the_stream_early_frees_everything(pool: LocalPool, gate: Gate) -> None:
    stream = pool.generate(long_call("speculative", {}, n=3))
    assert isinstance(await anext(stream), Chunk)
    await stream.aclose()
    await settled(pool, gate)


async def test_others_go_on_when_one_gives_up(pool: LocalPool, gate: Gate) -> None:
    expected = await ask(pool, [3, 4, 5], max_tokens=40, ignore_eos=True)
    staying = asyncio.create_task(ask(pool, [3, 4, 5], max_tokens=40, ignore_eos=True))
    leaving = [asyncio.create_task(consume(pool.generate(long_call(*method)), [])) for method in METHODS]
    await until(lambda: gate.forwards > 60)
    for task in leaving:
        task.cancel()
    assert (await staying).ids == expected.ids
    await asyncio.wait(leaving)
    await settled(pool, gate)


async def test_a_deadline_ends_the_call_and_frees_everything(pool: LocalPool, gate: Gate) -> None:
    gate.shut()
    with pytest.raises(TurnoutError, match=r"deadline_s: 0\.05 s have passed") as caught:
        await consume(pool.generate(long_call("entropy_adaptive", {}, deadline_s=0.05, n=2)), [])
    assert (caught.value.code, caught.value.field) == (Code.DEADLINE_EXCEEDED, "deadline_s")
    await settled(pool, gate)


async def test_a_deadline_passing_while_nobody_takes_events_frees_memory_and_is_reported_as_such(
    pool: LocalPool, gate: Gate
) -> None:
    stream = pool.generate(long_call("plain", {}, deadline_s=2.0))
    await anext(stream)
    gate.shut()
    # The consumer is busy elsewhere; it must not be cancelled for that, and the work must stop.
    await until(lambda: pool.stats().sequences == 0)
    with pytest.raises(TurnoutError) as caught:
        await consume(stream, [])
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    await settled(pool, gate)


async def test_a_deadline_that_is_kept_changes_nothing(pool: LocalPool) -> None:
    timed = await ask(pool, [3, 4, 5], deadline_s=60.0)
    assert timed.ids == (await ask(pool, [3, 4, 5])).ids
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_sequence_released_while_its_model_works_fails_its_waiter(pool: LocalPool, gate: Gate) -> None:
    model = pool.engines["large"]
    seq = Sequence([5] * 20, SamplingParams(temperature=0.0), seed=0)
    gate.shut()
    flying = asyncio.create_task(model.decode(seq))
    await until(lambda: gate.inside)
    model.release(seq)
    assert model.pool.num_held > 0
    gate.open()
    with pytest.raises(TurnoutError) as caught:
        await flying
    assert caught.value.code is Code.CANCELLED
    await settled(pool, gate)


async def test_a_sequence_released_just_before_its_verdict_moves_nothing(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pool.engines["large"]
    seq = Sequence([5] * 20, SamplingParams(temperature=0.0), seed=0)
    resolve = model.batcher._apply

    def resolve_and_release(*args: Any) -> None:
        resolve(*args)
        model.release(seq)

    monkeypatch.setattr(model.batcher, "_apply", resolve_and_release)
    before = [layer.clone() for layer in model.store.layers]
    with pytest.raises(TurnoutError, match="released"):
        await model.verify(seq, DraftTree((7, 8), (-1, -1), "d"), MatchVerifier())
    written = [
        int((old != new).any(-1).any(-1).any(-1).sum()) for old, new in zip(before, model.store.layers, strict=True)
    ]
    assert written == [22] * 3


async def test_a_sequence_released_while_it_queues_fails_its_waiter(pool: LocalPool, gate: Gate) -> None:
    model = pool.engines["large"]
    first, second = (Sequence([5] * 20, SamplingParams(temperature=0.0), seed=0) for _ in range(2))
    gate.shut()
    flying = asyncio.create_task(model.extend(first))
    await until(lambda: gate.inside)
    queued = asyncio.create_task(model.extend(second))
    await until(lambda: second in model.batcher.tables)
    model.release(second)
    with pytest.raises(TurnoutError, match="released"):
        await queued
    gate.open()
    assert len(await flying) == 1
    model.release(first)
    await settled(pool, gate)


async def test_an_operation_given_up_in_the_queue_is_forgotten_at_once(pool: LocalPool, gate: Gate) -> None:
    model = pool.engines["large"]
    first, second = (Sequence([5] * 20, SamplingParams(temperature=0.0), seed=0) for _ in range(2))
    gate.shut()
    flying = asyncio.create_task(model.extend(first))
    await until(lambda: gate.inside)
    reading = asyncio.create_task(model.prefill_ahead(second))
    await until(lambda: model.batcher.num_waiting == 2)
    reading.cancel()
    await asyncio.wait([reading])
    assert model.batcher.num_waiting == 1
    gate.open()
    await flying
    assert second.meter.models == {}
    for seq in (first, second):
        model.release(seq)
    await settled(pool, gate)


async def test_a_fork_made_during_a_forward_is_right(pool: LocalPool, gate: Gate) -> None:
    model = pool.engines["large"]
    seq = Sequence([5] * 21, SamplingParams(temperature=0.0, max_tokens=12), seed=0)
    await model.extend(seq)
    gate.shut()
    flying = asyncio.create_task(model.decode(seq))
    await until(lambda: gate.inside)
    twin = model.fork(seq)
    gate.open()
    await flying
    await model.decode(twin)
    assert [token.id for token in twin.generated] == [token.id for token in seq.generated]
    for each in (seq, twin):
        model.release(each)
    await settled(pool, gate)
