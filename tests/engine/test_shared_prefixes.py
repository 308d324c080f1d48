"""The bridge between pool and store: what others computed is used, nothing it does can be seen in an answer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.sequence import Sequence
from engine.cache.paged_kv import PagedKV
from engine.costs.prefill_estimate import prefill_forecast
from engine.model import EngineModel
from pool.local_pool import LocalPool
from tests.engine import shared_engines
from tests.engine.harness import answer, call_of, pair_config, twins, until
from tests.engine.mixed import SAMPLING, assert_same_reply
from tests.engine.shared_engines import SIZE, TINY, Engine, difference, meter, prompt, sequence
from tests.engine.step_times import LinearTime
from tests.kvstore.fake_prefixes import FakePrefixes
from turnout.errors import Code, TurnoutError
from turnout.types import Namespace, Sharing

first, second = shared_engines.first, shared_engines.second


@pytest.mark.parametrize(
    ("length", "fetched"),
    [(37, 32), (33, 32), (32, 28), (9, 8)],  # one token is always computed, and only whole blocks are taken
)
async def test_a_second_engine_computes_what_the_store_lacks(
    first: Engine, second: Engine, length: int, fetched: int
) -> None:
    seqs = [sequence(prompt(length)) for _ in range(3)]
    await first.right(seqs[0])
    await second.right(seqs[1])
    await second.right(seqs[2])
    assert [meter(seq) for seq in seqs] == [
        (length, 0, 0), (length - fetched, fetched, fetched), (length - (length - 1) // SIZE * SIZE, *pool_hit(length))
    ]  # fmt: skip
    assert second.model.shared is not None
    assert second.model.shared.tokens["memory"] == fetched
    assert second.model.shared.tokens["device"] == pool_hit(length)[0]


def pool_hit(length: int) -> tuple[int, int]:
    """(cached, fetched) where the pool itself has the whole prompt."""
    return (length - 1) // SIZE * SIZE, 0


async def test_what_cannot_hold_a_chunk_more_is_not_asked_for(first: Engine) -> None:
    await first.right(sequence(prompt(8)))  # a chunk, but one of its blocks must be computed: the other is asked for
    asked = len(first.store.asked)
    await first.right(sequence(prompt(7)))
    await first.right(sequence(prompt(8)))  # in the pool
    assert (asked, len(first.store.asked)) == (1, 1)


async def test_only_the_common_chunks_are_taken(first: Engine, second: Engine) -> None:
    shared = prompt(20)
    await first.right(sequence([*shared, *prompt(20, start=1)]))
    fork = sequence([*shared, *prompt(20, start=2)])
    await second.right(fork)
    assert meter(fork) == (24, 16, 16)


async def test_chunks_behind_a_gap_are_not_used(first: Engine, second: Engine) -> None:
    seq = sequence(prompt(36))
    await first.right(seq)
    links = first.store.chain(seq.sharing).links(seq.tokens, 4)
    del first.store.shelf[links[1].digest]
    again = sequence(prompt(36))
    await second.right(again)
    assert meter(again) == (28, 8, 8)


async def test_other_tenants_get_nothing(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36), "a"))
    stranger, owner = sequence(prompt(36), "b"), sequence(prompt(36), "a")
    await second.right(stranger)
    await second.right(owner)
    assert (meter(stranger), meter(owner)) == ((36, 0, 0), (4, 32, 32))


async def test_a_public_span_is_everybodys_and_the_rest_is_not(first: Engine, second: Engine) -> None:
    public = Namespace("public", "system prompt")

    def request(tenant: str) -> Sequence:
        seq = sequence(prompt(41), tenant)
        seq.sharing = Sharing(Namespace("private", tenant), ((18, public),))
        return seq

    mine, theirs, mine_again = request("a"), request("b"), request("a")
    await first.right(mine)
    await second.right(theirs)
    assert meter(theirs) == (25, 16, 16)
    await second.right(mine_again)
    assert mine_again.meter.models["m"].cached_tokens == 40


@pytest.mark.parametrize("fault", ["error", "shape", "dtype"])
async def test_a_store_that_fails_is_a_miss(first: Engine, second: Engine, fault: str) -> None:
    await first.right(sequence(prompt(36)))
    if fault == "error":
        second.store.error = RuntimeError("planted")
    for digest, kv in second.store.shelf.items():
        second.store.shelf[digest] = kv[:, :-1] if fault == "shape" else kv.double() if fault == "dtype" else kv
    seq = sequence(prompt(36))
    await second.right(seq)
    assert meter(seq) == (36, 0, 0)
    assert second.model.shared is not None
    assert second.model.shared.faults == 1


async def test_others_go_on_while_one_waits_for_the_store(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.gate = asyncio.Event()
    slow, quick = sequence(prompt(36)), sequence(prompt(6, start=3))
    waiting = asyncio.create_task(second.right(slow))
    await second.right(quick)
    assert not waiting.done()
    second.store.gate.set()
    await waiting
    assert meter(slow) == (4, 32, 32)


async def test_operations_on_one_sequence_share_the_fetch(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.gate = asyncio.Event()
    seq = sequence(prompt(36))
    tasks = [asyncio.create_task(second.read(seq, keep=True)) for _ in range(2)]
    while not second.store.asked:
        await asyncio.sleep(0)
    tasks[0].cancel()  # who leaves does not take it with them
    second.store.gate.set()
    assert difference(await tasks[1], second.plain, seq) < 1e-4
    assert len(second.store.asked) == 1
    assert meter(seq) == (4, 32, 32)
    second.model.release(seq)


async def test_a_sequence_released_while_it_is_fetched_leaves_nothing(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.gate = asyncio.Event()
    seq = sequence(prompt(36))
    reading = asyncio.create_task(second.read(seq, keep=True))
    while not second.store.asked:
        await asyncio.sleep(0)
    second.model.release(seq)
    with pytest.raises(TurnoutError) as caught:
        await reading
    assert caught.value.code is Code.CANCELLED
    assert second.model.pool.num_held == 0


async def test_a_sequence_released_before_its_fetch_began_leaves_nothing(first: Engine) -> None:
    shared = first.model.shared
    assert shared is not None
    seq = sequence(prompt(36))
    reading = asyncio.create_task(first.read(seq, keep=True))
    while not shared._fetching:
        await asyncio.sleep(0)
    first.model.release(seq)
    with pytest.raises(TurnoutError, match="released"):
        await reading
    assert first.store.asked == []
    assert not shared._fetching
    assert not shared._chains


async def test_a_sequence_released_in_a_forward_that_completes_chunks_leaves_nothing(
    first: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, runner = first.model.shared, first.model.batcher.runner
    assert shared is not None
    begun, continues = threading.Event(), threading.Event()
    original = runner.run

    def slowly(feeds: Any) -> Any:
        begun.set()
        assert continues.wait(10)
        return original(feeds)

    monkeypatch.setattr(runner, "run", slowly)
    seq = sequence(prompt(36))
    reading = asyncio.create_task(first.read(seq, keep=True))
    while not begun.is_set():
        await asyncio.sleep(0)
    table = first.model.batcher.tables[seq]
    first.model.release(seq)
    continues.set()
    while table.in_flight:
        await asyncio.sleep(0)
    with pytest.raises(TurnoutError, match="released"):
        await reading
    assert not shared._chains
    assert not shared._fetching
    assert first.store.wanted == []


async def test_blocks_that_are_written_to_are_nobody_elses(
    first: Engine, second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released in the middle of the copy: the blocks are given back when the copy has ended, not before."""
    await first.right(sequence(prompt(36)))
    begun, continues = threading.Event(), threading.Event()
    original = PagedKV.write_blocks

    def slowly(self: PagedKV, *args: Any) -> None:
        begun.set()
        assert continues.wait(10)
        original(self, *args)

    monkeypatch.setattr(PagedKV, "write_blocks", slowly)
    seq = sequence(prompt(36))
    reading = asyncio.create_task(second.read(seq, keep=True))
    while not begun.is_set():
        await asyncio.sleep(0)
    second.model.release(seq)
    for _ in range(20):
        await asyncio.sleep(0)
    assert second.model.pool.num_held == 8
    continues.set()
    with pytest.raises(TurnoutError, match="released"):
        await reading
    assert second.model.pool.num_held == 0


