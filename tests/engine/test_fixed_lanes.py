"""Forwards of a fixed shape: the same bits whatever else runs, as plain logits as any, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest
import torch

from decoding.fixed_forward import FixedForward
from decoding.model import ReadSpec
from decoding.sequence import Sequence
from engine.backends.base import Kernels
from engine.model import EngineModel
from tests.engine.harness import engine_model
from training.random_models import llama_config, random_model
from turnout.errors import Code, TurnoutError
from turnout.types import SamplingParams

LANES = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38], [2, 71, 82, 81, 82, 84, 59, 4, 52, 35]]
LOGITS = ReadSpec(draw=None, logits=True)


def model(num_blocks: int | None = None, kernels: Kernels = "auto") -> EngineModel:
    made = random_model(llama_config(), seed=1, spread=0.2)
    return engine_model(made, num_blocks=num_blocks, kernels=kernels, block_size=4)


def owner() -> Sequence:
    return Sequence([0], SamplingParams(max_tokens=1), 0)


async def logits(made: EngineModel, start: int = 0, seq: Sequence | None = None) -> torch.Tensor:
    """[tokens, lanes, vocab] of all lanes, token by token."""
    owned = seq or owner()
    rows = []
    try:
        for place in range(start, len(LANES[0])):
            fed = tuple(lane[place] for lane in LANES)
            rows.append((await made.do(owned, FixedForward(fed, place, len(LANES[0])))).logits)
    finally:
        made.release(owned)
    return torch.stack(rows)


async def others(made: EngineModel, count: int) -> None:
    """Requests of all shapes, some of which have cached what the lanes hold."""
    prompts = [lane[: 3 + n % 7] for n in range(count) for lane in LANES]
    seqs = [Sequence(prompt, SamplingParams(max_tokens=20, seed=1), 1) for prompt in prompts]
    await asyncio.gather(*(made.decode(seq) for seq in seqs))
    for seq in seqs:
        made.release(seq)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_logits_are_equal_to_the_bit_alone_and_among_others(kernels: Kernels) -> None:
    made = model(kernels=kernels)
    alone = await logits(made)
    await others(made, 3)  # the lanes' tokens are in the prefix cache now
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        busy = asyncio.create_task(others(made, 6))
        among = await asyncio.gather(*(logits(made) for _ in range(3)))
        await busy
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    for found in among:
        assert torch.equal(found, alone)
    assert made.pool.num_held == 0
    made.pool.check_integrity()
    await made.close()


async def test_logits_are_those_of_any_other_forward_but_for_rounding() -> None:
    """Which moves them in their last bits: what the test above would see of a batch of another shape."""
    made = model(kernels="torch")
    found = await logits(made)
    moved = []
    for lane, tokens in enumerate(LANES):
        seq = Sequence(tokens[:1], SamplingParams(max_tokens=20), 0)
        rows = await made.extend(seq, tuple(tokens[1:]), LOGITS, every=True)
        plain = torch.stack([row.logits for row in rows if row.logits is not None])
        torch.testing.assert_close(found[:, lane], plain, atol=2e-4, rtol=1e-4)
        moved.append(not torch.equal(found[:, lane], plain))
        made.release(seq)
    assert any(moved)
    await made.close()


async def test_others_decode_while_several_owners_forward() -> None:
    made = model()
    decoding = Sequence([5, 6], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True), 0)

    async def fixed(low: bool, forwards: int) -> None:
        seq = Sequence([0], SamplingParams(max_tokens=1), 0, low_priority=low)
        for place in range(forwards):
            await made.do(seq, FixedForward((1, 2), place, 10))
        made.release(seq)

    running = asyncio.create_task(made.decode(decoding))
    await asyncio.gather(fixed(True, 4), *(fixed(False, 4) for _ in range(3)))
    assert decoding.generated
    await running
    assert len(decoding.generated) == 60
    made.release(decoding)
    await made.close()


async def test_lanes_that_begin_anew_forget_what_they_read() -> None:
    made, seq = model(), owner()
    fed = tuple(lane[0] for lane in LANES)
    first = await made.do(seq, FixedForward(fed, 0, 10))
    await made.do(seq, FixedForward((1, 1), 1, 10))
    again = await made.do(seq, FixedForward(fed, 0, 10))
    assert torch.equal(first.logits, again.logits)
    assert first.numerics == again.numerics
    assert "float32" in first.numerics
    made.release(seq)
    assert not made.lanes
    await made.close()


async def test_lanes_that_do_not_fit_are_refused_and_take_nothing() -> None:
    """Of 14 blocks half are for lanes: what is left is for requests, which cannot take blocks from lanes."""
    made = model(num_blocks=14)
    with pytest.raises(TurnoutError) as refused:
        await made.do(owner(), FixedForward((1, 1), 0, 16))  # eight blocks
    assert (refused.value.code, refused.value.field) == (Code.OUT_OF_RANGE, "window")
    held = owner()
    await made.do(held, FixedForward((1, 1), 0, 8))
    with pytest.raises(TurnoutError) as refused:
        await made.do(owner(), FixedForward((1, 1), 0, 8))
    assert refused.value.code is Code.RESOURCE_EXHAUSTED
    assert made.pool.num_held == 4
    await others(made, 1)
    with pytest.raises(ValueError, match="place"):
        await made.do(held, FixedForward((1, 1), 3, 8))
    made.release(held)
    assert made.pool.num_held == 0
    await made.close()


async def test_lanes_released_while_a_forward_uses_them_are_freed_when_it_has_ended() -> None:
    made, seq = model(), owner()
    await made.do(seq, FixedForward((1, 1), 0, 8))
    running = asyncio.create_task(made.do(seq, FixedForward((2, 2), 1, 8)))
    while not made.lanes[seq].busy:
        await asyncio.sleep(0)
    made.release(seq)
    assert made.pool.num_held == 4
    await running
    assert made.pool.num_held == 0
    made.pool.check_integrity()
    await made.close()
