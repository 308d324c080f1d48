"""Lanes of forwards of one fixed shape, apart from the batches: see `decoding.fixed_forward.FixedForward`."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from decoding.fixed_forward import FixedForward, FixedRows
from decoding.model import ReadSpec
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from engine.cache.blocks import OutOfBlocksError
from engine.cache.table import BlockTable
from engine.device import Device, to_its_end
from engine.runner import Feed, Runner
from turnout.errors import busy, invalid, out_of_range
from turnout.types import SamplingParams

if TYPE_CHECKING:
    from engine.model import EngineModel

WANT = ReadSpec(draw=None, logits=True)
MOST_SHARE = 0.5  # of a cache, for all lanes: nothing can take their blocks from them for other requests
STEPS_BEFORE = 8  # of interactive requests, before a forward of low priority


class FixedLanes:
    """The caches of a sequence's lanes. Their blocks come from the model's pool, and are taken all at once.

    Args:
        model: whose lanes.
        count: how many.
        longest: tokens that each may have.

    Raises:
        TurnoutError: RESOURCE_EXHAUSTED: the pool has not enough blocks free, or other lanes hold too many of them;
            OUT_OF_RANGE: it never has.
    """

    def __init__(self, model: EngineModel, count: int, longest: int) -> None:
        pool = model.pool
        needed = count * -(-longest // pool.block_size)
        room = int(pool.num_blocks * MOST_SHARE)
        if longest > model.max_length or needed > room:
            most = min(model.max_length, room // count * pool.block_size)
            raise out_of_range("window", f"{count} lanes of {longest} tokens; {model.name} has room for {most} each")
        # As many tokens as a lane may have: some models compute by how long a sequence may become (`engine.rope`).
        sampling = SamplingParams(temperature=0.0, max_tokens=max(longest - 1, 1))
        self.longest = longest
        self.tables = [BlockTable(Sequence([0], sampling, 0), pool, model.store) for _ in range(count)]
        self.busy = self.released = False
        held = sum(len(table.blocks) for lanes in model.lanes.values() for table in lanes.tables)
        try:
            if held + needed > room:
                raise OutOfBlocksError
            for table in self.tables:
                table.reserve(longest)
        except OutOfBlocksError:
            self._drop()
            raise busy(f"the cache of {model.name} has no room for {count} lanes of {longest} tokens") from None

    def run(self, runner: Runner, op: FixedForward) -> torch.Tensor:
        """Feed a token to each lane, on the device's thread: float32 [lanes, vocab] on the CPU."""
        feeds = []
        for table, token in zip(self.tables, op.tokens, strict=True):
            del table.tokens[op.place :]
            feeds.append(Feed(table, [token], reads=[(0, RowContext(table.seq), WANT)]))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # attention adds up in as many pieces as there are threads
        try:
            rows = runner.run(feeds)
        finally:
            torch.set_num_threads(threads)
        for table, token in zip(self.tables, op.tokens, strict=True):
            table.tokens.append(token)
        logits = [row.logits for lane in rows for row in lane if row.logits is not None]
        return torch.stack(logits).float().cpu()

    def release(self) -> None:
        """Give the blocks back, at the latest when the forward that uses them has ended."""
        self.released = True
        if not self.busy:
            self._drop()

    def _drop(self) -> None:
        for table in self.tables:
            table.drop()


async def fixed_forward(model: EngineModel, seq: Sequence, op: FixedForward) -> FixedRows:
    """Carry out a `FixedForward` between two steps of the model's device."""
    plan = model.batcher.runner.plan
    if plan.ranks > 1:
        raise invalid("model", f"{model.name!r} is split over {plan.ranks} processes, which is not exact to the bit")
    lanes = model.lanes.get(seq)
    if lanes is None:
        lanes = model.lanes[seq] = FixedLanes(model, len(op.tokens), op.longest)
    cached = len(lanes.tables[0])
    if len(op.tokens) != len(lanes.tables) or op.longest != lanes.longest or not 0 <= op.place <= cached:
        raise ValueError(f"place {op.place} of {len(op.tokens)} lanes: {len(lanes.tables)} lanes have {cached} tokens")
    device = model.batcher.device
    async with device.fixed_turn:
        if seq.low_priority:
            await let_steps_pass(device)
        async with device.quiet():
            started, lanes.busy = time.perf_counter(), True
            try:
                logits = await to_its_end(device.run(partial(lanes.run, model.batcher.runner, op)))
            finally:
                lanes.busy = False
                if lanes.released:
                    lanes.release()
                    device.notify()
    device.charge(seq.low_priority, time.perf_counter() - started)
    counts = seq.meter.of(model.name, model.num_parameters)
    counts.forwards += 1
    counts.decode_tokens += len(op.tokens)
    return FixedRows(logits, f"{model.numerics} {model.dtype} {model.weights} torch {torch.__version__}")


async def let_steps_pass(device: Device) -> None:
    """Wait while interactive requests have operations, for a few steps of theirs at most."""
    for _ in range(STEPS_BEFORE):
        if not any(member.has(low_priority=False) for member in device.members):
            return
        async with device.quiet():  # the next step waits for the turn already: it runs before this one is back
            pass
