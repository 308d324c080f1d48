"""The same tokens through Hugging Face's forward and through ours, and how far the logits are apart."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from decoding.model import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from engine.attention.step import NAME, paged_attention
from engine.cache.blocks import BlockPool
from engine.cache.table import BlockTable
from engine.loaded_model import LoadedModel
from engine.runner import Feed, Runner
from turnout.types import SamplingParams

AttentionInterface.register(NAME, paged_attention)

CHECK_TOKENS = 24
CHECK_BLOCK = 8
CHECK_CHUNKS = (9, CHECK_TOKENS - 10, 1)
# Of a model with experts: rows fed together, and enough rows fed alone that their median says something.
EXPERT_CHUNKS = (9, 6, *(1,) * 9)
# What rounding explains of `difference`. In bfloat16 the plain forward is itself 0.043 off in float32's terms after 28
# layers of random weights 3,072 wide (0.009 after 4 of 512); ours over CUDA kernels was 0.047 from it.
# float16 rounds to an eighth of bfloat16; SmolLM2-135M (30 layers) is 0.010 and 0.081 off in the two.
CHECK_TOLERANCE = {torch.float32: 1.25e-4, torch.bfloat16: 0.12, torch.float16: 0.02}
# Of a model whose linear weights are integers, in any dtype: its inputs to them are rounded to 8 bits.
INTEGER_TOLERANCE = 0.5
# Of keys and values rounded to 8 bits, next to the same forward over those that are not.
ROUNDED_KV_TOLERANCE = 0.25
# The largest of a million rounding errors is some five times their root mean square; one of more is another fault's.
LONE = 8


@torch.inference_mode()
def plain_logits(model: Any, count: int = CHECK_TOKENS) -> torch.Tensor:
    """float32 [count, vocab]: what the model itself computes for some tokens, by which ours is checked."""
    if getattr(model.config, "attn_logit_softcapping", None):
        model.config._attn_implementation = "eager"  # transformers 5.17's sdpa leaves the soft cap out
    ids = _check_ids(model.config.vocab_size, count).to(model.device)
    logits: torch.Tensor = model(ids[None], use_cache=False).logits[0].float()
    return logits


def _check_ids(vocab_size: int, count: int) -> torch.Tensor:
    return torch.arange(1, count + 1) * 7919 % vocab_size


def _check_feed(table: BlockTable, start: int, end: int) -> Feed:
    reads = [(i, RowContext(table.seq), ReadSpec(draw=None, logits=True)) for i in range(end - start)]
    return Feed(table, table.seq.tokens[start:end], reads=reads)


@torch.inference_mode()
def our_logits(plan: LoadedModel, chunks: tuple[int, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    """float32 [tokens, vocab] on a device: what our path computes for the tokens of `plain_logits`, fed in chunks."""
    count = sum(chunks)
    seq = Sequence(_check_ids(vocab_size, count).tolist(), SamplingParams(max_tokens=1), seed=0)
    num_blocks = -(-count // CHECK_BLOCK)
    store = plan.cache(num_blocks * CHECK_BLOCK, device)
    table = BlockTable(seq, BlockPool(num_blocks, CHECK_BLOCK, plan.rope_length), store)
    table.reserve(count)
    runner = Runner(plan, store, CHECK_BLOCK, device)
    rows, start = [], 0
    for chunk in chunks:
        rows += runner.run([_check_feed(table, start, start + chunk)])[0]
        table.filled(seq.tokens[start : start + chunk])
        start += chunk
    return torch.stack([row.logits for row in rows if row.logits is not None])


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two forwards are apart: the root mean square over a row's logits, in the row where it is largest.

    The largest single difference would not do, since of rounding alone it grows with the vocabulary; it counts where
    it is more than `LONE` times as large, as that of one wrong row of the head is.

    Args:
        got: float32 [rows, vocab].
        expected: float32 [rows, vocab].

    Returns:
        In standard deviations of `expected`; NaN where a number is none.
    """
    return _apart(got, expected).max().item()


def typical_difference(got: torch.Tensor, expected: torch.Tensor, chunks: tuple[int, ...]) -> float:
    """The same in the median row of those fed together, or of those fed alone, whichever is larger.

    Where rounding decides between two experts, a row is another one: in bfloat16, plain forwards of random experts were
    up to 0.7 from those in float32 in 4 rows of 24. A fault of one way to attend is in most rows of that way.

    Args:
        got: float32 [rows, vocab].
        expected: float32 [rows, vocab].
        chunks: as they were fed, rows of more than one first.
    """
    rows, together = _apart(got, expected), sum(chunks) - chunks.count(1)
    return torch.stack([rows[:together].median(), rows[together:].median()]).max().item()


def _apart(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each row, as `difference` has it: float32 [rows]."""
    off = got - expected
    rows = torch.maximum(off.square().mean(dim=-1).sqrt(), off.abs().amax(dim=-1) / LONE)
    return rows / expected.std().clamp_min(1e-6)
