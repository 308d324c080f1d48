"""What a model in this process does for each operation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from decoding.block import Block
from decoding.decode_loop import DecodeLoop
from decoding.drafters.vocab_trim import TrimmedModel
from decoding.fixed_forward import FixedForward
from decoding.model import Readout, ReadSpec, StopCondition
from decoding.operations import (
    Choose,
    Decode,
    Expand,
    Extend,
    Handlers,
    PartialForward,
    PrefillAhead,
    Propose,
    Proposed,
    Read,
    Verify,
)
from decoding.partial_forward import Exit
from decoding.read_spec import Decoded
from decoding.row_context import RowContext
from decoding.sequence import Sequence
from decoding.soft_likelihood import SoftLikelihood
from decoding.verifiers.base import VerifyResult, want_of
from engine.fixed_lanes import fixed_forward
from engine.scheduler.queued_operation import QueuedOperation
from engine.soft_likelihood import soft_likelihood
from turnout.types import Segment

if TYPE_CHECKING:
    from engine.model import EngineModel

HANDLERS: Handlers[EngineModel] = Handlers()
HANDLERS.of(FixedForward)(fixed_forward)
HANDLERS.of(SoftLikelihood)(soft_likelihood)


@HANDLERS.of(Extend)
async def _extend(model: EngineModel, seq: Sequence, op: Extend) -> list[Readout]:
    first = -1 if op.every else len(op.tokens) - 1
    block = Block.chain(op.tokens)
    return await model.batcher.submit(QueuedOperation(await model.ready(seq), block, first_row=first, want=op.want))


@HANDLERS.of(Decode)
async def _decode(model: EngineModel, seq: Sequence, op: Decode) -> Decoded:
    until = op.until.twins()
    loop = DecodeLoop(seq, until, model.name, model.num_parameters)
    if not loop.stopped_by:
        work = QueuedOperation(await model.ready(seq), want=loop.want, loop=loop)
        await model.batcher.submit(work)
    return Decoded(loop.segment, until.rules)


async def stream(model: EngineModel, seq: Sequence) -> AsyncIterator[Segment]:
    """Decode to the end of a sequence in one operation, which does not wait for who takes its tokens as they come."""
    loop, due = DecodeLoop(seq, StopCondition(), model.name, model.num_parameters), asyncio.Event()
    if loop.stopped_by:
        return
    work = QueuedOperation(await model.ready(seq), want=loop.want, loop=loop)
    loop.stream(due.set)

    def notice(future: asyncio.Future[list[Readout]]) -> None:
        due.set()
        if not future.cancelled():
            future.exception()  # looked at: who has left asks for no result

    work.future.add_done_callback(notice)
    with model.batcher.queued(work):
        ended = False
        while not ended:
            await due.wait()
            due.clear()
            ended = work.future.done()
            if (segment := loop.stretch()).tokens:
                yield segment
        await work.future


@HANDLERS.of(Expand)
async def _expand(model: EngineModel, seq: Sequence, op: Expand) -> list[Readout]:
    return await _run(model, seq, Block.of_tree(op.tree, op.start), op.want)


@HANDLERS.of(PartialForward)
async def _partial_forward(model: EngineModel, seq: Sequence, op: PartialForward) -> list[Readout]:
    return await _run(model, seq, Block.of_sketch(op.sketch), op.want, op.sketch.exit)


async def _run(
    model: EngineModel, seq: Sequence, block: Block, want: ReadSpec, exit: Exit | None = None
) -> list[Readout]:
    """Run the rows of a block from `resume` on, and read all of these."""
    table = await model.ready(seq)
    return await model.batcher.submit(QueuedOperation(table, block, True, block.resume, want, exit=exit))


@HANDLERS.of(Read)
async def _read(model: EngineModel, seq: Sequence, op: Read) -> list[Readout]:
    histories = [RowContext(seq, path) for path in op.paths]
    device, runner = model.batcher.device, model.batcher.runner
    async with device.quiet():
        return await device.run(lambda: runner.read(op.states, histories, op.want, op.normed))


@HANDLERS.of(Choose)
async def _choose(model: EngineModel, seq: Sequence, op: Choose) -> list[Readout]:
    return await model.choices.read(op.logits, op.histories(seq, model.vocab_size), op.want)


@HANDLERS.of(Propose)
async def _propose(model: EngineModel, seq: Sequence, op: Propose) -> Proposed:
    """Ask the drafter; a draft model with a vocabulary for drafts is read over it alone."""
    kept = model.draft_vocabulary
    return await op.run(model if kept is None else TrimmedModel(model, model.stores, kept), seq)


@HANDLERS.of(Verify)
async def _verify(model: EngineModel, seq: Sequence, op: Verify) -> VerifyResult:
    table = await model.ready(seq)
    draft, want = op.draft, want_of(op.verifier, seq) | op.want
    free = 0 if draft.extra is None else len(draft.extra.tokens)
    work = QueuedOperation(table, Block.of_tree(draft), True, want=want, num_free=free, want_free=op.want)
    rows = await model.batcher.submit(work)
    # No plan is made before this task has had its turn, so the tree's slots are as the forward left them.
    base = len(table)
    verdict = op.verifier.verdict(seq, draft, rows, model.name)
    table.commit_path(base, verdict.path, [draft.tokens[node] for node in verdict.path])
    return verdict


@HANDLERS.of(PrefillAhead)
async def _prefill_ahead(model: EngineModel, seq: Sequence, op: PrefillAhead) -> None:
    await model.batcher.submit(QueuedOperation(await model.ready(seq), background=True))
