"""Prompts computed on another copy of the model: the same answers, the work done once, and no harm from what fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.disaggregated_prefill import DisaggregatedModel
from decoding.model import ReadSpec, StopCondition, WrappedModel
from decoding.operations import PrefillAhead
from decoding.sequence import Sequence
from engine.kv_operations import ExportKV, ImportKV
from engine.kv_transfer import token_bytes
from engine.model import EngineModel
from tests.engine.harness import engine_model, random_prompts
from training.random_models import llama_config, random_model
from turnout.errors import Interrupted
from turnout.types import SamplingParams

pytestmark = pytest.mark.usefixtures("waits_for_kv")

BLOCK = 8
LEAST = 32
PROMPT = random_prompts(1, 1, seed=3)[0] + [(7 * i * i + 3 * i) % 256 for i in range(100)]


class Near(WrappedModel):
    """A copy of the model as if it were on an actor of its own."""

    def __init__(self) -> None:
        weights = random_model(llama_config(num_hidden_layers=2), seed=5, spread=0.2)
        self.model: EngineModel = engine_model(weights, block_size=BLOCK, token_budget=48)
        super().__init__(self.model)
        self.stuck: Callable[[], Awaitable[int]] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.imported: list[tuple[int, int]] = []
        self.fault: Exception | None = None
        self.roll = 0
        self.fetched = 0
        self.token_bytes = token_bytes(self.model)
        self.revive()

    def revive(self) -> None:
        self.supervisor: Any = SimpleNamespace(connection=SimpleNamespace(lost=asyncio.Event()))

    async def do(self, seq: Sequence, op: Any) -> Any:
        match op:
            case PrefillAhead():
                await self.gate.wait()
                await self.inner.do(seq, op)
                if self.fetched:
                    seq.meter.of("m", 0).fetched_tokens = self.fetched
                return None
            case ExportKV():
                if self.fault is not None:
                    raise self.fault
                return (await self.inner.do(seq, op)).roll(self.roll, 1)
            case ImportKV():
                self.imported.append((op.start, op.kv.shape[1]))
                if self.stuck is not None:
                    return await self.stuck()
        return await self.inner.do(seq, op)

    async def close(self) -> None:
        await self.model.close()
        await asyncio.to_thread(self.model.batcher.device.close)


class Trio:
    """A model that decodes, two that prefill, and one that is left alone, to compare with."""

    def __init__(self) -> None:
        self.decode, self.first, self.second, self.alone = (Near() for _ in range(4))
        self.all = (self.decode, self.first, self.second, self.alone)
        self.model = DisaggregatedModel(self.decode, (self.first, self.second), LEAST)  # type: ignore[arg-type]

    @property
    def mover(self) -> Any:
        return self.model.mover

    def computed(self, near: Near) -> int:
        """Tokens a copy has a cache of for sequences in work."""
        return sum(len(table) for table in near.model.batcher.tables.values())


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    made = Trio()
    yield made
    for near in made.all:
        assert not near.model.batcher.tables
        near.model.pool.check_integrity()
        assert near.model.pool.num_held == 0
    await made.model.close()
    await made.alone.close()


def sequence(prompt: list[int] = PROMPT, temperature: float = 0.0, seed: int = 4) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=temperature, max_tokens=12), seed)


async def expected(trio: Trio, temperature: float = 0.0, prompt: list[int] = PROMPT) -> list[int]:
    seq = sequence(prompt, temperature)
    await trio.alone.model.decode(seq)
    trio.alone.model.release(seq)
    return seq.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_answer_is_that_of_one_model_and_the_prompt_is_computed_once(trio: Trio, temperature: float) -> None:
    seq = sequence(temperature=temperature)
    await trio.model.decode(seq)
    assert seq.tokens == await expected(trio, temperature)
    assert trio.mover.moved == 1
    assert trio.mover.tokens == len(PROMPT) // BLOCK * BLOCK
    meter = seq.meter.of("m", 0)
    assert meter.prompt_tokens <= len(PROMPT) + BLOCK  # the last block is computed on both sides
    assert meter.cached_tokens == 0  # nobody had it
    trio.model.release(seq)


async def test_what_the_model_reads_after_moved_kv_is_what_it_reads_after_its_own(trio: Trio) -> None:
    want = ReadSpec(draw=None, logits=True)
    here, there = sequence(), sequence()
    [mine] = await trio.model.extend(here, (9,), want)
    [own] = await trio.alone.model.extend(there, (9,), want)
    assert mine.logits is not None
    assert own.logits is not None
    torch.testing.assert_close(mine.logits, own.logits, atol=1e-5, rtol=1e-5)
    trio.model.release(here)
    trio.alone.model.release(there)


async def test_kv_of_the_wrong_tokens_would_be_seen(trio: Trio) -> None:
    want = ReadSpec(draw=None, logits=True)
    trio.first.roll = trio.second.roll = 1
    here, there = sequence(), sequence()
    [mine] = await trio.model.extend(here, (9,), want)
    [own] = await trio.alone.model.extend(there, (9,), want)
    assert mine.logits is not None
    assert own.logits is not None
    assert not torch.allclose(mine.logits, own.logits, atol=1e-3)
    trio.model.release(here)
    trio.alone.model.release(there)


async def test_short_prompts_stay(trio: Trio) -> None:
    seq = sequence(PROMPT[:LEAST])
    await trio.model.decode(seq)
    assert seq.tokens == await expected(trio, prompt=PROMPT[:LEAST])
    assert trio.mover.moved == 0
    trio.model.release(seq)


async def test_only_what_the_decoding_model_lacks_is_looked_at_and_moved(trio: Trio) -> None:
    first = sequence(PROMPT[:48])
    await trio.decode.model.decode(first, StopCondition(max_tokens=1))
    trio.model.release(first)
    seq = sequence()
    await trio.model.decode(seq)
    assert trio.decode.imported == [(48, len(PROMPT) - 1 - 48)]
    assert seq.tokens == await expected(trio)
    trio.model.release(seq)
    again = sequence()
    await trio.model.decode(again)
    assert trio.mover.moved == 1  # all of it is there now
    assert again.meter.of("m", 0).cached_tokens > 0
    assert again.tokens == seq.tokens
    trio.model.release(again)


async def test_what_a_prefill_actor_had_cached_counts_as_cached(trio: Trio) -> None:
    warm = sequence(PROMPT[:65])
    await trio.first.model.prefill_ahead(warm)
    trio.first.model.release(warm)
    seq = sequence()
    await trio.model.decode(seq)
    assert (seq.meter.of("m", 0).cached_tokens, seq.meter.of("m", 0).fetched_tokens) == (64, 0)
    trio.model.release(seq)


async def test_what_a_prefill_actor_had_fetched_counts_as_fetched(trio: Trio) -> None:
    trio.first.fetched = 16
    seq = sequence()
    await trio.model.decode(seq)
    assert trio.mover.moved == 1
    assert seq.meter.of("m", 0).fetched_tokens == 16
    trio.model.release(seq)


async def test_operations_at_once_move_the_prompt_once(trio: Trio) -> None:
    seq = sequence()
    await asyncio.gather(trio.model.prefill_ahead(seq), trio.model.extend(seq), trio.model.prefill_ahead(seq))
    assert trio.mover.moved == 1
    twin = trio.model.fork(seq, 9)
    await trio.model.decode(twin)
    assert trio.mover.moved == 1
    trio.model.release(seq)
    trio.model.release(twin)


async def test_the_one_with_less_to_do_is_asked(trio: Trio) -> None:
    trio.first.gate.clear()
    other = [(5 * token + 1) % 256 for token in PROMPT]
    seqs = [sequence(), sequence(other)]
    running = [asyncio.ensure_future(trio.model.decode(seq)) for seq in seqs]
    await running[1]
    assert trio.computed(trio.second) == 0
    assert len(trio.decode.imported) == 1
    assert not running[0].done()
    trio.first.gate.set()
    await running[0]
    assert seqs[0].tokens == await expected(trio)
    assert seqs[1].tokens == await expected(trio, prompt=other)
    assert trio.mover.moved == 2
    for seq in seqs:
        trio.model.release(seq)


async def test_a_prefill_actor_that_ends_is_not_waited_for(trio: Trio) -> None:
    trio.first.gate.clear()
    seq = sequence()
    running = asyncio.ensure_future(trio.model.decode(seq))
    while not trio.mover._given[0]:
        await asyncio.sleep(0)
    trio.first.supervisor.connection.lost.set()
    await asyncio.wait_for(running, 30)
    assert seq.tokens == await expected(trio)
    assert (trio.mover.moved, trio.mover.failed) == (0, 1)
    assert trio.mover._given == [0, 0]
    trio.model.release(seq)


async def test_one_that_is_away_is_not_asked(trio: Trio) -> None:
    trio.first.supervisor.connection = None
    trio.first.gate.clear()
    seq = sequence()
    await trio.model.decode(seq)
    assert trio.mover.moved == 1
    trio.model.release(seq)
    trio.second.supervisor.connection = None
    other = sequence([(5 * token + 1) % 256 for token in PROMPT])
    await trio.model.decode(other)
    assert (trio.mover.moved, trio.mover.failed) == (1, 0)
    trio.model.release(other)


@pytest.mark.parametrize("fault", [Interrupted("its store is gone"), ValueError("not a KV tensor")], ids=str)
async def test_whatever_fails_the_prompt_is_computed(trio: Trio, fault: Exception) -> None:
    trio.first.fault = trio.second.fault = fault
    seq = sequence()
    await trio.model.decode(seq)
    assert seq.tokens == await expected(trio)
    assert (trio.mover.moved, trio.mover.failed) == (0, 1)
    trio.model.release(seq)


async def test_kv_that_does_not_come_is_not_waited_for(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the import is given up: the prefill before it has all the time it needs.
    monkeypatch.setattr(
        "actors.disaggregated_prefill._wait_limit_s", lambda member, *_: 0.5 if member is trio.decode else 60.0
    )
    seq, cancelled = sequence(), asyncio.Event()

    async def stuck() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 0

    trio.decode.stuck = stuck
    await trio.model.decode(seq)
    assert cancelled.is_set()
    assert seq.tokens == await expected(trio)
    assert (trio.mover.moved, trio.mover.failed) == (0, 1)
    trio.model.release(seq)


async def test_a_prefill_actor_that_lives_but_does_not_answer_is_not_waited_for(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.disaggregated_prefill.PATIENCE_S", 1.0)
    trio.first.gate.clear()
    seq = sequence()
    await asyncio.wait_for(trio.model.decode(seq), 30)
    assert seq.tokens == await expected(trio)
    assert (trio.mover.moved, trio.mover.failed) == (0, 1)
    assert trio.mover._given == [0, 0]
    trio.model.release(seq)


async def test_a_sequence_released_meanwhile_leaves_nothing(trio: Trio) -> None:
    trio.first.gate.clear()
    seq = sequence()
    running = asyncio.ensure_future(trio.model.decode(seq))
    while not trio.mover._given[0]:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    trio.model.release(seq)
    while trio.mover._given[0]:
        await asyncio.sleep(0)
    assert not trio.mover._under_way
    assert not trio.mover._cached


async def test_closing_ends_what_is_under_way(trio: Trio) -> None:
    trio.first.gate.clear()
    seq = sequence()
    running = asyncio.ensure_future(trio.mover.prepare(seq))
    while not trio.mover._given[0]:
        await asyncio.sleep(0)
    await trio.mover.close()
    await running
    assert trio.mover._given == [0, 0]
    trio.model.release(seq)
