"""KV that lost something is for those who said so, and stays among them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

import torch

from engine.reuse.settings import ReuseSettings
from pool.local_pool import LocalPool
from tests.engine import shared_engines
from tests.engine.harness import answer, call_of, pair_config
from tests.engine.shared_engines import Engine, difference, meter, prompt, sequence
from turnout.config import ReuseConfig

first, second = shared_engines.first, shared_engines.second


async def test_exact_sequences_never_find_it(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.lossy = True
    lossy = sequence(prompt(36), lossy=True)
    assert difference(await second.read(lossy), second.plain, lossy) > 1e-4
    assert lossy.meter.models["m"].fetched_tokens == 32
    second.store.shelf.clear()
    exact = sequence(prompt(36))
    await second.right(exact)
    assert meter(exact) == (36, 0, 0)


async def test_lossy_sequences_find_it_in_the_pool(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.lossy = True
    one = await second.read(sequence(prompt(36), lossy=True))
    asked = len(second.store.asked)
    again = sequence(prompt(36), lossy=True)
    assert torch.allclose(await second.read(again), one, atol=1e-4)
    assert meter(again) == (4, 32, 0)
    assert len(second.store.asked) == asked


async def test_exact_blocks_are_used_as_far_as_they_go(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    await second.right(sequence(prompt(13)))
    second.store.lossy = True
    lossy = sequence(prompt(36), lossy=True)
    await second.read(lossy, keep=True)
    assert second.model.batcher.tables[lossy].content.tainted_from == 12
    assert meter(lossy) == (4, 32, 20)
    second.model.release(lossy)
    second.store.shelf.clear()
    await second.right(sequence(prompt(36)))


async def test_nothing_of_it_is_offered(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.lossy = True
    seq = sequence(prompt(36), lossy=True, max_tokens=30)
    await second.model.decode(seq)
    await second.read(second.model.fork(seq))
    second.model.release(seq)
    assert second.store.wanted == []


async def test_a_lossy_call_that_lost_nothing_is_exact(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    seq = sequence(prompt(36), lossy=True)
    await second.read(seq, keep=True)
    assert second.model.batcher.tables[seq].content.tainted_from is None
    second.model.release(seq)
    await second.right(sequence(prompt(36)))


async def test_a_store_that_cheats_is_refused(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.cheats = True
    await second.right(sequence(prompt(36)))
    assert second.model.shared is not None
    assert second.model.shared.faults == 1


async def test_taint_outlives_preemption(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.lossy = True
    seq = sequence(prompt(36), lossy=True)
    before = await second.read(seq, keep=True)
    second.model.batcher.tables[seq].drop()
    assert torch.allclose(await second.read(seq, keep=True), before, atol=1e-4)
    second.model.batcher.tables[seq].drop()
    second.model.pool.clear_cached()
    await second.read(seq, keep=True)
    second.model.release(seq)
    exact = sequence(prompt(36))
    second.store.shelf.clear()
    await second.right(exact)
    assert meter(exact)[0] == 36
    assert second.store.wanted != []  # of the exact one


def test_the_configuration_of_reuse_is_that_of_its_settings() -> None:
    settings = asdict(ReuseSettings())
    assert ReuseConfig().model_dump() == {name: settings[name] for name in ReuseConfig.model_fields}
    assert set(settings) - set(ReuseConfig.model_fields) == {"select"}


async def test_a_pool_reuses_spans_for_lossy_calls_only(pair_folder: Path) -> None:
    config = pair_config(pair_folder, block_size=8, token_budget=48)
    pools = {"pair": config.pools["pair"].model_copy(update={"reuse": ReuseConfig(recompute=0.0, decode_tokens=0)})}
    pool = LocalPool.load("pair", config.model_copy(update={"pools": pools}))
    spans = pool.engines["large"].spans
    assert spans is not None
    shared = prompt(48)
    for cache in ("exact", "exact", "lossy"):
        tokens = [*prompt(9, start=3), *shared] if cache == "lossy" else [3, *shared]
        await answer(pool, replace(call_of(tokens, "plain", {"model": "large"}, max_tokens=2), cache=cache))
    assert (spans.lookups, spans.hits) == (1, 1)
    await pool.close()


async def test_a_fork_made_while_the_store_is_asked_finds_what_its_twin_does(first: Engine, second: Engine) -> None:
    await first.right(sequence(prompt(36)))
    second.store.lossy = True
    await second.read(sequence(prompt(36), lossy=True))
    asked = len(second.store.asked)
    second.store.shelf.clear()
    second.store.gate = asyncio.Event()
    seq = sequence([*prompt(32), *prompt(12, start=1)], lossy=True)
    tasks = [asyncio.create_task(second.read(seq, keep=True))]
    while len(second.store.asked) == asked:
        await asyncio.sleep(0)
    twin = second.model.fork(seq)
    tasks.append(asyncio.create_task(second.read(twin, keep=True)))
    while len(second.store.asked) == asked + 1:
        await asyncio.sleep(0)
    second.store.gate.set()
    await asyncio.gather(*tasks)
    for each in (seq, twin):
        table = second.model.batcher.tables[each]
        assert table.content.tainted_from == 0
        assert table.cached_on_arrival >= 32
        second.model.release(each)
