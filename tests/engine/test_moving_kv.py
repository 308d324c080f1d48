"""Keys and values out of one pool and into another: whatever was moved, the next token is that of a fresh forward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decoding.model import ReadSpec, StopCondition
from decoding.sequence import Sequence
from engine.kv_transfer import export_kv, held_tokens, import_kv, token_bytes
from engine.model import EngineModel
from tests.engine.harness import Reference, engine_model, random_prompts, shrink
from training.random_models import llama_config, random_model
from turnout.types import SamplingParams, Sharing, Token

SIZE = 4
READ = ReadSpec(logits=True)


@pytest.fixture(scope="module")
def plain() -> Reference:
    return Reference(random_model(llama_config(), 3, 0.2))


def make() -> EngineModel:
    return engine_model(random_model(llama_config(), 3, 0.2), block_size=SIZE, token_budget=16)


@pytest.fixture
def giver() -> Iterator[EngineModel]:
    model = make()
    yield model
    _check_idle(model)


@pytest.fixture
def taker() -> Iterator[EngineModel]:
    model = make()
    yield model
    _check_idle(model)


def _check_idle(model: EngineModel) -> None:
    model.pool.check_integrity()
    assert model.pool.num_held == 0
    assert not model.batcher.tables


def of(tokens: list[int], tenant: str = "a", lossy: bool = False) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    return Sequence(tokens, sampling, 1, sharing=Sharing.private(tenant), lossy=lossy)


def twin(seq: Sequence) -> Sequence:
    """The same tokens where the other pool is."""
    return of(seq.tokens)


async def assert_reads_right(model: EngineModel, seq: Sequence, plain: Reference) -> int:
    """Next-token logits equal a fresh full forward's; returns the tokens that were found, and releases."""
    [row] = await model.extend(seq, want=READ)
    found = model.batcher.tables[seq].cached_on_arrival
    assert row.logits is not None
    torch.testing.assert_close(row.logits.cpu(), plain.logits(seq.tokens)[-1], atol=1e-4, rtol=0)
    model.release(seq)
    return found


@pytest.mark.parametrize("length", [2, 4, 5, 8, 9, 23, 40])
async def test_a_moved_sequence_reads_as_a_fresh_forward(
    giver: EngineModel, taker: EngineModel, plain: Reference, length: int
) -> None:
    seq = of(random_prompts(1, 40, seed=length)[0][:1] * length)
    await giver.decode(seq, StopCondition(max_tokens=7))
    kv = await export_kv(giver, seq)
    assert kv.shape == (2, len(seq) - 1, 2, 2, 16)
    assert kv.nbytes == token_bytes(giver) * (len(seq) - 1)
    there = twin(seq)
    held = await import_kv(taker, there, 0, kv)
    assert held == (len(seq) - 1) // SIZE * SIZE == held_tokens(taker, there)
    assert await assert_reads_right(taker, there, plain) == held
    giver.release(seq)


async def test_parts_are_slices_of_the_whole_and_add_up(
    giver: EngineModel, taker: EngineModel, plain: Reference
) -> None:
    seq = of(random_prompts(1, 30, seed=8)[0] + [7] * 30)
    await giver.prefill_ahead(seq)
    whole = await export_kv(giver, seq)
    for start, stop in [(0, 5), (3, 4), (4, 8), (5, 23), (0, 0), (9, 9), (20, 10_000)]:
        assert torch.equal(await export_kv(giver, seq, start, stop), whole[:, start:stop])
    there = twin(seq)
    assert await import_kv(taker, there, 0, whole[:, :10]) == 8
    assert await import_kv(taker, there, 12, whole[:, 12:20]) == 8  # 8 to 11 are missing
    assert await import_kv(taker, there, 6, whole[:, 6:21]) == 20
    assert await import_kv(taker, there, 0, whole[:, :9]) == 20
    assert torch.equal(await export_kv(taker, there), whole[:, :20])
    assert await assert_reads_right(taker, there, plain) == 20
    giver.release(seq)


async def test_a_full_pool_takes_what_fits(giver: EngineModel, taker: EngineModel, plain: Reference) -> None:
    shrink(taker, 8)
    seq = of(random_prompts(1, 30, seed=9)[0] + [9] * 27)
    await giver.prefill_ahead(seq)
    kv = await export_kv(giver, seq)
    beside = of([1] * 13)
    await taker.extend(beside)
    table = taker.batcher.tables[beside]
    room = (8 - max(len(table.blocks), table.promised)) * SIZE
    assert 0 < room < kv.shape[1]
    there = twin(seq)
    assert await import_kv(taker, there, 0, kv) == room
    taker.pool.check_integrity()
    assert await import_kv(taker, there, 0, kv) == room  # its own blocks are not given away for more of it
    await assert_reads_right(taker, beside, plain)
    assert await import_kv(taker, there, 0, kv) == 8 * SIZE
    giver.release(seq)
    assert await assert_reads_right(taker, of(seq.tokens[: 7 * SIZE + 1]), plain) == 7 * SIZE