async def test_fetching_takes_nothing_that_was_promised() -> None:
    """A pool of 16 blocks: one sequence holds 8 of them, and 2 more are promised to it."""
    author = Engine()
    await author.right(sequence(prompt(36)))
    engine = Engine(author.store.shelf, num_blocks=16)
    running, seeking = sequence(prompt(30, start=5)), sequence(prompt(36))
    await engine.read(running, keep=True)
    table = engine.model._table(seeking)
    assert engine.model.shared is not None
    await engine.model.shared.seek(table)
    assert (engine.model.pool.num_cached, engine.model.pool.num_available) == (6, 8)
    assert len(table.match_prefix()) == 6
    assert len(engine.model.batcher.tables[running].blocks) == 8
    engine.model.release(seeking)
    engine.model.release(running)
    await engine.close()
    await author.close()


async def test_a_prefix_longer_than_the_pool_is_refused_as_without_a_store() -> None:
    author = Engine()
    await author.right(sequence(prompt(36)))
    engine = Engine(author.store.shelf, num_blocks=8)
    with pytest.raises(TurnoutError) as caught:
        await engine.read(seq := sequence(prompt(36)))
    assert caught.value.code is Code.OUT_OF_RANGE
    engine.model.release(seq)
    await engine.right(sequence(prompt(30)))
    await engine.close()
    await author.close()


