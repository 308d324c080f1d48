"""Answering a chunk of prompts on a pool in this process, one record a prompt."""

from __future__ import annotations

import asyncio
import itertools
import os
from contextlib import aclosing
from dataclasses import dataclass

from decoding.noise import derive_seed
from experiments.grid.cells import Cell, Record
from experiments.grid.scoring import Item, Score, Scorer
from pool.local_pool import LocalPool
from turnout.calls import ChatMessage, Chunk, GenerateCall, TokenOut, Usage
from turnout.errors import Code, TurnoutError

SCORE_S = 900.0  # for one answer: longer than any limit that a scorer may be given
TRANSIENT = {Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.INTERNAL}
# The answer's or the scorer's own fault. All else may pass: a judge comes back, its queue empties, its key is replaced.
LASTING = {Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE}


@dataclass(frozen=True, slots=True)
class Unscored:
    """Reason why an answer has no score, and whether it may get one when it is scored again."""

    why: str
    again: bool = False


def call_of(cell: Cell, item: Item, number: int, pool: str) -> GenerateCall:
    """A prompt as a request.

    Args:
        cell: how it is asked.
        item: the row.
        number: of the row, which decides what is drawn: the same in every way of answering.
        pool: who is asked.
    """
    sampling = cell.sampling.model_copy(update={"seed": derive_seed(cell.seed, number + 1)})
    chat = cell.dataset.chat
    return GenerateCall(
        f"{cell.address[:8]}-{number}",
        pool,
        sampling,
        prompt=None if chat else item.prompt,
        messages=(ChatMessage("user", item.prompt),) if chat else None,
        method=cell.method,
        params={} if cell.policy else cell.params,
        # Of its own: what one cell caches and learns must not help another.
        tenant=f"cell-{cell.address}",
    )


async def answer_chunk(pool: LocalPool, cell: Cell, rows: list[tuple[int, Item]]) -> list[Record]:
    """Answer rows, `cell.load.at_once` at a time, with nothing cached before.

    Args:
        pool: idle.
        cell: how.
        rows: (number in the dataset, row).
    """
    forget(pool)
    slots = asyncio.Semaphore(cell.load.at_once)

    async def one(number: int, item: Item) -> Record:
        async with slots:
            return await _answered(pool, cell, item, number)

    return list(await asyncio.gather(*(one(number, item) for number, item in rows)))


async def score_chunk(pool: LocalPool, cell: Cell, items: list[Item], records: list[Record], scorer: Scorer) -> None:
    """Give each answer its score, as many at once as there are cores: what scores has a time limit of its own."""
    slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def one(item: Item, record: Record) -> None:
        async with slots:
            await scored(pool, cell, item, record, scorer)

    await asyncio.gather(*(one(item, record) for item, record in zip(items, records, strict=True)))


def forget(pool: LocalPool) -> None:
    """Drop cached prefixes: a cell that is resumed finds what it would have found at once."""
    for engine in pool.engines.values():
        engine.pool.clear_cached()


async def scored(pool: LocalPool, cell: Cell, item: Item, record: Record, scorer: Scorer) -> Record:
    """The record with its score; what cannot be scored says why."""
    if record.error:
        record.score = 0.0
        return record
    model = pool.roles[str(cell.params.get("model", "large"))] if cell.method == "plain" else pool.name
    score = await score_of(scorer, item, record.text, pool, model)
    if isinstance(score, Score):
        record.score, record.note, record.again = score.value, score.note, False
    else:
        record.note, record.again = score.why, score.again
    return record


async def score_of(scorer: Scorer, item: Item, text: str, pool: LocalPool | None, model: str) -> Score | Unscored:
    """The score of an answer to a row, or why it has none."""
    try:
        async with asyncio.timeout(SCORE_S):
            return await scorer.score(item, text, pool, model)
    except TurnoutError as error:
        return Unscored(error.message, again=error.code not in LASTING)
    except TimeoutError:
        return Unscored(f"the scorer came to no end within {SCORE_S:g} s", again=True)
    except Exception as error:  # a scorer is user code: its failure costs its prompt, not the cell
        return Unscored(f"the scorer failed: {type(error).__name__}: {error}")


async def _answered(pool: LocalPool, cell: Cell, item: Item, number: int) -> Record:
    try:
        return await answer(pool, call_of(cell, item, number, pool.name), item.id)
    except TurnoutError as error:
        if error.code in TRANSIENT:
            raise
        return Record(item.id, error=error.message)


async def answer(pool: LocalPool, call: GenerateCall, name: str) -> Record:
    """One answer, and what it took.

    Raises:
        TurnoutError: the pool refused or failed.
    """
    record, tokens = Record(name), list[TokenOut]()
    async with aclosing(pool.generate(call)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Chunk):
                record.text += event.text
                tokens += event.tokens
            elif isinstance(event, Usage):
                fill(record, event, pool.roles["large"])
    stretches = itertools.groupby(tokens, key=lambda token: (token.source, token.kind.value))
    record.pieces = [(source, kind, "".join(each.text for each in group)) for (source, kind), group in stretches]
    return record


def fill(record: Record, usage: Usage, large: str) -> None:
    """Note what an answer took; `large` names the large model."""
    record.tokens, record.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
    record.generated = {name: meter.written_tokens for name, meter in usage.models.items()}
    record.by_large = record.generated.get(large, 0)
    record.paper = usage.cost.spent.paper * usage.completion_tokens
    record.flops = usage.cost.spent.flops
    record.flops_large_only = usage.cost.large_only.flops
    record.wall_s, record.ttft_s = usage.wall_s, usage.ttft_s
    record.switches, record.rounds = usage.switches, usage.speculation.rounds
    record.drafted_at = list(usage.speculation.drafted_at)
    record.accepted_at = list(usage.speculation.accepted_at)
