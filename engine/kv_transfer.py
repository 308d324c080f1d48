"""Moving cached keys and values from one model's pool into another's, so that they need not be computed again.

They leave the blocks as one dense tensor, and enter free blocks of the other pool, published under the sequence's own
chain of hashes: the ordinary look-up finds them there. Both pools can be short, never wrong: what was not cached is
not moved, what finds no room is left out, and what did not come is computed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from decoding.sequence import Sequence
from engine.cache.blocks import BlockPool
from engine.cache.hashes import ContentHashes
from engine.cache.paged_kv import PagedKV
from engine.cache.table import promised
from engine.device import to_its_end

if TYPE_CHECKING:
    from engine.model import EngineModel


async def export_kv(model: EngineModel, seq: Sequence, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Keys and values of a sequence's tokens `start` to `stop - 1`, as far as they are cached and exact.

    They are read between two forwards, in one pass; operations of the sequence may be under way.

    Args:
        model: whose cache it is.
        seq: whose tokens.
        start: first token.
        stop: end of the tokens; absent: of the sequence.

    Returns:
        [layers, tokens, 2, kv_heads, head_dim] on the model's device, in its dtype; `tokens` is less than
        `stop - start`, down to 0, where fewer are cached.
    """
    device, pool, size = model.batcher.device, model.pool, model.pool.block_size
    async with device.quiet():  # no forward runs: what the table says is what its blocks hold
        blocks, held = _cached(model, seq)
        end = held if stop is None else min(held, stop)
        first = start // size
        blocks = blocks[first : -(-end // size)] if end > start else []
        for block in blocks:  # so that they are not given away, whatever becomes of the sequence meanwhile
            pool.retain(block)
        try:
            kv = await to_its_end(device.run(partial(model.store.gather_blocks, blocks, size)))
        finally:
            pool.release(blocks)
            device.notify()
    return kv[:, start - first * size : end - first * size] if blocks else kv


async def import_kv(model: EngineModel, seq: Sequence, start: int, kv: torch.Tensor, longest: int | None = None) -> int:
    """Put keys and values of a sequence's tokens into the pool, where its next operation finds them.

    Only full blocks are kept, and the sequence's last token is always left to compute. What follows a gap is left out.
    A sequence that has a cache already gains nothing until that is dropped.

    Args:
        model: the receiving one; the same weights, dtype and numerics class as the giving one's: nothing here can tell.
        seq: whose tokens; at least as many as `start` and the tokens of `kv` together.
        start: first token.
        kv: [layers, tokens, 2, kv_heads, head_dim], on any device.
        longest: the greatest length that the sequence could reach where `kv` was computed: nothing is kept where its
            keys would be others here (`engine.rope`). None: the same as here.

    Returns:
        Leading tokens of the sequence that the pool holds now.

    Raises:
        ValueError: a tensor of another model, or of more tokens than the sequence has.
    """
    device, pool, size = model.batcher.device, model.pool, model.pool.block_size
    _check(kv, model.store, seq, start)
    content = ContentHashes(seq, size, pool.rope_length(seq))
    if longest is not None and _other_keys(model, longest, content.rope_length):
        kv = kv[:, :0]
    before = _published(pool, content, seq)
    end = min(start + kv.shape[1], len(seq) - 1) // size
    if start > len(before) * size or end <= len(before):
        return len(before) * size
    for block in before:  # making room must not cost the prefix itself
        pool.retain(block)
    fresh: list[int] = []
    try:
        room = max(pool.num_available - promised(model.batcher.tables.values()), 0)
        fresh = pool.allocate(min(end - len(before), room), after=before[-1] if before else None)
        skipped = len(before) * size - start
        part = kv[:, skipped : skipped + len(fresh) * size]
        if fresh:
            await device.between(partial(model.store.write_blocks, fresh, size, part))
        hashes = content.first(len(before) + len(fresh))
        for index, block in enumerate(fresh, len(before)):
            pool.publish(block, hashes[index])
    finally:
        pool.release([*before, *fresh])
        device.notify()
    return (len(before) + len(fresh)) * size


def held_tokens(model: EngineModel, seq: Sequence) -> int:
    """Leading tokens of a sequence whose keys and values the pool holds exactly: in its table, or to be found there."""
    return _cached(model, seq)[1]


def token_bytes(model: EngineModel) -> int:
    """What `export_kv` gives for one token, in bytes."""
    store = model.store
    return store.slot_bytes(model.num_layers, store.kv_heads, store.head_dim, store.dtype)


def _cached(model: EngineModel, seq: Sequence) -> tuple[list[int], int]:
    """Blocks that hold the sequence's leading tokens exactly, and how many tokens these are."""
    content = ContentHashes(seq, model.pool.block_size, model.pool.rope_length(seq))
    found = _published(model.pool, content, seq)
    table = model.batcher.tables.get(seq)
    if table is None or table.content.rope_length != content.rope_length:
        return found, len(found) * model.pool.block_size
    pairs = zip(table.tokens, seq.tokens, strict=False)  # a draft may stand behind them
    held = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(table), len(seq)))
    if table.content.tainted_from is not None:
        held = min(held, table.content.tainted_from)
    if held < len(found) * model.pool.block_size:
        return found, len(found) * model.pool.block_size
    return list(table.blocks), held


def _published(pool: BlockPool, content: ContentHashes, seq: Sequence) -> list[int]:
    """Blocks found by content, the last token left out; takes no reference."""
    found: list[int] = []
    for content_hash in content.first((len(seq) - 1) // pool.block_size)[: (len(seq) - 1) // pool.block_size]:
        block = pool.find(content_hash)
        if block is None:
            break
        found.append(block)
    return found


def _other_keys(model: EngineModel, longest: int, rope_length: int) -> bool:
    """Whether keys of a sequence that could reach a length may be others than those of a rope length here."""
    beyond = rope_length > 0 and longest > model.max_length  # which was not the bound there
    return beyond or model.pool.rope_length_of(longest) != rope_length


def _check(kv: torch.Tensor, store: PagedKV, seq: Sequence, start: int) -> None:
    expected = (len(store.layers), kv.shape[1] if kv.dim() > 1 else 0, 2, store.kv_heads, store.head_dim)
    if tuple(kv.shape) != expected or kv.dtype != store.dtype:
        raise ValueError(f"moved KV is {kv.dtype} {list(kv.shape)}, not {store.dtype} {list(expected)}")
    if not 0 <= start <= start + kv.shape[1] <= len(seq):
        raise ValueError(f"tokens {start} to {start + kv.shape[1]} of a sequence of {len(seq)}")


def as_bytes(kv: torch.Tensor) -> tuple[Any, tuple[int, ...], str]:
    """Return a cache in a form that needs no torch: a numpy array of its bytes, its shape, the name of its type."""
    flat = kv.contiguous().view(torch.uint8).reshape(-1).numpy()
    return flat, tuple(kv.shape), str(kv.dtype).removeprefix("torch.")


def as_tensor(flat: Any, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """What `as_bytes` took apart. A copy: what Ray hands out may not be written to, and torch warns of such memory."""
    return torch.from_numpy(flat.copy()).view(getattr(torch, dtype)).reshape(shape)