def test_a_store_whose_chunks_are_no_blocks_is_refused() -> None:
    model: EngineModel = twins(TINY, seed=4, block_size=16)[0]
    with pytest.raises(ValueError, match="8 tokens are not made of blocks of 16"):
        model.share(FakePrefixes(8))  # type: ignore[arg-type]


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"model": "large"}),
    ("speculative", {"verifier": "match", "length": "fixed", "draft_length": 3}),
    ("speculative", {"verifier": "rejection", "length": "fixed", "draft_length": 3}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}),
    ("entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0, "catch_up": "shadow"}),
]


def calls() -> list[Any]:
    """Forks of two prefixes, by two tenants, with every method."""
    found = []
    for i in range(20):
        tokens = [*prompt(48, start=i % 2), *prompt(1 + 3 * i % 17, start=i)]
        method, params = METHODS[i % len(METHODS)]
        options = {"max_tokens": 10, "seed": 100 + i, **SAMPLING[i % len(SAMPLING)]}
        found.append(call_of(tokens, method, params, tenant="ab"[i % 3 == 0], **options))
    return found


def loaded(folder: Path, shelves: dict[str, dict[bytes, torch.Tensor]] | None) -> LocalPool:
    pool = LocalPool.load("pair", pair_config(folder, block_size=8, token_budget=48))
    if shelves is not None:
        for name, model in pool.engines.items():
            model.share(FakePrefixes(16, shelves.setdefault(name, {}), name))  # type: ignore[arg-type]
    return pool


async def test_answers_are_the_same_without_a_store_cold_warm_and_in_another_engine(pair_folder: Path) -> None:
    shelves: dict[str, dict[bytes, torch.Tensor]] = {}
    without = loaded(pair_folder, None)
    engine, other = loaded(pair_folder, shelves), loaded(pair_folder, shelves)
    runs = []
    for pool in (without, engine, engine, other):
        runs.append([await answer(pool, call) for call in calls()])
        together = await asyncio.gather(*(answer(pool, call) for call in calls()))
        for call, alone, beside in zip(calls(), runs[0], together, strict=True):
            assert_same_reply(pair_folder, call, alone, beside)
    for run in runs[1:]:
        for call, expected, got in zip(calls(), runs[0], run, strict=True):
            assert_same_reply(pair_folder, call, expected, got)
    found = other.stats().cache
    assert found is not None
    assert found.tokens["memory"] >= 2 * 2 * 48  # both prefixes, by both models
    for pool in (without, engine, other):
        for model in pool.engines.values():
            while model.shared is not None and model.shared.kept:
                await asyncio.sleep(0)
            model.pool.check_integrity()
            assert model.pool.num_held == 0
        await pool.close()


async def test_a_call_that_is_cancelled_anywhere_leaves_nothing(pair_folder: Path) -> None:
    pool = loaded(pair_folder, {})
    call = call_of(prompt(70), "entropy_adaptive", {"window": 2, "min_stay": 3, "threshold": 2.0}, max_tokens=12)
    await answer(pool, call)  # the store has the prefix from now on
    stores: list[Any] = [model.shared.store for model in pool.engines.values() if model.shared is not None]
    for turns in range(0, 90, 3):
        for model in pool.engines.values():
            model.pool.clear_cached()
        for store in stores:
            store.takes = turns % 2 == 0  # half of the time, what is offered stays until later
        task = asyncio.create_task(answer(pool, call))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for store in stores:
            store.take_waiting()
        for model in pool.engines.values():
            while model.shared is not None and model.shared.kept:
                await asyncio.sleep(0)
            model.pool.check_integrity()
            assert not model.batcher.tables
        while any(model.pool.num_held for model in pool.engines.values()):
            await asyncio.sleep(0)  # a forward or a copy in progress ends first
    assert pool.stats().sequences == pool.stats().requests == 0
    await pool.close()


async def test_a_forecast_is_longer_beside_others() -> None:
    engine = Engine()
    times = LinearTime(base=1e-3, per_token=1e-4, per_position=1e-6, per_sequence=1e-4)
    engine.model.step_time = engine.model.batcher.times = times  # type: ignore[assignment]

    def forecast(start: int, stop: int) -> float:
        return prefill_forecast(engine.model.batcher, times)(start, stop)

    alone = forecast(0, 64)
    assert 0 < forecast(0, 32) < alone
    assert forecast(32, 64) > forecast(0, 32)
    seq = sequence(prompt(6), max_tokens=400)
    running = asyncio.create_task(engine.model.decode(seq))
    while not seq.generated:
        await asyncio.sleep(0)
    assert forecast(0, 64) > 1.5 * alone
    running.cancel()
    engine.model.release(seq)
    await until(lambda: not engine.model.pool.num_held)  # a forward in progress ends first
    await engine.close()