async def test_only_what_agrees_and_is_exact_is_given(giver: EngineModel, plain: Reference) -> None:
    seq = of([5] * 18)
    await giver.extend(seq, tokens=(1, 2, 3, 4, 5, 6))  # a draft behind it
    assert (await export_kv(giver, seq)).shape[1] == 18
    for token in (1, 2, 9):
        seq.append(Token(token, "m"))
    assert (await export_kv(giver, seq)).shape[1] == 20  # the draft foresaw two tokens
    giver.release(seq)
    lossy = of([7] * 18, lossy=True)
    giver._table(lossy).content.taint(8)  # as if the rest had come from a store that rounds
    await giver.extend(lossy)
    assert held_tokens(giver, lossy) == 8
    assert (await export_kv(giver, lossy)).shape[1] == 8
    giver.release(lossy)
    assert held_tokens(giver, of([7] * 18)) == 8
    later = of([*([5] * 18), 1])
    assert (await export_kv(giver, later)).shape[1] == 16  # found by content, full blocks only
    assert (await export_kv(giver, of([5] * 18, tenant="b"))).shape[1] == 0
    await assert_reads_right(giver, later, plain)


async def test_others_do_not_find_what_was_moved(giver: EngineModel, taker: EngineModel) -> None:
    seq = of([5] * 18)
    await giver.prefill_ahead(seq)
    await import_kv(taker, twin(seq), 0, await export_kv(giver, seq))
    assert held_tokens(taker, twin(seq)) == 16
    assert held_tokens(taker, of([5] * 18, tenant="b")) == 0
    assert held_tokens(taker, of([5] * 10 + [6] * 8)) == 8
    giver.release(seq)


async def test_moving_beside_running_requests(giver: EngineModel, taker: EngineModel, plain: Reference) -> None:
    """Sequences are exported again and again while they and others decode, and imported where others decode."""
    prompts = [prompt + [3] * 6 for prompt in random_prompts(4, 20, seed=2)]
    here, there = ([of(prompt) for prompt in prompts] for _ in range(2))
    running = [asyncio.ensure_future(giver.decode(seq, StopCondition(max_tokens=60))) for seq in here]
    beside = [asyncio.ensure_future(taker.decode(seq, StopCondition(max_tokens=60))) for seq in there]
    moved = 0
    while not all(task.done() for task in running):
        for seq in here:
            known = twin(seq)
            kv = await export_kv(giver, seq, 0, len(known))
            moved += await import_kv(taker, known, 0, kv)
            await assert_reads_right(taker, known, plain)
    assert moved
    await asyncio.gather(*running, *beside)
    for mine, theirs in zip(here, there, strict=True):
        assert mine.tokens == theirs.tokens
        giver.release(mine)
        taker.release(theirs)


async def test_a_release_meanwhile_takes_nothing_away(giver: EngineModel, taker: EngineModel, plain: Reference) -> None:
    seq = of([6] * 33)
    await giver.prefill_ahead(seq)
    await giver.batcher.device.turn.acquire()
    exporting = asyncio.ensure_future(export_kv(giver, seq))
    await asyncio.sleep(0)
    giver.batcher.device.turn.release()
    await asyncio.sleep(0)
    giver.release(seq)
    giver.pool.clear_cached()
    kv = await exporting
    there = twin(seq)
    await import_kv(taker, there, 0, kv)
    await assert_reads_right(taker, there, plain)


async def test_giving_up_leaves_no_block_behind(giver: EngineModel, taker: EngineModel, plain: Reference) -> None:
    seq = of([6] * 33)
    await giver.prefill_ahead(seq)
    kv = await export_kv(giver, seq)
    for waits in range(4):
        for moving in (export_kv(giver, seq), import_kv(taker, twin(seq), 0, kv)):
            task = asyncio.ensure_future(moving)
            for _ in range(waits):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        taker.pool.check_integrity()
        assert taker.pool.num_held == 0
        await assert_reads_right(taker, twin(seq), plain)
        taker.pool.clear_cached()
    giver.release(seq)


async def test_wrong_values_would_be_found(giver: EngineModel, taker: EngineModel, plain: Reference) -> None:
    """The planted faults: values of another place, and of another sequence."""
    seq = of(random_prompts(1, 30, seed=8)[0] + [7] * 20)
    await giver.prefill_ahead(seq)
    kv = await export_kv(giver, seq)
    for wrong in (kv.roll(1, dims=1), kv.flip(2), kv.flip(0), kv + 0.01 * torch.randn_like(kv)):
        await import_kv(taker, twin(seq), 0, wrong)
        with pytest.raises(AssertionError):
            await assert_reads_right(taker, twin(seq), plain)
        for left in list(taker.batcher.tables):
            taker.release(left)
        taker.pool.clear_cached()
    giver.release(seq)


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (lambda kv: kv.to(torch.bfloat16), 0),
        (lambda kv: kv[:1], 0),
        (lambda kv: kv[..., :8], 0),
        (lambda kv: kv[:, :, :, :1], 0),
        (lambda kv: kv[0], 0),
        (lambda kv: kv, 1),
        (lambda kv: kv, -1),
    ],
)
async def test_what_does_not_fit_the_model_is_refused(
    giver: EngineModel, taker: EngineModel, change: Any, start: int
) -> None:
    seq = of([6] * 9)
    await giver.extend(seq)
    kv = await export_kv(giver, seq)
    assert kv.shape[1] == 9
    with pytest.raises(ValueError, match=r"moved KV is|of a sequence of 9"):
        await import_kv(taker, twin(seq), start, change(kv))
    giver.release(seq)
