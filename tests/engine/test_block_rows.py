"""Blocks of any mask and any positions through the engine: each row is read as a dense forward says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from decoding.block import Block
from decoding.model import Readout, ReadSpec
from decoding.partial_forward import LayerSelection
from decoding.sequence import Sequence
from engine.model import EngineModel
from engine.scheduler.queued_operation import QueuedOperation
from tests.engine.harness import Reference, twins
from training.random_models import llama_config
from turnout.types import SamplingParams

TINY = llama_config(60, hidden_size=32, num_key_value_heads=2, num_hidden_layers=3, pad_token_id=0, eos_token_id=1)
LOGITS = ReadSpec(draw=None, logits=True)
PROMPT = [2, 3, 4, 5, 6, 7]
TOKENS = (11, 12, 13, 14, 15)
FULL = torch.ones(5, 5, dtype=torch.bool)
# Every row sees some rows before and after it, itself not always.
ODD = torch.tensor([[0, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [1, 0, 0, 1, 1], [0, 1, 1, 0, 1]]).bool()


@pytest.fixture(params=["native", "torch", "plain"])
def loaded(request: Any) -> tuple[EngineModel, Reference]:
    return twins(TINY, seed=4, kernels=request.param, block_size=4)


@torch.inference_mode()
def dense(plain: Reference, block: Block, cache: Any) -> torch.Tensor:
    """Logits [n, vocab] of a block's rows after what a Hugging Face cache holds, in one forward that is all mask."""
    before = cache.get_seq_length()
    seen = torch.cat([torch.ones(len(block), before, dtype=torch.bool), block.seen()], 1)
    added = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    positions = torch.tensor([block.positions]) + before
    logits: torch.Tensor = plain.model(
        torch.tensor([block.tokens]),
        attention_mask=added[None, None],
        position_ids=positions,
        past_key_values=cache,
    ).logits[0]
    return logits


@torch.inference_mode()
def prefilled(plain: Reference, tokens: list[int]) -> Any:
    cache = DynamicCache(config=plain.model.config)
    plain.model(torch.tensor([tokens]), past_key_values=cache)
    return cache


async def run(model: EngineModel, seq: Sequence, block: Block) -> list[Readout]:
    table = await model.ready(seq)
    return await model.batcher.submit(QueuedOperation(table, block, True, block.resume, LOGITS))


def check(rows: list[Readout], expected: torch.Tensor) -> None:
    assert len(rows) == len(expected)
    for row, logits in zip(rows, expected, strict=True):
        torch.testing.assert_close(row.logits, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mask", [FULL, ODD], ids=["full", "odd"])
@pytest.mark.parametrize("positions", [(0, 1, 2, 3, 4), (4, 0, 2, 2, 9)])
async def test_any_mask_and_any_positions(
    loaded: tuple[EngineModel, Reference], mask: torch.Tensor, positions: tuple[int, ...]
) -> None:
    model, plain = loaded
    seq = Sequence(PROMPT, SamplingParams(), seed=0)
    block = Block(TOKENS, positions, mask)
    check(await run(model, seq, block), dense(plain, block, prefilled(plain, PROMPT)))
    # Another time over the same slots, after fewer of the sequence's tokens.
    shorter = Block(TOKENS[::-1], positions, mask, base=4)
    check(await run(model, seq, shorter), dense(plain, shorter, prefilled(plain, PROMPT[:4])))
    [row] = await model.extend(seq, want=LOGITS)
    torch.testing.assert_close(row.logits, plain.logits(PROMPT)[-1], atol=1e-4, rtol=0)
    model.release(seq)
    assert model.pool.num_held == 0
    await model.close()


async def test_rows_that_resume_see_the_others_as_they_were(loaded: tuple[EngineModel, Reference]) -> None:
    """Rows before `resume` saw the last rows' first tokens, and are not run again when these are overwritten."""
    model, plain = loaded
    seq = Sequence(PROMPT, SamplingParams(), seed=0)
    first = Block(TOKENS, (4, 0, 2, 2, 9), FULL)
    await run(model, seq, first)
    again = Block((*TOKENS[:3], 21, 22), first.positions, FULL, resume=3)
    rows = await run(model, seq, again)
    cache = prefilled(plain, PROMPT)
    dense(plain, first, cache)
    cache.crop(-2)
    rest = Block((21, 22), (-1, 6), torch.ones(2, 2, dtype=torch.bool))  # after the three rows, by position
    check(rows, dense(plain, rest, cache))
    assert seq.meter.models["m"].draft_tokens == 5 + 2
    fresh = await run(model, seq, Block((9, *TOKENS[1:3], 21, 22), first.positions, FULL, resume=3))
    assert len(fresh) == 2
    assert seq.meter.models["m"].draft_tokens == 5 + 2 + 5, "other rows than those in the cache are run anew"
    model.release(seq)
    await model.close()


async def test_a_block_through_some_layers_is_not_one_through_all(loaded: tuple[EngineModel, Reference]) -> None:
    model, plain = loaded
    seq = Sequence(PROMPT, SamplingParams(), seed=0)
    await run(model, seq, Block(TOKENS, (0, 1, 2, 3, 4), FULL, LayerSelection(last=2)))
    block = Block((*TOKENS[:3], 21, 22), (0, 1, 2, 3, 4), FULL, resume=3)
    whole = Block(block.tokens, block.positions, FULL)
    check(await run(model, seq, block), dense(plain, whole, prefilled(plain, PROMPT))[3:])
    model.release(seq)
    await model.close()
